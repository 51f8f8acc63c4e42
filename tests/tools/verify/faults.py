"""Known mistakes of distributed training, injected into the loop of one setup."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from runner.backends import Backend
from runner.exact import exact_streams
from runner.plan.order import DataOrder, cut
from runner.tools.verify.lockstep import Frame, frames
from runner.train.loop import Loop
from runner.train.seeds import set_seed, worker_seed
from runner.train.step import StepDone
from tests.replicas import make_loop

Fault = Callable[[Loop, Backend], contextlib.AbstractContextManager[Any]]


def replay(backend: Backend, overrides: list[str], steps: int, fault: str | None = None) -> list[Frame]:
    """All frames of a setup on the workers of `backend`, with a fault; only rank 0's are complete."""
    log: list[Any] = []
    loop = make_loop(backend, overrides, log)
    with FAULTS[fault](loop, backend) if fault else contextlib.nullcontext():
        seen = list(frames(loop, log, steps, "b"))
    loop.policy.close()
    return seen


def _every_rank_reads_everything(loop: Loop, backend: Backend) -> Any:
    order, steps = loop.order, loop.plan.accumulation_steps
    return mock.patch.object(order, "micro_batches", lambda epoch, step: cut(order.global_batch(epoch, step), steps))


def _tail(loop: Loop, change: Callable[[list[np.ndarray], np.ndarray], list[np.ndarray]]) -> Any:
    """Deal the short last batch of each epoch differently. `change(micro-batches, whole tail)`."""
    order, right = loop.order, loop.order.micro_batches

    def micro_batches(epoch: int, step: Any) -> list[np.ndarray]:
        dealt = right(epoch, step)
        return change(dealt, order.global_batch(epoch, step)) if step.samples < loop.plan.global_batch else dealt

    return mock.patch.object(order, "micro_batches", micro_batches)


def _duplicated_tail(loop: Loop, backend: Backend) -> Any:
    # As torch's DistributedSampler does: shares are filled up from the beginning to equal length.
    def fill_up(dealt: list[np.ndarray], tail: np.ndarray) -> list[np.ndarray]:
        own = sum(map(len, dealt))
        missing = -(-len(tail) // backend.world_size) - own
        return [*dealt, tail[:missing]] if missing else dealt

    return _tail(loop, fill_up)


def _dropped_tail(loop: Loop, backend: Backend) -> Any:
    return _tail(loop, lambda dealt, tail: [])


def _gradients_halved(loop: Loop, backend: Backend) -> Any:
    right = loop.policy.loss_divisor
    return mock.patch.object(loop.policy, "loss_divisor", lambda facts: 2 * right(facts))


def _mean_of_means(loop: Loop, backend: Backend) -> Any:
    # Each worker divides by its own count, and DDP averages over workers.
    return mock.patch.object(loop.policy, "loss_divisor", lambda facts: max(facts.local_count, 1))


def _learning_rate_scaled_twice(loop: Loop, backend: Backend) -> Any:
    right, factor = loop.step.learning_rate.at, loop.plan.lr_factor
    return mock.patch.object(loop.step.learning_rate, "at", lambda seen: factor * right(seen))


def _scheduler_stepped_per_process(loop: Loop, backend: Backend) -> Any:
    right, total = loop.step.learning_rate.at, loop.plan.total_samples
    return mock.patch.object(loop.step.learning_rate, "at", lambda seen: right(min(seen * backend.world_size, total)))


def _data_seed_of_one_rank(loop: Loop, backend: Backend) -> Any:
    order = DataOrder(loop.plan, loop.replica.config.seed + backend.rank, backend.rank, None)
    return mock.patch.object(loop.order, "micro_batches", order.micro_batches)


def _new_weights_of_one_rank(loop: Loop, backend: Backend) -> Any:
    set_seed(backend.rank)
    if backend.rank:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    return contextlib.nullcontext()


def _dropout_seed_of_one_rank(loop: Loop, backend: Backend) -> Any:
    return mock.patch.object(loop.step, "_dropout", exact_streams(loop.replica.config.seed + (backend.rank == 1)))


def _dropout_keyed_by_rank(loop: Loop, backend: Backend) -> Any:
    return mock.patch.object(loop.step, "_dropout", exact_streams(worker_seed(loop.replica.config.seed, backend.rank)))


def _dropout_keyed_by_flat_index(loop: Loop, backend: Backend) -> Any:
    from runner.exact import dropout, stream

    def keep_mask(keys: torch.Tensor, site: int, shape: tuple[int, ...], p: float) -> torch.Tensor:
        # One stream for the whole micro-batch, read element by element.
        return stream.keep_mask(torch.zeros_like(keys[:1]), site, (1, int(np.prod(shape))), p).view(shape)

    return mock.patch.object(dropout, "keep_mask", keep_mask)


def _micro_batch_skipped(loop: Loop, backend: Backend) -> Any:
    right = loop.step.run

    def skipping(done: int, step: Any, ids: list[np.ndarray], micro_batches: Iterator[Any]) -> StepDone:
        if backend.rank == 0 and len(ids) > 1:
            next(micro_batches)
            ids, micro_batches = ids[1:], itertools.islice(micro_batches, len(ids) - 1)
        return right(done, step, ids, micro_batches)

    return mock.patch.object(loop.step, "run", skipping)


def _filler_that_counts(loop: Loop, backend: Backend) -> Any:
    return mock.patch("runner.data.loader.without_targets", lambda batch, rows: batch)


FAULTS: dict[str, Fault] = {
    "every rank reads all the data": _every_rank_reads_everything,
    "a duplicated tail": _duplicated_tail,
    "a dropped tail": _dropped_tail,
    "gradients halved": _gradients_halved,
    "mean of means": _mean_of_means,
    "learning rate scaled twice": _learning_rate_scaled_twice,
    "scheduler stepped per process": _scheduler_stepped_per_process,
    "another data seed on one rank": _data_seed_of_one_rank,
    "other new weights on one rank": _new_weights_of_one_rank,
    "another dropout seed on one rank": _dropout_seed_of_one_rank,
    "dropout keyed by rank": _dropout_keyed_by_rank,
    "dropout keyed by flat index": _dropout_keyed_by_flat_index,
    "one micro-batch skipped": _micro_batch_skipped,
    "a filler row that counts": _filler_that_counts,
}
