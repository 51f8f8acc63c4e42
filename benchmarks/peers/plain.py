"""The training as one writes it with PyTorch alone: one process of one or two."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers import peer


def main() -> None:
    chosen = peer.arguments()
    notes = peer.Notes(chosen)
    torch.manual_seed(chosen.seed)
    cuda, alone = chosen.device == "cuda", "RANK" not in os.environ
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not alone:
        dist.init_process_group("nccl" if cuda else "gloo")
    rows, collate = peer.data(chosen)
    loader = DataLoader(
        rows,
        batch_size=chosen.batch,
        sampler=None if alone else DistributedSampler(rows, shuffle=False),
        collate_fn=collate,
        num_workers=chosen.loader_workers,
        pin_memory=cuda,
    )
    model = network = peer.model(chosen).to(device)
    optimizer, schedule = peer.optimizer(model, chosen)
    if not alone:
        network = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if chosen.compile:
        network = torch.compile(network)
    network.train()
    for number, batch in enumerate(loader, start=1):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=chosen.precision == "bf16"):
            loss = network(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), peer.CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        notes.step(loss)
        if number == chosen.steps:
            break
    if alone or dist.get_rank() == 0:
        model.save_pretrained(chosen.out.with_suffix(".model"))
    notes.close()
    peer.end()


if __name__ == "__main__":
    main()
