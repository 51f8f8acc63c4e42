"""The state of one setup after an optimizer step, as far as two setups can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.plan.describe_sync import sync_labels
from runner.train.loop import Loop
from runner.train.sharding import full

#: By name, in the model's order; on the CPU.
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """A setup after optimizer step `step` (counted from 1), or its weights only at the start (0) and at the end.

    `samples`: the sorted ids that entered the step, over all workers. `lr`, `loss` (mean over the global batch): None
    at the start and at the end. `skipped`: by the fp16 scaler. `gradients`: rank 0's after clipping, as they enter the
    update; `gradients_of`: what they are the gradient of, since only gradients of the same thing are comparable.
    `weights`: rank 0's parameters and buffers; empty where workers are not synchronised. `replicas`: a worker and a
    parameter that differ from rank 0's, if any.
    """

    step: int
    samples: list[int]
    lr: float | None
    loss: float | None
    skipped: bool
    gradients: Tensors
    gradients_of: str
    weights: Tensors
    replicas: str | None


def snapshots(loop: Loop, log: list[tuple[int, dict[str, float]]], steps: int) -> Iterator[Snapshot]:
    """Snapshots of the start, of the first `steps` optimizer steps, and of the end. `log`: where the loop logs to.

    Every worker has to iterate; only rank 0's snapshots are complete. Raises LedgerError on all workers.
    """
    gradients: Tensors = {}

    def keep_gradients(*_: Any) -> None:
        for name, parameter in loop.model.named_parameters():
            if parameter.grad is not None:
                gradient = full(parameter.grad)
                if loop.backend.rank == 0:
                    gradients[name] = _copy(gradient)

    if loop.backend.rank == 0 or loop.replica.sharded is not None:
        loop.replica.optimizer.register_step_pre_hook(keep_gradients)
    yield _weights_only(loop, 0)
    for step in range(1, steps + 1):
        gradients.clear()
        loop.train(until=step)
        loop.flush()
        assert loop.latest is not None
        samples = torch.cat(loop.backend.all_gather_object(torch.from_numpy(loop.latest.samples)))
        metrics = {name: value for at, logged in log if at == step for name, value in logged.items()}
        log.clear()
        weights, replicas = _common_weights(loop)
        yield Snapshot(
            step=step,
            samples=sorted(samples.tolist()),
            lr=metrics["train/lr"] if loop.backend.rank == 0 else None,
            loss=metrics["train/loss"] if loop.backend.rank == 0 else None,
            skipped=loop.latest.skipped,
            gradients=dict(gradients),
            gradients_of=_gradients_of(loop),
            weights=weights,
            replicas=replicas,
        )
    loop.close_ledger()
    loop.policy.finish()  # with k > 1 the last steps may not be synchronised yet
    yield _weights_only(loop, steps)


def _common_weights(loop: Loop) -> tuple[Tensors, str | None]:
    """The common weights, and a replica that differs, if workers have just synchronised. A collective."""
    if not loop.synchronised:
        return {}, None
    with loop.policy.common_weights():
        return _weights(loop), _replicas(loop)


def _weights_only(loop: Loop, step: int) -> Snapshot:
    return Snapshot(step, [], None, None, False, {}, "", _weights(loop), _replicas(loop))


def _gradients_of(loop: Loop) -> str:
    n, sync = loop.backend.world_size, loop.replica.config.sync
    if n == 1 or sync.always_synchronous:
        return "the global batch"
    return f"worker 0 of {n}, {', '.join(sync_labels(sync))}"


def _copy(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _weights(loop: Loop) -> Tensors:
    weights: Tensors = {}
    for name, tensor in [*loop.model.named_parameters(), *loop.model.named_buffers()]:
        whole = full(tensor)
        if loop.backend.rank == 0:
            weights[name] = _copy(whole)
    return weights


def _replicas(loop: Loop) -> str | None:
    """Compare all workers' parameters bit by bit through a hash of each. A collective.

    Buffers are not compared: running statistics differ between workers until they are averaged or saved.
    """
    if loop.backend.world_size == 1 or loop.replica.sharded is not None:
        return None
    names = [name for name, _ in loop.model.named_parameters()]
    of_rank = loop.backend.all_gather_object([_hash(parameter) for parameter in loop.model.parameters()])
    for rank, hashes in enumerate(of_rank):
        different = [name for name, one, first in zip(names, hashes, of_rank[0], strict=True) if one != first]
        if different:
            more = f" (and in {len(different) - 1} more)" if len(different) > 1 else ""
            return f"worker {rank} has other bits than worker 0 in {different[0]}{more}"
    return None


def _hash(tensor: Tensor) -> bytes:
    return hashlib.sha256(_copy(tensor).view(-1).view(torch.uint8).numpy().tobytes()).digest()
