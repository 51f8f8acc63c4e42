"""The training with Hugging Face Accelerate, as its documentation has it: one process of one or two."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from benchmarks.peers import peer


def main() -> None:
    chosen = peer.arguments()
    notes = peer.Notes(chosen)
    mixed = "bf16" if chosen.precision == "bf16" else "no"
    accelerator = Accelerator(cpu=chosen.device == "cpu", mixed_precision=mixed)
    set_seed(chosen.seed)
    rows, collate = peer.data(chosen)
    pinned = chosen.device == "cuda"
    loader = DataLoader(
        rows, batch_size=chosen.batch, collate_fn=collate, num_workers=chosen.loader_workers, pin_memory=pinned
    )
    model = peer.model(chosen)
    optimizer, schedule = peer.optimizer(model, chosen)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if chosen.compile:
        model = torch.compile(model)
    model.train()
    for number, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), peer.CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        notes.step(loss)
        if number == chosen.steps:
            break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(chosen.out.with_suffix(".model"))
    notes.close()
    peer.end()


if __name__ == "__main__":
    main()
