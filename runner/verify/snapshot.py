"""What one setup looks like after an optimizer step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runner.loop import Loop

#: By name, in the model's order; fp32 or fp64, on the CPU.
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """A setup after optimizer step `step` (counted from 1; 0 is the start, which has weights only).

    `samples`: the ids that entered the step, over all workers, sorted. `loss`: mean over the global batch. `gradients`:
    as they enter the update, clipped and averaged over workers; empty where workers step alone (k > 1). `weights`:
    empty where workers are not synchronised. `apart`: a worker and a weight of it that rank 0 has not the same bits of.
    """

    step: int
    samples: np.ndarray
    lr: float
    loss: float
    gradients: Tensors
    weights: Tensors
    apart: str | None

    def save(self, path: Path) -> None:
        facts = {"step": self.step, "lr": self.lr, "loss": self.loss, "apart": self.apart}
        tensors = {
            "samples": torch.from_numpy(self.samples),
            **{f"gradient {name}": tensor for name, tensor in self.gradients.items()},
            **{f"weight {name}": tensor for name, tensor in self.weights.items()},
        }
        save_file(tensors, path, metadata={"facts": json.dumps(facts), "order": json.dumps(list(tensors))})

    @staticmethod
    def load(path: Path) -> Snapshot:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in json.loads(file.metadata()["order"])}

        def part(kind: str) -> Tensors:
            return {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}

        return Snapshot(
            samples=tensors["samples"].numpy(), gradients=part("gradient "), weights=part("weight "), **facts
        )


def snapshots(loop: Loop, log: list[tuple[int, dict[str, float]]], steps: int) -> Iterator[Snapshot]:
    """The start, and each of the first `steps` optimizer steps, of a loop that writes its metrics to `log`.

    Every worker has to iterate; only rank 0's snapshots are whole. Raises LedgerError, on all workers alike.
    """
    gradients: Tensors = {}
    synchronous = loop.plan.k == 1 or loop.backend.world_size == 1

    def keep_gradients(*_: Any) -> None:
        for name, parameter in loop.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = _copy(parameter.grad)

    if synchronous and loop.backend.rank == 0:
        loop.optimizer.register_step_pre_hook(keep_gradients)
    yield Snapshot(0, np.zeros(0, dtype=np.int64), 0.0, 0.0, {}, _weights(loop), _apart(loop))
    for step in range(1, min(steps, loop.plan.optimizer_steps) + 1):
        gradients.clear()
        loop.train(until=step)
        loop.flush()
        samples = torch.cat(loop.backend.gather_rows(torch.from_numpy(loop.last_samples)))
        metrics = {name: value for at, logged in log if at == step for name, value in logged.items()}
        log.clear()
        yield Snapshot(
            step=step,
            samples=np.sort(samples.numpy()),
            lr=metrics.get("train/lr", 0.0),
            loss=metrics.get("train/loss", 0.0),
            gradients=dict(gradients),
            weights=_weights(loop) if loop.synchronised else {},
            apart=_apart(loop) if loop.synchronised else None,
        )
    loop.close_ledger()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _all_weights(loop: Loop) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the floating-point statistics that belong to a model as much as they do."""
    yield from loop.model.named_parameters()
    yield from ((name, buffer) for name, buffer in loop.model.named_buffers() if buffer.is_floating_point())


def _weights(loop: Loop) -> Tensors:
    return {name: _copy(tensor) for name, tensor in _all_weights(loop)} if loop.backend.rank == 0 else {}


def _apart(loop: Loop) -> str | None:
    """Compare all workers' weights bit by bit, through a hash of each. A collective."""
    if loop.backend.world_size == 1:
        return None
    names = [name for name, _ in _all_weights(loop)]
    hashes = [hashlib.sha256(_copy(tensor).contiguous().numpy().tobytes()).digest() for _, tensor in _all_weights(loop)]
    mine = torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.uint8).view(len(names), -1)
    of_rank = loop.backend.gather_rows(mine)
    for rank, theirs in enumerate(of_rank):
        different = (theirs != of_rank[0]).any(1).nonzero().flatten().tolist()
        if different:
            more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            return f"worker {rank} has other bits in {names[different[0]]}{more} than worker 0"
    return None
