"""The shapes of micro-batches: which lengths rows are padded to, and how many rows there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from runner.data.layout import Layout, halvings, layout

#: Lengths of the rows of a table, the longest, of 14 tokens, in the middle.
LENGTHS = np.array([5, 3, 14, 8, 9])


def test_without_buckets_a_batch_is_as_long_as_its_longest_row() -> None:
    """A device that compiles nothing, and no buckets: no padding beyond the batch's longest row, and no filler."""
    found = layout(LENGTHS, 6, None, compiles=False)
    assert found == Layout(None, None)
    assert [found.length(tokens) for tokens in (0, 1, 5, 14)] == [0, 1, 5, 14]


@pytest.mark.parametrize(
    ("buckets", "lengths"),
    [
        ([8, 14], (8, 14)),
        ([14], (14,)),
        ([3, 5, 8, 9, 14], (3, 5, 8, 9, 14)),
        # never beyond the longest row: for that length the model may have no positions
        ([16], (14,)),
        ([8, 14, 32], (8, 14)),
        ([8, 15, 32], (8, 14)),
        ([1, 2, 100], (1, 2, 14)),
        # and never below it: it fits in
        ([8], (8, 14)),
        ([4, 13], (4, 13, 14)),
        # in any order, and more than once
        ([32, 8, 14], (8, 14)),
        ([13, 8, 13, 8, 4], (4, 8, 13, 14)),
    ],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_given_buckets(buckets: list[int], lengths: tuple[int, ...], compiles: bool) -> None:
    """Given buckets are used on every device as far as the longest row reaches, which always is the last of them.

    A batch is padded to the first that it fits in, edges included.
    """
    found = layout(LENGTHS, 6, buckets, compiles)
    assert found.lengths == lengths
    for tokens in range(1, 15):
        assert found.length(tokens) == min(length for length in lengths if length >= tokens)


@pytest.mark.parametrize("buckets", [None, [8, 14]])
def test_rows_are_fixed_where_programs_are_compiled(buckets: list[int] | None) -> None:
    """Every micro-batch has the rows of the largest one on a device that compiles, and as many as it has elsewhere."""
    assert layout(LENGTHS, 6, buckets, compiles=True).rows == 6
    assert layout(LENGTHS, 6, buckets, compiles=False).rows is None


@pytest.mark.parametrize("longest", [1, 2, 14, 15, 16, 17, 31, 32, 33, 100, 128, 129, 512, 1000])
def test_a_compiling_device_without_buckets_halves_the_longest_row(longest: int) -> None:
    """Where programs are compiled and no buckets are given, they are fractions of the longest row of the data."""
    found = layout(np.array([1, longest, 1]), 4, None, compiles=True)
    assert found == Layout(halvings(longest), 4)
    assert found.length(longest) == longest


def test_a_table_without_rows() -> None:
    """A table of no rows, or of empty ones, has a layout like any other."""
    for lengths in (np.zeros(0, dtype=np.int64), np.zeros(3, dtype=np.int64)):
        assert layout(lengths, 6, None, compiles=False) == Layout(None, None)
        assert layout(lengths, 6, None, compiles=True).length(0) == 1
        assert layout(lengths, 6, [4], compiles=True).length(0) == 1


# --- halvings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "sizes"),
    [
        (128, (16, 32, 64, 128)),
        (512, (64, 128, 256, 512)),
        (100, (25, 50, 100)),
        (33, (17, 33)),
        (32, (16, 32)),
        (31, (16, 31)),
        (30, (30,)),
        (14, (14,)),
        (2, (2,)),
        (1, (1,)),
    ],
)
def test_halvings_by_hand(longest: int, sizes: tuple[int, ...]) -> None:
    """Half, a quarter and an eighth of the longest row, rounded up, as far as they are 16 tokens or more."""
    assert tuple(dict.fromkeys(halvings(longest))) == sizes


def test_halvings_are_few_rising_and_never_above_the_longest_row() -> None:
    """For every longest row: it is the last bucket, none is longer (the model may have no positions), four at most."""
    for longest in range(1, 2000):
        sizes = halvings(longest)
        assert sizes[-1] == longest == max(sizes)
        assert list(sizes) == sorted(sizes)
        assert 1 <= len(sizes) <= 4
        assert all(size >= 16 for size in sizes[:-1]) or longest == 1
        for shorter, longer in itertools.pairwise(sizes):
            assert longer <= 2 * shorter  # never more padding than tokens beyond the shortest bucket


def test_halvings_are_distinct() -> None:
    """No bucket comes twice."""
    assert [longest for longest in range(1, 2000) if len(set(halvings(longest))) < len(halvings(longest))] == []
