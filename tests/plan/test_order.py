"""The data order: the same global batches whatever the setup, dealt without a gap or a repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runner.plan import Plan, make_plan
from runner.plan.order import DataOrder, cut, deal, permutation


def plan(samples: int = 53, world_size: int = 1, accumulation_steps: int = 1, **changes: Any) -> Plan:
    """A plan with a global batch of 24, which every world size and accumulation used here divides, or with another."""
    settings: dict[str, Any] = {
        "global_batch": 24,
        "micro_batch": None,
        "max_micro_batch": None,
        "drop_last": False,
        "k": 1,
        "base_lr": 1e-3,
        "scaling_rule": "none",
        "scaling_batch": "global_batch",
        "reference_batch": 24,
        "epochs": 3,
        "max_steps": None,
        "warmup_share": 0.0,
    }
    return make_plan(
        samples_per_epoch=samples,
        world_size=world_size,
        accumulation_steps=accumulation_steps,
        **{**settings, **changes},
    )


def lengths(samples: int) -> np.ndarray:
    """Token counts with many ties."""
    return np.random.default_rng(5).integers(3, 9, size=samples)


def dealt(world_size: int, accumulation_steps: int, epoch: int, **changes: Any) -> list[list[list[np.ndarray]]]:
    """What every worker gets: [step][rank][micro-batch]."""
    of = plan(world_size=world_size, accumulation_steps=accumulation_steps, **changes)
    orders = [DataOrder(of, 7, rank, lengths(of.samples_per_epoch)) for rank in range(world_size)]
    return [[order.micro_batches(epoch, step) for order in orders] for step in orders[0].steps()]


# Of 24 samples, world size × accumulation: all that divide, among 1 to 8 workers and 1 to 4 micro-batches.
SPLITS = [(n, a) for n in range(1, 9) for a in range(1, 5) if 24 % (n * a) == 0]
# Of 10,080 samples: all of them.
ALL_SPLITS = [(n, a) for n in range(1, 9) for a in range(1, 5)]


@pytest.mark.parametrize(("world_size", "accumulation_steps"), ALL_SPLITS)
def test_global_batches_are_the_same_for_every_split(world_size: int, accumulation_steps: int) -> None:
    """Global batch t holds the same ids, each once, for 1 to 8 workers and 1 to 4 micro-batches, tails too."""
    of = {"samples": 24_000, "global_batch": 10_080}
    order = DataOrder(plan(**of), 7, 0, None)
    for epoch in (0, 2):
        steps = dealt(world_size, accumulation_steps, epoch, **of)
        assert [sum(len(ids) for rank in step for ids in rank) for step in steps] == [10_080, 10_080, 3_840]
        for step, ranks in zip(order.steps(), steps, strict=True):
            got = np.concatenate([ids for rank in ranks for ids in rank])
            assert np.array_equal(np.sort(got), np.sort(order.global_batch(epoch, step)))


@pytest.mark.parametrize(("world_size", "accumulation_steps"), SPLITS)
@pytest.mark.parametrize("samples", [53, 48, 25, 24])
def test_an_epoch_is_every_sample_once(world_size: int, accumulation_steps: int, samples: int) -> None:
    """Over an epoch every id comes exactly once, also where the tail is shorter than the number of workers."""
    steps = dealt(world_size, accumulation_steps, 1, samples=samples)
    ids = np.concatenate([ids for step in steps for rank in step for ids in rank])
    assert sorted(ids.tolist()) == list(range(samples))


@pytest.mark.parametrize(("world_size", "accumulation_steps"), SPLITS)
def test_shares_are_even(world_size: int, accumulation_steps: int) -> None:
    """Workers' shares differ by one sample at most, and full global batches give every micro-batch its planned size."""
    of = plan(world_size=world_size, accumulation_steps=accumulation_steps)
    *full, tail = dealt(world_size, accumulation_steps, 0)
    for step in full:
        assert {len(ids) for rank in step for ids in rank} == {of.micro_batch}
        assert {len(rank) for rank in step} == {accumulation_steps}
    shares = [sum(map(len, rank)) for rank in tail]
    assert sum(shares) == 53 - 48
    assert max(shares) - min(shares) <= 1
    assert all(len(ids) <= of.micro_batch for rank in tail for ids in rank)


def test_tail_of_five_by_hand() -> None:
    """Five samples on four workers: one gets two, and on eight workers three get none."""
    assert [sum(map(len, rank)) for rank in dealt(4, 2, 0)[-1]] == [2, 1, 1, 1]
    assert [len(rank) for rank in dealt(8, 1, 0)[-1]] == [1, 1, 1, 1, 1, 0, 0, 0]


def test_dealing_by_hand() -> None:
    """Worker r takes every n-th id from the r-th on."""
    ids = np.array([9, 8, 7, 6, 5, 4, 3])
    assert [deal(ids, 3, rank).tolist() for rank in range(3)] == [[9, 6, 3], [8, 5], [7, 4]]


