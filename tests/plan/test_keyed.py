"""The keyed permutation: each sample once, as random as NumPy's permutation, in constant memory at any size."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from runner.plan.keyed import KeyedPermutation
from runner.plan.order import PermutationTable

#: The ids at positions `start` to `stop` of the order of (samples, seed, epoch).
Order = Callable[[int, int, int, int, int], np.ndarray]


def keyed(samples: int, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
    return KeyedPermutation(samples, seed, epoch).ids(start, stop)


def table(samples: int, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
    return PermutationTable(samples, seed, epoch).ids(start, stop)


def affine(samples: int, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
    """An order that only looks random: neighbours have one distance."""
    factor = next(one for one in itertools.count(int(0.381966 * samples) + seed) if math.gcd(one, samples) == 1)
    return (np.arange(start, stop) * factor + 1_000_003 * (epoch + 1)) % samples


ORDERS = pytest.mark.parametrize("order", [keyed, table])


def deviation(counts: np.ndarray | list[int], expected: np.ndarray | float | None = None) -> float:
    """Pearson's chi-squared of counts that should be equal, or `expected`, in standard deviations from its mean."""
    observed = np.asarray(counts, dtype=float).ravel()
    expected = observed.mean() if expected is None else np.asarray(expected, dtype=float).ravel()
    freedom = len(observed) - 1
    return float(((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def in_bins(*ids: np.ndarray, samples: int, bins: int) -> np.ndarray:
    """How often ids of these ranges come together; int64 of shape [bins] * len(ids)."""
    edges = [np.linspace(0, samples, bins + 1)] * len(ids)
    return np.histogramdd(np.stack(ids, axis=1).astype(float), edges)[0]


def neighbours(order: Order, samples: int, start: int, stop: int) -> dict[str, float]:
    """Deviations of single ids, pairs and triples of neighbours and distances, and the serial correlation."""
    ids = order(samples, 5, 1, start, stop)
    first, second, third = ids[:-2], ids[1:-1], ids[2:]
    return {
        "ids": deviation(in_bins(ids, samples=samples, bins=64)),
        "pairs": deviation(in_bins(first, second, samples=samples, bins=16)),
        "triples": deviation(in_bins(first, second, third, samples=samples, bins=6)),
        "distances": deviation(in_bins((second - first) % samples, samples=samples, bins=64)),
        "correlation": float(np.corrcoef(first, second)[0, 1]) * math.sqrt(len(first)),
    }


@pytest.mark.parametrize("samples", [*range(1, 66), 999, 8192, 8193, 100_003])
def test_each_sample_comes_once(samples: int) -> None:
    ids = keyed(samples, 3, 2, 0, samples)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(samples))


def test_any_part_is_that_of_the_whole() -> None:
    whole, order = keyed(20_000, 0, 0, 0, 20_000), KeyedPermutation(20_000, 0, 0)
    for start, stop in [(19_990, 20_000), (8190, 8195), (0, 1), (5, 5), (0, 16_384), (100, 20_000)]:
        assert np.array_equal(order.ids(start, stop), whole[start:stop])


def test_recorded_order() -> None:
    """It never changes unnoticed: runs of different versions are compared by it."""
    assert keyed(10, 0, 0, 0, 10).tolist() == [5, 2, 4, 7, 6, 1, 3, 0, 9, 8]
    assert keyed(10**9, 7, 3, 10**9 - 3, 10**9).tolist() == [734385865, 503376643, 182248627]


@ORDERS
@pytest.mark.parametrize("samples", [2, 3, 5])
def test_all_orders_of_few_samples_come_equally_often(order: Order, samples: int) -> None:
    """Also over seeds and epochs that are small neighbouring numbers."""
    keys = itertools.product(range(6 * samples), range(40))
    counts = Counter(tuple(order(samples, seed, epoch, 0, samples)) for seed, epoch in keys)
    assert len(counts) == math.factorial(samples)
    assert abs(deviation(list(counts.values()))) < 4


@ORDERS
def test_each_sample_comes_in_each_place_equally_often(order: Order) -> None:
    """48 samples; so does each pair of samples as neighbours."""
    places, pairs = np.zeros((48, 48)), np.zeros((48, 48))
    for seed in range(1000):
        ids = order(48, seed, 0, 0, 48)
        places[ids, np.arange(48)] += 1
        pairs[ids[:-1], ids[1:]] += 1
    assert abs(deviation(places)) < 4
    assert abs(deviation(pairs[~np.eye(48, dtype=bool)])) < 4


@ORDERS
def test_neighbours_are_unrelated(order: Order) -> None:
    found = neighbours(order, 1_000_003, 0, 100_000)
    assert all(abs(value) < 4 for value in found.values()), found


@pytest.mark.parametrize("start", [0, 123_456_789, 10**9 - 100_000])
def test_neighbours_among_a_billion_samples_are_unrelated(start: int) -> None:
    found = neighbours(keyed, 10**9, start, start + 100_000)
    assert all(abs(value) < 4 for value in found.values()), found


def test_an_order_that_only_looks_random_is_found_out() -> None:
    """The tests above reject one whose single ids are as they should be."""
    found = neighbours(affine, 1_000_003, 0, 100_000)
    assert min(abs(found[name]) for name in ("pairs", "triples", "distances", "correlation")) > 10


@ORDERS
@pytest.mark.parametrize("other", [(0, 1), (1, 0), (1, 1), (2**31 - 1, 0)])
def test_other_seeds_and_epochs_are_unrelated(order: Order, other: tuple[int, int]) -> None:
    """The ids at the same place, the distances between them, and the places that agree: one is expected."""
    samples = 100_003
    a, b = order(samples, 0, 0, 0, samples), order(samples, *other, 0, samples)
    assert abs(deviation(in_bins(a, b, samples=samples, bins=16))) < 4
    assert abs(deviation(in_bins((a - b) % samples, samples=samples, bins=64))) < 4
    assert (a == b).sum() < 8


def test_parts_of_an_epoch_cover_the_samples_evenly() -> None:
    """A tenth of an epoch has as many of the first samples as of the last."""
    for part in range(10):
        ids = keyed(10**6, 1, 0, part * 10**5, (part + 1) * 10**5)
        assert abs(deviation(in_bins(ids, samples=10**6, bins=100))) < 4


def test_a_billion_samples_need_no_memory() -> None:
    """Global batches anywhere in them."""
    tracemalloc.start()
    order = KeyedPermutation(10**9, 0, 0)
    starts = np.random.default_rng(0).integers(0, 10**9 - 48, size=20).tolist()
    ids = np.concatenate([order.ids(start, start + 48) for start in starts])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (ids >= 0).all()
    assert (ids < 10**9).all()
    assert len(np.unique(ids)) == len(ids)
    assert peak < 2_000_000
