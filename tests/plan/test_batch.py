"""Batch sizes: which are derived, and which do not divide."""

from __future__ import annotations

import re

import pytest

from runner.errors import UserError
from runner.plan import BatchSizes, batch_sizes, equivalent_micro_batches


@pytest.mark.parametrize(("global_batch", "per_worker"), [(256, (256, 128, 32)), (32, (32, 16, 4))])
def test_published_table_of_equivalent_batches(global_batch: int, per_worker: tuple[int, int, int]) -> None:
    """The same global batch on 1, 2 and 8 workers, in samples per worker."""
    sizes = [batch_sizes(world_size=n, global_batch=global_batch, accumulation_steps=1) for n in (1, 2, 8)]
    assert tuple(s.micro_batch for s in sizes) == per_worker
    assert tuple(equivalent_micro_batches(global_batch, (1, 2, 8)).values()) == per_worker


def test_equivalents_are_none_where_nothing_divides() -> None:
    assert equivalent_micro_batches(12) == {1: 12, 2: 6, 4: 3, 8: None}


@pytest.mark.parametrize(
    ("world_size", "global_batch", "accumulation_steps", "micro_batch", "replica_batch"),
    [(1, 48, 1, 48, 48), (4, 48, 3, 4, 12), (3, 48, 4, 4, 16), (1, 7, 7, 1, 7)],
)
def test_fixed_global_derives_the_micro_batch(
    world_size: int, global_batch: int, accumulation_steps: int, micro_batch: int, replica_batch: int
) -> None:
    sizes = batch_sizes(world_size=world_size, global_batch=global_batch, accumulation_steps=accumulation_steps)
    assert sizes == BatchSizes.of_equal_shares(world_size, micro_batch, accumulation_steps)
    assert (sizes.replica_batch, sizes.global_batch) == (replica_batch, global_batch)


def test_per_device_multiplies() -> None:
    assert batch_sizes(world_size=8, micro_batch=5, accumulation_steps=3).global_batch == 120


@pytest.mark.parametrize(
    ("world_size", "global_batch", "limit", "steps", "micro_batch"),
    [
        (1, 48, 48, 1, 48),
        (1, 48, 16, 3, 16),
        (1, 48, 7, 8, 6),  # 7 steps would fit but do not divide
        (2, 48, 16, 2, 12),
        (1, 13, 12, 13, 1),
    ],
)
def test_auto_takes_the_fewest_steps_that_fit(
    world_size: int, global_batch: int, limit: int, steps: int, micro_batch: int
) -> None:
    sizes = batch_sizes(world_size=world_size, global_batch=global_batch, max_micro_batch=limit)
    assert sizes == BatchSizes.of_equal_shares(world_size, micro_batch, steps)


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ({"world_size": 4, "global_batch": 50, "accumulation_steps": 1}, "4 worker.* 48 and 52$"),
        ({"world_size": 8, "global_batch": 100, "accumulation_steps": 3}, "8 worker.* 96 and 120$"),
        ({"world_size": 8, "global_batch": 8, "accumulation_steps": 2}, "8 worker.*batch.global_batch=16 or more"),
    ],
)
def test_a_size_that_does_not_divide(sizes: dict[str, int], numbers: str) -> None:
    """The error names both numbers and the nearest sizes that do divide."""
    with pytest.raises(UserError, match=rf"^batch\.global_batch={sizes['global_batch']} .*{numbers}"):
        batch_sizes(**sizes)


def test_auto_has_nothing_to_derive_per_device() -> None:
    with pytest.raises(UserError, match=re.escape("choose accumulation=fixed or batch=fixed_global")):
        batch_sizes(world_size=2, micro_batch=8, max_micro_batch=4)
