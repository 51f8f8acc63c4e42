"""A training script as people write them, with Accelerate: torchrun starts it, and its argument names a mistake."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForTokenClassification, get_linear_schedule_with_warmup

from runner.audit import Audit

SAMPLES, EPOCHS, BATCH = 64, 2, 4


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of 8 labelled tokens, or of 1 to 8, so that batches have different numbers of labels."""

    def __init__(self, uneven: bool) -> None:
        self._uneven = uneven

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(5, 50, (8,), generator=generator)
        mask = (torch.arange(8) <= (number % 8 if self._uneven else 8)).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask == 1, tokens % 3, -100)}


def end() -> None:
    """End this process at once: torch's process group and DDP do not always survive the end of the interpreter."""
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def main(mistake: str, folder: str) -> None:
    uneven = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=uneven)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForTokenClassification(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Tokens(uneven=mistake == "mean of means")
    # A process loads the data of the right script. It is not forked: forking a process with gloo's threads can hang.
    extra: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver"} if mistake == "none" else {}
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(data, batch_size=BATCH, shuffle=True, **extra)
    if mistake == "same order":
        loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    steps = EPOCHS * SAMPLES // (BATCH * 2 * accelerator.num_processes)
    if mistake == "schedule too long":
        steps *= 2
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    if mistake not in ("loader not prepared", "same order"):
        loader = accelerator.prepare(loader)
    if mistake == "model not prepared":
        model = accelerator.unwrap_model(model)

    audit = Audit(model, optimizer, loader, folder, gradient_step=2)
    model.train()
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss * (2 if mistake == "not divided" else 1))
                optimizer.step()
                if accelerator.sync_gradients or mistake == "stepped in every batch":
                    scheduler.step()
                    if mistake == "stepped by every process":
                        scheduler.step()
                optimizer.zero_grad()
    audit.finish()
    end()


if __name__ == "__main__":
    main(*sys.argv[1:])
