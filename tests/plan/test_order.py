"""The data order: the same global batches for every setup, each sample dealt exactly once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runner.plan import Plan, make_plan
from runner.plan.order import DataOrder, cut, deal, permutation, sample_seeds
from runner.plan.steps import Step
from tests.configured import configured


def plan(samples: int = 53, world_size: int = 1, accumulation_steps: int = 1, epochs: int = 3, **changes: Any) -> Plan:
    """A plan with a global batch of 24, which every world size and accumulation used here divides, or with another."""
    batch = {"global_batch": 24, **changes}
    settings = [f"epochs={epochs}", f"accumulation.steps={accumulation_steps}"]
    settings += [f"batch.{key}={value}" for key, value in batch.items()]
    return make_plan(configured(" ".join(settings)), samples, world_size)


def lengths(samples: int) -> np.ndarray:
    """Token counts with many ties."""
    return np.random.default_rng(5).integers(3, 9, size=samples)


def steps_of(order: DataOrder) -> list[Step]:
    """All steps of an epoch."""
    return [order.step(t) for t in range(order.steps_per_epoch)]


def dealt(world_size: int, accumulation_steps: int, epoch: int, **changes: Any) -> list[list[list[np.ndarray]]]:
    """What every worker gets: [step][rank][micro-batch]."""
    of = plan(world_size=world_size, accumulation_steps=accumulation_steps, **changes)
    orders = [DataOrder(of, 7, rank, lengths(of.samples_per_epoch)) for rank in range(world_size)]
    return [[order.micro_batches(epoch, step) for order in orders] for step in steps_of(orders[0])]


# Of 24 samples, world size × accumulation: all that divide, among 1 to 8 workers and 1 to 4 micro-batches.
SPLITS = [(n, a) for n in range(1, 9) for a in range(1, 5) if 24 % (n * a) == 0]
# Of 10,080 samples: all of them.
ALL_SPLITS = [(n, a) for n in range(1, 9) for a in range(1, 5)]


@pytest.mark.parametrize("kind", ["permutation", "keyed"])
def test_global_batches_are_the_same_for_every_split(kind: str) -> None:
    """Global batch t holds the same ids, each once, for 1 to 8 workers and 1 to 4 micro-batches, tails too."""
    of = {"samples": 24_000, "global_batch": 10_080, "order": kind}
    order = DataOrder(plan(**of), 7, 0, None)
    expected = [np.sort(order.global_batch(2, step)) for step in steps_of(order)]
    assert [len(ids) for ids in expected] == [10_080, 10_080, 3_840]
    for world_size, accumulation_steps in ALL_SPLITS:
        for ids, ranks in zip(expected, dealt(world_size, accumulation_steps, 2, **of), strict=True):
            assert np.array_equal(np.sort(np.concatenate([part for rank in ranks for part in rank])), ids)


@pytest.mark.parametrize("samples", [53, 48, 25, 24])
def test_an_epoch_is_every_sample_once_in_even_shares(samples: int) -> None:
    """Over an epoch every id comes once, and the shares of workers differ by at most one sample."""
    for world_size, accumulation_steps in SPLITS:
        of = plan(samples, world_size, accumulation_steps)
        steps = dealt(world_size, accumulation_steps, 1, samples=samples)
        ids = np.concatenate([ids for step in steps for rank in step for ids in rank])
        assert sorted(ids.tolist()) == list(range(samples))
        for step in steps:
            shares = [sum(map(len, rank)) for rank in step]
            assert max(shares) - min(shares) <= 1
            assert all(len(ids) <= of.micro_batch for rank in step for ids in rank)
            if sum(shares) == 24:
                assert [[len(ids) for ids in rank] for rank in step] == [
                    [of.micro_batch] * accumulation_steps
                ] * world_size


def test_dealing_by_hand() -> None:
    """Worker r takes every n-th id starting with the r-th."""
    ids = np.array([9, 8, 7, 6, 5, 4, 3])
    assert [deal(ids, 3, rank).tolist() for rank in range(3)] == [[9, 6, 3], [8, 5], [7, 4]]
    assert [len(rank) for rank in dealt(8, 1, 0)[-1]] == [1, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("share", "accumulation_steps", "sizes"),
    [(12, 3, [4, 4, 4]), (7, 3, [3, 2, 2]), (3, 4, [1, 1, 1]), (0, 4, [])],
)
def test_cut(share: int, accumulation_steps: int, sizes: list[int]) -> None:
    """A share is cut in order into parts of nearly equal size, none of them empty."""
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


def test_seeds_of_samples() -> None:
    """Each follows from seed, epoch and sample alone, and all differ; the permutation's stream is another."""
    ids = np.arange(50)
    found = [sample_seeds(seed, epoch)(ids) for seed in (0, 1) for epoch in (0, 1)]
    assert found[0].dtype == np.uint64
    assert len(np.unique(found)) == 200
    assert np.array_equal(sample_seeds(1, 1)(ids[::-7]), found[3][::-7])
    plain = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0])))
    assert not np.isin(plain.integers(2**64, size=50, dtype=np.uint64), found[0]).any()


