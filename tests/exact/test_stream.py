"""The random bits of exact dropout: against integers in plain Python, and against chance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from runner.exact.stream import keep_mask, keep_mask_of_tokens, sample_keys

BIG_SEED = 2**31 - 1
#: A correct stream fails a statistical test once in a million draws. The draws are fixed.
UNLIKELY = 1e-6


def mixed(key: int, coordinate: int) -> int:
    """SplitMix64's finaliser in Python integers."""
    x = (key + (coordinate + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def key_of(seed: int, step: int, sample: int) -> int:
    return mixed(mixed(mixed(0, seed), step), sample)


def survives(key: int, site: int, place: tuple[int, ...], p: float) -> bool:
    """One element of one sample; `place`: its coordinates after the sample's."""
    *middle, last = place or (0,)
    row = mixed(key, site)
    for coordinate in middle:
        row = mixed(row, coordinate)
    x = ((row >> 32) + last * 0x9E3779B9) % 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x ^= row % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x % 2**31 >= round(p * 2**31)


def unsigned(keys: Tensor) -> list[int]:
    return [key % 2**64 for key in keys.tolist()]


@pytest.mark.parametrize("seed", [0, 12345, BIG_SEED])
@pytest.mark.parametrize("step", [0, 7, 2**40 + 3, 2**63 - 2])
def test_keys_match_plain_integers(seed: int, step: int) -> None:
    ids = [0, 1, 47, 2**31, 2**40 + 1, 2**63 - 1, -1, -(2**63)]
    keys = sample_keys(seed, step, np.array(ids))
    assert keys.dtype is torch.int64
    assert unsigned(keys) == [key_of(seed, step, sample) for sample in ids]


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(5,), (3, 40), (3, 4, 7), (2, 2, 3, 2, 4), (2, 1, 1, 9), (0, 3, 4), (3, 4, 0)])
@pytest.mark.parametrize(("seed", "step", "first", "site"), [(0, 0, 0, 0), (BIG_SEED, 2**33 + 5, 2**40, 1000)])
def test_masks_match_plain_integers(
    shape: tuple[int, ...], p: float, seed: int, step: int, first: int, site: int
) -> None:
    ids = list(range(first, first + shape[0]))
    mask = keep_mask(sample_keys(seed, step, np.array(ids)), site, shape, p)
    assert (mask.dtype, tuple(mask.shape)) == (torch.bool, shape)
    for sample, *place in itertools.product(*map(range, shape)):
        expected = survives(key_of(seed, step, ids[sample]), site, tuple(place), p)
        assert bool(mask[(sample, *place)]) is expected


def test_extreme_keys() -> None:
    ends = [-(2**63), -(2**32), -1, 0, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
    masks = keep_mask(torch.tensor(ends), 2**62, (len(ends), 2, 40), 0.5)
    for key, drawn in zip(ends, masks, strict=True):
        assert drawn.tolist() == [[survives(key, 2**62, (i, j), 0.5) for j in range(40)] for i in range(2)]


def test_recorded_bits() -> None:
    """The stream never changes unnoticed: runs of different versions are compared by it."""
    assert unsigned(sample_keys(0, 0, np.array([0, 1, -1]))) == [
        2558736989570252433,
        17913671590881668180,
        13013912499580732898,
    ]
    mask = keep_mask(sample_keys(42, 3, np.array([7, 8])), 0, (2, 2, 24), 0.5)
    assert ["".join(map(str, row)) for row in mask.int().flatten(0, 1).tolist()] == [
        "001101101111101011010010",
        "111101010110000100000100",
        "010000100111111100101011",
        "111101111101010110000110",
    ]


def mask(p: float, shape: tuple[int, ...], seed: int = 3, step: int = 11, first: int = 0, site: int = 2) -> Tensor:
    return keep_mask(sample_keys(seed, step, np.arange(first, first + shape[0])), site, shape, p)


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("shape", [(10**6,), (20, 4, 125, 100), (1, 10**6)])
def test_share_of_drops(shape: tuple[int, ...], p: float) -> None:
    """Within five standard deviations."""
    dropped = int((~mask(p, shape)).sum())
    assert abs(dropped - 10**6 * p) < 5 * (10**6 * p * (1 - p)) ** 0.5


def test_extreme_probabilities() -> None:
    """Shares closer to 0 or 1 than 31 bits can tell drop nothing or everything, and do not wrap round."""
    for p in (0.0, 1e-12, 2**-34):
        assert mask(p, (100, 1000)).all()
        assert not mask(1 - p, (100, 1000)).any()


SHAPE = (24, 4, 80, 128)


def independent(a: Tensor, b: Tensor) -> bool:
    pairs = torch.bincount((2 * a.int() + b.int()).flatten(), minlength=4)
    return bool(chi2_contingency(pairs.reshape(2, 2), correction=False).pvalue > UNLIKELY)


@pytest.mark.parametrize("by", [1, 2])
@pytest.mark.parametrize("dimension", [0, 1, 2, 3], ids=["sample", "head", "row", "element"])
def test_neighbours_are_independent(dimension: int, by: int) -> None:
    whole, size = mask(0.1, SHAPE), SHAPE[dimension] - by
    assert independent(whole.narrow(dimension, 0, size), whole.narrow(dimension, by, size))


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 4},
        {"step": 12},
        {"site": 3},
        {"first": 24},
        {"first": 2**32},  # the same low 32 bits
        {"seed": 3 + 2**32},
        {"seed": 11, "step": 3},  # the same two numbers exchanged
        {"step": 2, "site": 11},
    ],
    ids=str,
)
def test_streams_are_independent(other: dict[str, int]) -> None:
    assert independent(mask(0.1, SHAPE), mask(0.1, SHAPE, **other))