@pytest.mark.parametrize(
    ("share", "accumulation_steps", "sizes"),
    [(12, 3, [4, 4, 4]), (7, 3, [3, 2, 2]), (3, 4, [1, 1, 1]), (4, 4, [1] * 4), (1, 4, [1]), (0, 4, []), (5, 1, [5])],
)
def test_cut(share: int, accumulation_steps: int, sizes: list[int]) -> None:
    """A share is cut in order, as evenly as it goes, never into empty micro-batches or into more than were planned."""
    parts = cut(np.arange(share), accumulation_steps)
    assert [len(part) for part in parts] == sizes
    assert [int(i) for part in parts for i in part] == list(range(share))


def test_orders_of_neighbouring_seeds_differ() -> None:
    """Each pair of seed and epoch has its own permutation: no order returns under another seed in another epoch."""
    drawn = {(seed, epoch): permutation(50, seed, epoch).tolist() for seed in range(4) for epoch in range(4)}
    assert all(sorted(order) == list(range(50)) for order in drawn.values())
    assert len({tuple(order) for order in drawn.values()}) == 16
    assert permutation(50, 1, 2).tolist() == drawn[1, 2]


def test_recorded_order() -> None:
    """It never changes unnoticed: runs of different versions are compared by it."""
    assert permutation(10, 0, 0).tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert permutation(10, 0, 0).dtype == np.int64


def test_permutation_leaves_global_generators_alone() -> None:
    np.random.seed(3)
    torch.manual_seed(3)
    expected = [np.random.rand(2).tolist(), torch.rand(2).tolist()]
    np.random.seed(3)
    torch.manual_seed(3)
    permutation(50, 0, 0)
    assert [np.random.rand(2).tolist(), torch.rand(2).tolist()] == expected


def test_epoch_permutation_is_that_of_its_epoch() -> None:
    """The kept permutation is never that of another epoch, in whatever order epochs are asked for."""
    order = DataOrder(plan(), 7, 0, None)
    for epoch in (0, 1, 1, 0, 5):
        assert order.epoch_permutation(epoch).tolist() == permutation(53, 7, epoch).tolist()


@pytest.mark.parametrize("drop_last", [False, True])
def test_length_sorting_keeps_the_set(drop_last: bool) -> None:
    """Sorting by length moves samples within a global batch only: the same ids, shortest first, ties in order."""
    of, tokens = plan(drop_last=drop_last), lengths(53)
    plain, by_length = DataOrder(of, 7, 0, None), DataOrder(of, 7, 0, tokens)
    assert len(plain.steps()) == (2 if drop_last else 3)
    for step in plain.steps():
        ids, ordered = plain.global_batch(0, step), by_length.global_batch(0, step)
        assert ordered.tolist() == sorted(ids.tolist(), key=lambda i: tokens[i])  # Python's sort is stable
        assert ids.tolist() == permutation(53, 7, 0)[step.start : step.stop].tolist()


def test_neighbouring_lengths_go_to_different_workers() -> None:
    """Sorted by length, workers' shares have about the same number of tokens, so that none waits for another."""
    tokens = np.arange(24)
    orders = [DataOrder(plan(24, 4), 7, rank, tokens) for rank in range(4)]
    totals = [int(tokens[ids].sum()) for order in orders for ids in order.micro_batches(0, order.steps()[0])]
    assert totals == [60, 66, 72, 78]


@pytest.mark.parametrize("stop_after", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize(("world_size", "accumulation_steps"), [(1, 1), (3, 2)])
def test_resuming_goes_on_with_the_same_batches(stop_after: int, world_size: int, accumulation_steps: int) -> None:
    """From any point a fresh order with the saved state gives what is left of the run, on another split as well."""
    whole = walk(DataOrder(plan(), 7, 0, lengths(53)), 9)
    first = DataOrder(plan(), 7, 0, lengths(53))
    begun = walk(first, stop_after)
    for rank in range(world_size):
        of = plan(world_size=world_size, accumulation_steps=accumulation_steps)
        resumed = DataOrder(of, 7, rank, lengths(53))
        resumed.load_state_dict(first.state_dict())
        assert begun + walk(resumed, 9 - stop_after) == whole


def walk(order: DataOrder, steps: int) -> list[list[int]]:
    """The ids of the next global batches."""
    seen = []
    for _ in range(steps):
        seen.append(order.global_batch(order.epoch, order.steps()[order.t]).tolist())
        order.advance()
    return seen


def test_position_moves_over_epochs() -> None:
    """Three steps make an epoch of 53 samples, and the position says so."""
    order = DataOrder(plan(), 7, 0, None)
    positions = []
    for _ in range(7):
        positions.append((order.epoch, order.t))
        order.advance()
    assert positions == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@pytest.mark.parametrize(
    ("seed", "sorted_by_length", "changes"),
    [
        (8, True, {}),
        (7, False, {}),
        (7, True, {"samples": 54}),
        (7, True, {"global_batch": 48}),
        (7, True, {"drop_last": True}),
    ],
)
def test_state_of_another_order_is_refused(seed: int, sorted_by_length: bool, changes: dict[str, Any]) -> None:
    """A state saved under another seed, size, batch, tail rule or sorting is refused and moves nothing."""
    saved = DataOrder(plan(), 7, 0, lengths(53))
    saved.advance()
    of = plan(**changes)
    other = DataOrder(of, seed, 0, lengths(of.samples_per_epoch) if sorted_by_length else None)
    with pytest.raises(ValueError, match="data order"):
        other.load_state_dict(saved.state_dict())
    assert (other.epoch, other.t) == (0, 0)