def test_permutation_leaves_global_generators_alone() -> None:
    np.random.seed(3)
    torch.manual_seed(3)
    expected = [np.random.rand(2).tolist(), torch.rand(2).tolist()]
    np.random.seed(3)
    torch.manual_seed(3)
    permutation(50, 0, 0)
    assert [np.random.rand(2).tolist(), torch.rand(2).tolist()] == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_length_sorting_keeps_the_set(drop_last: bool) -> None:
    """Sorting by length reorders samples within a global batch only: shortest first, ties in order."""
    of, tokens = plan(drop_last=drop_last), lengths(53)
    plain, by_length = DataOrder(of, 7, 0, None), DataOrder(of, 7, 0, tokens)
    assert plain.steps_per_epoch == (2 if drop_last else 3)
    for step in steps_of(plain):
        ids, ordered = plain.global_batch(0, step), by_length.global_batch(0, step)
        assert ordered.tolist() == sorted(ids.tolist(), key=lambda i: tokens[i])  # Python's sort is stable
        assert ids.tolist() == permutation(53, 7, 0)[step.start : step.stop].tolist()


def test_neighbouring_lengths_go_to_different_workers() -> None:
    """Sorted by length, workers' shares have about the same number of tokens, so that no worker waits for another."""
    tokens = np.arange(24)
    orders = [DataOrder(plan(24, 4), 7, rank, tokens) for rank in range(4)]
    totals = [int(tokens[ids].sum()) for order in orders for ids in order.micro_batches(0, order.step(0))]
    assert totals == [60, 66, 72, 78]


@pytest.mark.parametrize("stop_after", [0, 2, 3, 8])
def test_resuming_continues_with_the_same_batches(stop_after: int) -> None:
    """From any point a new order with the saved state gives the rest of the run, also on another split."""
    whole = walk(DataOrder(plan(), 7, 0, lengths(53)), 9)
    first = DataOrder(plan(), 7, 0, lengths(53))
    begun = walk(first, stop_after)
    assert (first.epoch, first.t) == divmod(stop_after, 3)
    for rank in range(3):
        resumed = DataOrder(plan(world_size=3, accumulation_steps=2), 7, rank, lengths(53))
        resumed.load_state_dict(first.state_dict())
        assert begun + walk(resumed, 9 - stop_after) == whole


def walk(order: DataOrder, steps: int) -> list[list[int]]:
    """The ids of the next global batches."""
    seen = []
    for _ in range(steps):
        seen.append(order.global_batch(order.epoch, order.step(order.t)).tolist())
        order.advance()
    return seen


@pytest.mark.parametrize(
    ("seed", "sorted_by_length", "changes"),
    [
        (8, True, {}),
        (7, False, {}),
        (7, True, {"global_batch": 48}),
        (7, True, {"order": "keyed"}),
    ],
)
def test_state_of_another_order_is_refused(seed: int, sorted_by_length: bool, changes: dict[str, Any]) -> None:
    """A state saved under another seed, batch, order or sorting is refused and changes nothing."""
    saved = DataOrder(plan(), 7, 0, lengths(53))
    saved.advance()
    of = plan(**changes)
    other = DataOrder(of, seed, 0, lengths(of.samples_per_epoch) if sorted_by_length else None)
    with pytest.raises(ValueError, match="data order"):
        other.load_state_dict(saved.state_dict())
    assert (other.epoch, other.t) == (0, 0)