@pytest.mark.parametrize("dimension", [1, 2, 3], ids=["head", "row", "element"])
def test_patterns_of_eight_are_equally_frequent(dimension: int) -> None:
    shape = list(SHAPE)
    shape[dimension] = 8
    patterns = (mask(0.5, tuple(shape)).movedim(dimension, -1).long() * 2 ** torch.arange(8)).sum(-1)
    assert chisquare(torch.bincount(patterns.flatten(), minlength=256)).pvalue > UNLIKELY


def test_no_column_or_row_is_special() -> None:
    drops = (~mask(0.1, (2000, 16, 64))).sum(0)
    for sums in (drops.sum(0), drops.sum(1), drops.flatten()):
        assert chisquare(sums).pvalue > UNLIKELY


def test_neighbouring_streams_share_no_mask() -> None:
    places = itertools.product(range(4), repeat=4)
    masks = {
        tuple(keep_mask(sample_keys(seed, step, np.array([sample])), site, (1, 64), 0.5).flatten().tolist())
        for seed, step, sample, site in places
    }
    assert len(masks) == 4**4


@pytest.mark.parametrize("corner", [(6, 4, 9, 3), (6, 4, 5, 11), (6, 2, 9, 11), (2, 4, 9, 11), (3, 1, 1, 1)])
def test_padding_does_not_change_a_mask(corner: tuple[int, ...]) -> None:
    a, b, c, d = corner
    assert torch.equal(mask(0.3, corner), mask(0.3, (6, 4, 9, 11))[:a, :b, :c, :d])


@pytest.mark.parametrize("shape", [(6,), (6, 11), (6, 2, 3, 5)])
def test_order_and_split_of_samples_do_not_matter(shape: tuple[int, ...]) -> None:
    """Nor does the dtype or memory layout of ids and keys."""
    ids = np.array([5, 900, 17, 3, 2**35, 4])
    keys = sample_keys(1, 2, ids)
    whole = keep_mask(keys, 7, shape, 0.4)
    order = np.array([3, 0, 5, 1, 4, 2])
    assert torch.equal(keep_mask(sample_keys(1, 2, ids[order]), 7, shape, 0.4), whole[order])
    parts = [keep_mask(part, 7, (len(part), *shape[1:]), 0.4) for part in keys.split([1, 3, 2])]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(keep_mask(keys[::2], 7, (3, *shape[1:]), 0.4), whole[::2])
    locked = ids.copy()
    locked.setflags(write=False)
    assert torch.equal(sample_keys(1, 2, locked), keys)
    assert torch.equal(sample_keys(1, 2, np.array([5, 900], dtype=np.int32)), keys[:2])


@pytest.mark.parametrize("shape", [(7,), (2, 3)])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_a_token_has_the_same_mask_without_padding(shape: tuple[int, ...], p: float) -> None:
    keys = sample_keys(3, 4, np.array([5, 9, 2]))
    rows, positions = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 2, 0])
    found = keep_mask_of_tokens(keys, 1, rows, positions, shape, p)
    assert torch.equal(found, keep_mask(keys, 1, (3, 4, *shape), p)[rows, positions])
