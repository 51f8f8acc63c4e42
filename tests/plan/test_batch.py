"""Batch sizes: what is derived from what, and what is said of sizes that do not divide."""

from __future__ import annotations

import pytest

from runner.errors import UserError
from runner.plan import BatchSizes, batch_sizes, equivalent_micro_batches


@pytest.mark.parametrize(
    ("global_batch", "per_worker"),
    [(256, (256, 128, 32)), (128, (128, 64, 16)), (64, (64, 32, 8)), (32, (32, 16, 4))],
)
def test_published_table_of_equivalent_batches(global_batch: int, per_worker: tuple[int, int, int]) -> None:
    """The published table holds: the same global batch on 1, 2 and 8 workers, in samples per worker."""
    sizes = [batch_sizes(world_size=n, global_batch=global_batch, accumulation_steps=1) for n in (1, 2, 8)]
    assert tuple(s.micro_batch for s in sizes) == per_worker
    assert [s.global_batch for s in sizes] == [global_batch] * 3
    assert tuple(equivalent_micro_batches(global_batch, (1, 2, 8)).values()) == per_worker


def test_equivalents_are_left_open_where_nothing_divides() -> None:
    """A world size that does not divide the global batch gets None, not a rounded number."""
    assert equivalent_micro_batches(12) == {1: 12, 2: 6, 4: 3, 8: None}


@pytest.mark.parametrize(
    ("world_size", "global_batch", "accumulation_steps", "micro_batch", "replica_batch"),
    [
        (1, 48, 1, 48, 48),
        (4, 48, 3, 4, 12),
        (8, 96, 2, 6, 12),
        (3, 48, 4, 4, 16),
        (6, 48, 8, 1, 8),
        (1, 7, 7, 1, 7),
    ],
)
def test_fixed_global_derives_the_micro_batch(
    world_size: int, global_batch: int, accumulation_steps: int, micro_batch: int, replica_batch: int
) -> None:
    """A given global batch is divided by workers and by accumulation; a worker's step sees all its micro-batches."""
    sizes = batch_sizes(world_size=world_size, global_batch=global_batch, accumulation_steps=accumulation_steps)
    assert sizes == BatchSizes(micro_batch, accumulation_steps, world_size)
    assert (sizes.replica_batch, sizes.global_batch) == (replica_batch, global_batch)


@pytest.mark.parametrize(
    ("world_size", "micro_batch", "accumulation_steps", "global_batch"),
    [(1, 32, 1, 32), (4, 32, 1, 128), (2, 32, 4, 256), (8, 5, 3, 120)],
)
def test_per_device_multiplies(world_size: int, micro_batch: int, accumulation_steps: int, global_batch: int) -> None:
    """With the micro-batch given, workers and accumulation multiply the global batch."""
    sizes = batch_sizes(world_size=world_size, micro_batch=micro_batch, accumulation_steps=accumulation_steps)
    assert (sizes.micro_batch, sizes.global_batch) == (micro_batch, global_batch)


@pytest.mark.parametrize(
    ("world_size", "global_batch", "limit", "steps", "micro_batch"),
    [
        (1, 48, 48, 1, 48),  # fits as it is
        (1, 48, 47, 2, 24),
        (1, 48, 16, 3, 16),  # the limit itself is allowed
        (1, 48, 15, 4, 12),
        (1, 48, 7, 8, 6),  # 7 steps would fit but do not divide
        (2, 48, 16, 2, 12),
        (8, 48, 16, 1, 6),
        (1, 13, 12, 13, 1),  # a prime falls down to single samples
        (1, 48, 1, 48, 1),
    ],
)
def test_auto_takes_the_fewest_steps_that_fit(
    world_size: int, global_batch: int, limit: int, steps: int, micro_batch: int
) -> None:
    """Automatic accumulation takes the smallest divisor of the replica batch that keeps within the limit."""
    sizes = batch_sizes(world_size=world_size, global_batch=global_batch, max_micro_batch=limit)
    assert (sizes.accumulation_steps, sizes.micro_batch) == (steps, micro_batch)
    assert sizes.global_batch == global_batch


@pytest.mark.parametrize(
    ("world_size", "global_batch", "accumulation_steps", "numbers"),
    [
        (4, 50, 1, ("50", "4 worker", "48", "52")),
        (8, 100, 3, ("100", "24", "8 worker", "accumulation.steps=3", "96", "120")),
        (2, 3, 1, ("3", "2 worker", "2", "4")),
        (7, 48, 1, ("48", "7 worker", "42", "49")),
    ],
)
def test_size_that_does_not_divide(
    world_size: int, global_batch: int, accumulation_steps: int, numbers: tuple[str, ...]
) -> None:
    """The error names the setting, both numbers, and the nearest sizes below and above that do divide."""
    with pytest.raises(UserError) as caught:
        batch_sizes(world_size=world_size, global_batch=global_batch, accumulation_steps=accumulation_steps)
    message = str(caught.value)
    assert message.startswith(f"batch.global_batch={global_batch} ")
    for number in numbers:
        assert number in message
    assert message.endswith(f"{numbers[-2]} and {numbers[-1]}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("world_size", "global_batch", "accumulation_steps", "least"), [(4, 3, 1, 4), (8, 8, 2, 16), (2, 1, 1, 2)]
)
def test_size_with_too_few_samples(world_size: int, global_batch: int, accumulation_steps: int, least: int) -> None:
    """A global batch with fewer samples than micro-batches is refused with the smallest one that is enough."""
    with pytest.raises(UserError, match=f"set batch.global_batch={least} or more") as caught:
        batch_sizes(world_size=world_size, global_batch=global_batch, accumulation_steps=accumulation_steps)
    assert str(caught.value).startswith(f"batch.global_batch={global_batch} ")
    assert f"{world_size} worker" in str(caught.value)


def test_one_sample_for_each_micro_batch_is_enough() -> None:
    """Just as many samples as micro-batches is the smallest global batch, not one too few."""
    assert batch_sizes(world_size=4, global_batch=8, accumulation_steps=2).micro_batch == 1


def test_auto_refuses_workers_that_do_not_divide() -> None:
    """Automatic accumulation cannot mend a global batch that the workers do not divide."""
    with pytest.raises(UserError, match=r"^batch.global_batch=50 .*4 worker.* 48 and 52$"):
        batch_sizes(world_size=4, global_batch=50, max_micro_batch=16)


def test_auto_has_nothing_to_choose_per_device() -> None:
    """Automatic accumulation with a given micro-batch is refused, naming both choices that would do."""
    with pytest.raises(UserError, match=r"accumulation=auto .* accumulation=fixed or batch=fixed_global"):
        batch_sizes(world_size=2, micro_batch=8, max_micro_batch=4)
