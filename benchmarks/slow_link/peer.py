"""The same training with Hugging Face Accelerate, as its documentation has it: one process of one or two.

Started by `worlds.py` with torch's environment variables. Rank 0 leaves `--result`, JSON: `moments`, [optimizer step,
seconds] whenever the workers have come together; `sync_s`, the seconds spent in averages of weights; `closing_s`;
`bytes_each`, of all weights.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

_TEXT, _LABEL = 3, 1  # columns of CoLA's files
_MAX_LENGTH = 128


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--k", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--local-sgd", action="store_true")
    parser.add_argument("--fp16-gradients", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


def _loader(arguments: argparse.Namespace) -> DataLoader:
    """Batches padded to their longest row, in the order in which the runner reads the data."""
    rows = [line.split("\t") for line in arguments.train.read_text(encoding="utf-8").splitlines()]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    data = [
        {**tokenizer(rows[i][_TEXT], truncation=True, max_length=_MAX_LENGTH), "labels": int(rows[i][_LABEL])}
        for i in order
    ]
    return DataLoader(data, batch_size=arguments.batch, collate_fn=DataCollatorWithPadding(tokenizer))


def main() -> None:
    arguments = _arguments()
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[hook] if arguments.fp16_gradients else [])
    set_seed(arguments.seed)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(arguments))
    model.train()

    moments, sync_s = [], 0.0
    with LocalSGD(accelerator, model, local_sgd_steps=arguments.k, enabled=arguments.local_sgd) as local_sgd:
        for step, batch in enumerate(loader, start=1):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            before = time.perf_counter()
            local_sgd.step()
            if step % arguments.k == 0:
                moments.append((step, time.perf_counter()))
                sync_s += moments[-1][1] - before
            if step == arguments.steps:
                break
        left = time.perf_counter()
    closing_s = time.perf_counter() - left

    if accelerator.is_main_process:
        found = {"moments": moments, "sync_s": sync_s, "closing_s": closing_s, "bytes_each": size}
        arguments.result.write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
