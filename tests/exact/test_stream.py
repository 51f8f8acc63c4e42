"""The random bits of exact dropout: against whole numbers in plain Python, and against chance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from runner.exact.stream import keep_mask, sample_keys

BIG_SEED = 2**31 - 1
#: Where a right stream lands once in a million draws. The draws are fixed, so a test that passes passes for good.
UNLIKELY = 1e-6


# --- known answers ------------------------------------------------------------------------------------------


def mixed(key: int, coordinate: int) -> int:
    """SplitMix64's finaliser in unbounded integers, cut to 64 bits by hand."""
    x = (key + (coordinate + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def key_of(seed: int, step: int, sample: int) -> int:
    return mixed(mixed(mixed(0, seed), step), sample)


def survives(key: int, site: int, place: tuple[int, ...], p: float) -> bool:
    """One element of one sample; `place`: its coordinates after the sample's, the last one counted in 32 bits."""
    *middle, last = place or (0,)
    row = mixed(key, site)
    for coordinate in middle:
        row = mixed(row, coordinate)
    x = ((row >> 32) + last * 0x9E3779B9) % 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x ^= row % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    # Without the highest bit, of [0, 2**31) a share p lies below p × 2**31.
    return x % 2**31 >= round(p * 2**31)


def unsigned(keys: Tensor) -> list[int]:
    return [key % 2**64 for key in keys.tolist()]


@pytest.mark.parametrize("seed", [0, 1, 12345, BIG_SEED])
@pytest.mark.parametrize("step", [0, 7, 2**31, 2**40 + 3, 2**63 - 2])
def test_keys_are_those_of_plain_integers(seed: int, step: int) -> None:
    """A sample's key is folded from seed, step and id modulo 2**64, whatever their size or sign."""
    ids = [0, 1, 2, 47, 10**6, 2**31, 2**40 + 1, 2**63 - 1, -1, -(2**63)]
    keys = sample_keys(seed, step, np.array(ids))
    assert keys.dtype is torch.int64
    assert unsigned(keys) == [key_of(seed, step, sample) for sample in ids]


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("shape", [(5,), (3, 40), (3, 4, 7), (2, 3, 4, 5), (2, 2, 3, 2, 4), (1, 1), (2, 1, 1, 9)])
@pytest.mark.parametrize(("seed", "step", "first", "site"), [(0, 0, 0, 0), (BIG_SEED, 2**33 + 5, 2**40, 1000)])
def test_masks_are_those_of_plain_integers(
    shape: tuple[int, ...], p: float, seed: int, step: int, first: int, site: int
) -> None:
    """Every element of tensors of one to five dimensions survives exactly where the arithmetic by hand says so."""
    ids = list(range(first, first + shape[0]))
    mask = keep_mask(sample_keys(seed, step, np.array(ids)), site, shape, p)
    assert (mask.dtype, tuple(mask.shape)) == (torch.bool, shape)
    for sample, *place in itertools.product(*map(range, shape)):
        expected = survives(key_of(seed, step, ids[sample]), site, tuple(place), p)
        assert bool(mask[(sample, *place)]) is expected


def test_known_keys() -> None:
    """The stream never changes unnoticed: runs of different versions are compared by it."""
    assert unsigned(sample_keys(0, 0, np.array([0, 1, -1]))) == [
        2558736989570252433,
        17913671590881668180,
        13013912499580732898,
    ]
    assert unsigned(sample_keys(BIG_SEED, 10**6, np.array([10**9]))) == [4906471276190163571]


def test_known_masks() -> None:
    """Bits of a small mask, written down once: rows of a sample as 0 and 1, for two call sites."""
    keys = sample_keys(42, 3, np.array([7, 8]))
    drawn = {(site, p): keep_mask(keys, site, (2, 2, 24), p) for site, p in ((0, 0.5), (1, 0.1))}
    assert {
        of: ["".join(map(str, row)) for row in mask.int().flatten(0, 1).tolist()] for of, mask in drawn.items()
    } == {
        (0, 0.5): [
            "001101101111101011010010",
            "111101010110000100000100",
            "010000100111111100101011",
            "111101111101010110000110",
        ],
        (1, 0.1): [
            "110110101111111111111110",
            "111111111111111111011111",
            "111011111111101111111111",
            "111111111111111011111001",
        ],
    }


# --- chance -------------------------------------------------------------------------------------------------


def mask(p: float, shape: tuple[int, ...], seed: int = 3, step: int = 11, first: int = 0, site: int = 2) -> Tensor:
    return keep_mask(sample_keys(seed, step, np.arange(first, first + shape[0])), site, shape, p)


@pytest.mark.parametrize("p", [0.0001, 0.01, 0.1, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("shape", [(10**6,), (1000, 1000), (10, 100, 1000), (20, 4, 125, 100), (1, 10**6)])
def test_share_of_drops(shape: tuple[int, ...], p: float) -> None:
    """Of a million elements a share of p is dropped, within five standard deviations, whichever dimension is long."""
    dropped = int((~mask(p, shape)).sum())
    assert abs(dropped - 10**6 * p) < 5 * (10**6 * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("p", [0.0, 1e-12, 2**-34])
def test_hardly_any_drop(p: float) -> None:
    """A share too small for 31 bits drops nothing."""
    assert mask(p, (100, 1000)).all()


@pytest.mark.parametrize("p", [1.0, 1 - 2**-32, 1 - 2**-33, 1 - 1e-12])
def test_hardly_any_survivor(p: float) -> None:
    """A share within 2**-31 of all drops next to everything, and does not wrap round to nothing."""
    assert not mask(p, (100, 1000)).any()


SHAPE = (24, 4, 80, 128)


def neighbours(dimension: int, by: int, p: float) -> tuple[Tensor, Tensor]:
    """Every element, and the one `by` further along a dimension."""
    whole, size = mask(p, SHAPE), SHAPE[dimension] - by
    return whole.narrow(dimension, 0, size), whole.narrow(dimension, by, size)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("by", [1, 2, 3])
@pytest.mark.parametrize("dimension", [0, 1, 2, 3], ids=["sample", "head", "row", "element"])
def test_neighbours_are_independent(dimension: int, by: int, p: float) -> None:
    """Whether an element is dropped says nothing of the next element, row, head or sample."""
    assert independent(*neighbours(dimension, by, p))


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    "other",
    [
        {"seed": 4},
        {"step": 12},
        {"site": 3},
        {"site": 66},
        {"first": 24},
        {"first": 2**32},  # the same low 32 bits
        {"seed": 3 + 2**32},
        {"seed": 11, "step": 3},  # the same two numbers the other way round
        {"step": 2, "site": 11},
    ],
    ids=str,
)
def test_streams_are_independent(other: dict[str, int], p: float) -> None:
    """Another seed, step, call site or sample has a mask of its own."""
    assert independent(mask(p, SHAPE), mask(p, SHAPE, **other))


def independent(a: Tensor, b: Tensor) -> bool:
    """The four combinations of two masks come as often as independent ones of the same shares do."""
    pairs = torch.bincount((2 * a.int() + b.int()).flatten(), minlength=4)
    return bool(chi2_contingency(pairs.reshape(2, 2), correction=False).pvalue > UNLIKELY)


@pytest.mark.parametrize("dimension", [1, 2, 3], ids=["head", "row", "element"])
def test_patterns_of_eight_are_equally_frequent(dimension: int) -> None:
    """Of eight consecutive elements, rows or heads, all 256 patterns of drops come equally often."""
    shape = [24, 4, 80, 128]
    shape[dimension] = 8
    powers = 2 ** torch.arange(8)
    patterns = (mask(0.5, tuple(shape)).movedim(dimension, -1).long() * powers).sum(-1)
    assert chisquare(torch.bincount(patterns.flatten(), minlength=256)).pvalue > UNLIKELY


def test_no_column_or_row_is_special() -> None:
    """Each element of a row, and each row, is dropped as often as any other, over many samples."""
    drops = (~mask(0.1, (2000, 16, 64))).sum(0)
    for sums in (drops.sum(0), drops.sum(1), drops.flatten()):
        assert chisquare(sums).pvalue > UNLIKELY


def test_seeds_of_a_kind_share_no_mask() -> None:
    """Masks of neighbouring seeds, steps, samples and sites are all different, drawn from few bits as they are."""
    places = itertools.product(range(6), range(6), range(6), range(6))
    masks = {
        tuple(keep_mask(sample_keys(seed, step, np.array([sample])), site, (1, 64), 0.5).flatten().tolist())
        for seed, step, sample, site in places
    }
    assert len(masks) == 6**4


# --- what a mask must not depend on --------------------------------------------------------------------------


@pytest.mark.parametrize("corner", [(6, 4, 9, 3), (6, 4, 5, 11), (6, 2, 9, 11), (2, 4, 9, 11), (3, 1, 1, 1)])
def test_padding_does_not_move_a_mask(corner: tuple[int, ...]) -> None:
    """The mask of a tensor that is shorter in any dimension is the corner of the longer one's."""
    a, b, c, d = corner
    assert torch.equal(mask(0.3, corner), mask(0.3, (6, 4, 9, 11))[:a, :b, :c, :d])


@pytest.mark.parametrize("shape", [(6,), (6, 11), (6, 3, 5), (6, 2, 3, 5)])
def test_order_of_samples_does_not_matter(shape: tuple[int, ...]) -> None:
    """Samples in another order, or in several micro-batches, have the masks that they have together."""
    ids = np.array([5, 900, 17, 3, 2**35, 4])
    keys = sample_keys(1, 2, ids)
    whole = keep_mask(keys, 7, shape, 0.4)
    order = np.array([3, 0, 5, 1, 4, 2])
    assert torch.equal(keep_mask(sample_keys(1, 2, ids[order]), 7, shape, 0.4), whole[order])
    parts = [keep_mask(part, 7, (len(part), *shape[1:]), 0.4) for part in keys.split([1, 3, 2])]
    assert torch.equal(torch.cat(parts), whole)


def test_memory_layout_of_keys_does_not_matter() -> None:
    """Keys that are every other number of a tensor, or one repeated, give what copies give, and are only read."""
    keys = sample_keys(1, 2, np.arange(12))
    kept = keys.clone()
    for some in (keys[::2], keys.view(3, 4)[:, 1], keys[:1].expand(4), keys.flip(0)):
        shape = (len(some), 3, 5)
        assert torch.equal(keep_mask(some, 1, shape, 0.5), keep_mask(some.clone(), 1, shape, 0.5))
    assert torch.equal(keys, kept)


def test_keys_do_not_depend_on_the_type_of_the_ids() -> None:
    """Ids come as int32, as int64, and as rows of a memory-mapped table that cannot be written to."""
    ids = np.array([3, 1, 2])
    locked = ids.copy()
    locked.setflags(write=False)
    for same in (ids.astype(np.int32), locked, np.array([3, 0, 1, 0, 2])[::2]):
        assert torch.equal(sample_keys(0, 1, same), sample_keys(0, 1, ids))


@pytest.mark.parametrize("site", [0, 2**31, 2**62])
def test_keys_at_the_ends_of_the_range(site: int) -> None:
    """Keys of any 64 bits do, and are not confused with each other."""
    ends = [-(2**63), -(2**63) + 1, -(2**32), -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
    masks = keep_mask(torch.tensor(ends), site, (len(ends), 2, 40), 0.5)
    for key, drawn in zip(ends, masks, strict=True):
        assert drawn.tolist() == [[survives(key, site, (i, j), 0.5) for j in range(40)] for i in range(2)]
    assert len({tuple(drawn.flatten().tolist()) for drawn in masks}) == len(ends)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0,)])
@pytest.mark.parametrize("p", [0.5, 1.0])
def test_empty_tensors_have_empty_masks(shape: tuple[int, ...], p: float) -> None:
    """A tensor without elements has a mask without elements."""
    assert tuple(mask(p, shape).shape) == shape
