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

from runner.plan.describe_sync import sync_labels
from runner.train.loop import Loop

#: By name, in the model's order; on the CPU.
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """A setup after optimizer step `step` (counted from 1), or its weights alone at the start (0) and at the end.

    `samples`: the ids that entered the step, over all workers, sorted. `lr`, `loss` (mean over the global batch): None
    at the start and at the end. `skipped`: by the fp16 scaler. `gradients`: rank 0's, as they enter the update, after
    clipping; `gradients_of`: what they are the gradient of, and so what they can be compared with. `weights`: rank 0's;
    empty where workers are not synchronised. `replicas`: a worker and a weight that rank 0 has not the same bits of.
    """

    step: int
    samples: np.ndarray
    lr: float | None
    loss: float | None
    skipped: bool
    gradients: Tensors
    gradients_of: str
    weights: Tensors
    replicas: str | None

    def save(self, path: Path) -> None:
        tensors = {
            "samples": torch.from_numpy(self.samples),
            **{f"gradient {name}": tensor for name, tensor in self.gradients.items()},
            **{f"weight {name}": tensor for name, tensor in self.weights.items()},
        }
        facts = {name: getattr(self, name) for name in ("step", "lr", "loss", "skipped", "gradients_of", "replicas")}
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
    """The start, each of the first `steps` optimizer steps, and the end, of a loop that writes its metrics to `log`.

    Every worker has to iterate; only rank 0's snapshots are whole. Raises LedgerError, on all workers alike.
    """
    gradients: Tensors = {}

    def keep_gradients(*_: Any) -> None:
        for name, parameter in loop.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = _copy(parameter.grad)

    if loop.backend.rank == 0:
        loop.optimizer.register_step_pre_hook(keep_gradients)
    yield _weights_only(loop, 0)
    for step in range(1, steps + 1):
        gradients.clear()
        loop.train(until=step)
        loop.flush()
        samples = torch.cat(loop.backend.gather_rows(torch.from_numpy(loop.last_samples)))
        metrics = {name: value for at, logged in log if at == step for name, value in logged.items()}
        log.clear()
        weights, replicas = _common(loop)
        yield Snapshot(
            step=step,
            samples=np.sort(samples.numpy()),
            lr=metrics["train/lr"] if loop.backend.rank == 0 else None,
            loss=metrics["train/loss"] if loop.backend.rank == 0 else None,
            skipped=loop.last_skipped,
            gradients=dict(gradients),
            gradients_of=_gradients_of(loop),
            weights=weights,
            replicas=replicas,
        )
    loop.close_ledger()
    loop.policy.finish()  # with k > 1 the last steps may not have been brought together yet
    yield _weights_only(loop, steps)


def _common(loop: Loop) -> tuple[Tensors, str | None]:
    """Common weights, and a replica that has others, where workers have just reached some. A collective."""
    if not loop.synchronised:
        return {}, None
    with loop.policy.common_weights():
        return _weights(loop), _replicas(loop)


def _weights_only(loop: Loop, step: int) -> Snapshot:
    nothing = np.zeros(0, dtype=np.int64)
    return Snapshot(step, nothing, None, None, False, {}, "", _weights(loop), _replicas(loop))


def _gradients_of(loop: Loop) -> str:
    """Workers that step alone have gradients of their own share."""
    n, sync = loop.backend.world_size, loop.config.sync
    if n == 1 or sync.always_synchronous:
        return "the global batch"
    return f"worker 0 of {n}, {', '.join(sync_labels(sync))}"


def _copy(tensor: Tensor) -> Tensor:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _all_weights(loop: Loop) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that belong to a model as much as they do."""
    yield from loop.model.named_parameters()
    yield from loop.model.named_buffers()


def _weights(loop: Loop) -> Tensors:
    return {name: _copy(tensor) for name, tensor in _all_weights(loop)} if loop.backend.rank == 0 else {}


def _replicas(loop: Loop) -> str | None:
    """Compare all workers' parameters bit by bit, through a hash of each. A collective.

    Buffers are left out: running statistics are each worker's own until they are averaged or saved.
    """
    if loop.backend.world_size == 1:
        return None
    names = [name for name, _ in loop.model.named_parameters()]
    hashes = [hashlib.sha256(_bytes(parameter)).digest() for parameter in loop.model.parameters()]
    mine = torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.uint8).view(len(names), -1)
    of_rank = loop.backend.gather_rows(mine)
    for rank, theirs in enumerate(of_rank):
        different = (theirs != of_rank[0]).any(1).nonzero().flatten().tolist()
        if different:
            more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            return f"worker {rank} has other bits in {names[different[0]]}{more} than worker 0"
    return None


def _bytes(tensor: Tensor) -> bytes:
    return _copy(tensor).view(-1).view(torch.uint8).numpy().tobytes()
