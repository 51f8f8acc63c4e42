"""The batch sizes of a setup, in samples."""

from __future__ import annotations

from dataclasses import dataclass

from runner.errors import UserError, require
from runner.plan.shards import shards_by_worker, used_shards


@dataclass(frozen=True)
class BatchSizes:
    """Workers, micro-batches per optimizer step, and samples. Where shares differ, those of the largest."""

    world_size: int
    micro_batch: int
    accumulation_steps: int
    replica_batch: int
    global_batch: int

    @staticmethod
    def of_equal_shares(world_size: int, micro_batch: int, accumulation_steps: int) -> BatchSizes:
        """`global_batch = micro_batch × accumulation_steps × world_size`."""
        replica_batch = micro_batch * accumulation_steps
        return BatchSizes(world_size, micro_batch, accumulation_steps, replica_batch, replica_batch * world_size)


def batch_sizes(
    *,
    world_size: int,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    accumulation_steps: int | None = None,
    max_micro_batch: int | None = None,
) -> BatchSizes:
    """Derive the size that is not given.

    Exactly one of `global_batch` (fixed global) and `micro_batch` (per device) is given, and exactly one of
    `accumulation_steps` and `max_micro_batch`; the latter takes the fewest steps that keep `micro_batch` within it.
    Raises UserError if a size does not divide, naming both numbers and the nearest sizes that do.
    """
    assert (global_batch is None) != (micro_batch is None)
    assert (accumulation_steps is None) != (max_micro_batch is None)
    if micro_batch is not None:
        if accumulation_steps is None:
            raise UserError(
                "accumulation=auto derives the micro-batch, which batch=per_device gives: "
                "choose accumulation=fixed or batch=fixed_global"
            )
        return BatchSizes.of_equal_shares(world_size, micro_batch, accumulation_steps)

    assert global_batch is not None
    if accumulation_steps is None:
        assert max_micro_batch is not None
        accumulation_steps = _fewest_steps(_divide(global_batch, world_size, 1), max_micro_batch)
    micro_batch = _divide(global_batch, world_size, accumulation_steps)
    return BatchSizes.of_equal_shares(world_size, micro_batch, accumulation_steps)


def uneven_sizes(world_size: int, global_batch: int, accumulation_steps: int) -> BatchSizes:
    """The sizes of a global batch that is dealt as evenly as possible, whether it divides or not."""
    replica_batch = -(-global_batch // world_size)
    micro_batch = -(-replica_batch // accumulation_steps)
    return BatchSizes(world_size, micro_batch, accumulation_steps, replica_batch, global_batch)


def sharded_sizes(world_size: int, global_batch: int, shards: int) -> BatchSizes:
    """The sizes of a global batch of shards, which a worker trains one by one. Raises UserError for too few shards."""
    used = used_shards(global_batch, shards)
    name, limit = ("equivalence.shards", shards) if shards <= global_batch else ("batch.global_batch", global_batch)
    require(world_size <= used, name, limit, f"use at least 1 for each of {world_size} workers")
    workers = shards_by_worker(used, world_size)
    samples = [sum(len(range(shard, global_batch, used)) for shard in own) for own in workers]
    return BatchSizes(world_size, -(-global_batch // used), max(map(len, workers)), max(samples), global_batch)


def _fewest_steps(replica_batch: int, max_micro_batch: int) -> int:
    # replica_batch itself always qualifies: micro-batches of one sample.
    return next(
        steps
        for steps in range(1, replica_batch + 1)
        if replica_batch % steps == 0 and replica_batch // steps <= max_micro_batch
    )


def _divide(global_batch: int, world_size: int, accumulation_steps: int) -> int:
    parts = world_size * accumulation_steps
    if global_batch < parts:
        raise UserError(
            f"batch.global_batch={global_batch} is less than the {parts} micro-batches of "
            f"{world_size} worker(s) × accumulation.steps={accumulation_steps}: "
            f"set batch.global_batch={parts} or more, or use fewer workers or steps"
        )
    if global_batch % parts:
        below = global_batch // parts * parts
        raise UserError(
            f"batch.global_batch={global_batch} does not divide into {parts} micro-batches of equal size "
            f"({world_size} worker(s) × accumulation.steps={accumulation_steps}): "
            f"the nearest sizes that do are {below} and {below + parts}"
        )
    return global_batch // parts


def equivalent_micro_batches(global_batch: int, workers: tuple[int, ...] = (1, 2, 4, 8)) -> dict[int, int | None]:
    """Samples per worker and step that keep `global_batch`, for each world size; None where it does not divide."""
    return {n: global_batch // n if global_batch % n == 0 else None for n in workers}
