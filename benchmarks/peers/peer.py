"""What the peers' scripts have in common: arguments, data, model, optimizer, and the notes that they leave."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoTokenizer, DataCollatorWithPadding, default_data_collator, get_linear_schedule_with_warmup

from benchmarks.peers.cells import EVERY
from benchmarks.peers.material import MODELS

CLIP_NORM, WEIGHT_DECAY, WARMUP_SHARE = 1.0, 0.01, 0.1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of one worker")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("--grouped", action="store_true")
    found = parser.parse_args()
    found.warmup = round(WARMUP_SHARE * found.steps)
    #: On a CPU that computes with all of its cores, loader processes take time from them.
    found.loader_workers = 4 if found.device == "cuda" else 0
    if found.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    return found


def data(chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], Callable[..., Any]]:
    """Tokenised rows, and what makes a batch of them: padded to the longest row, not further."""
    rows: list[dict[str, Any]] = json.loads(chosen.rows.read_text(encoding="utf-8"))
    if chosen.task == "gpt2":  # blocks
        return rows, default_data_collator
    return rows, DataCollatorWithPadding(AutoTokenizer.from_pretrained(chosen.model))


def model(chosen: argparse.Namespace) -> nn.Module:
    attention = "flash_attention_2" if chosen.flash else "sdpa"
    found: nn.Module = MODELS[chosen.task].from_pretrained(chosen.model, attn_implementation=attention)
    return found


def optimizer(network: nn.Module, chosen: argparse.Namespace) -> tuple[AdamW, LRScheduler]:
    """Fused AdamW, without weight decay of biases and norms."""
    weights = list(network.parameters())
    groups = [
        {"params": [one for one in weights if one.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in weights if one.ndim < 2], "weight_decay": 0.0},
    ]
    found = AdamW(groups, lr=chosen.lr, fused=True)
    return found, get_linear_schedule_with_warmup(found, chosen.warmup, chosen.steps)


class Notes:
    """Rank 0 leaves a line of JSON for the steps at which the runner logs, and at the end one with all mean losses."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._file = chosen.out.open("a", encoding="utf-8") if os.environ.get("RANK", "0") == "0" else None
        self._last = chosen.steps
        self._losses: list[Tensor] = []

    def step(self, loss: Tensor) -> None:
        """Called after each optimizer step, with this worker's loss."""
        self._losses.append(loss.detach())
        number = len(self._losses)
        if self._file and (number % EVERY == 1 or number == self._last):
            if loss.is_cuda:
                torch.cuda.synchronize()
            self._write({"step": number, "seconds": time.time()})

    def close(self) -> None:
        """Called by every worker."""
        losses = torch.stack(self._losses).float()
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        if self._file:
            self._write({"losses": losses.tolist()})
            self._file.close()

    def _write(self, said: dict[str, Any]) -> None:
        assert self._file
        self._file.write(json.dumps(said) + "\n")
        self._file.flush()


def end() -> None:
    """End the process at once: destroying DDP and its gloo group can wait forever for Python's lock."""
    sys.stdout.flush()
    os._exit(0)


def read(notes: Path) -> tuple[list[tuple[int, float]], list[float]]:
    """(step, seconds since the epoch) of some steps, and the loss of each step."""
    lines: Sequence[dict[str, Any]] = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["seconds"]) for line in lines[:-1]], lines[-1]["losses"]
