"""Looks after every seed: how often a sweep that adds seeds is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runner.tools.compare.design import Design
from runner.tools.compare.plots import write_plots
from runner.tools.compare.statistics import RowSampling, mean_of
from runner.tools.compare.verdict import DIFFERENT, EQUIVALENT, NONE, UNDECIDED, decide
from tests.tools.compare.make import block, compared, runs

SWEEPS = 600


def verdicts(differences: np.ndarray, design: Design) -> list[str]:
    """What each sweep decides at its first look that decides. `differences`: [sweeps, seeds]; the margin is 1."""

    def first(values: np.ndarray) -> str:
        looks = (decide(mean_of(values[:n]), 1.0, "max", None, design).kind for n in range(4, design.max_seeds + 1))
        return next((kind for kind in looks if kind != UNDECIDED), UNDECIDED)

    return [first(values) for values in differences]


@pytest.mark.parametrize(("truth", "wrong", "right"), [(0.0, DIFFERENT, EQUIVALENT), (1.0, EQUIVALENT, DIFFERENT)])
def test_errors_over_all_looks(truth: float, wrong: str, right: str) -> None:
    """A fixed level of 5% would be wrong in about 14 and 17 of 100."""
    found = verdicts(np.random.default_rng(0).standard_normal((SWEEPS, 12)) + truth, Design(4, 12, 1))
    assert found.count(wrong) <= 0.06 * SWEEPS
    assert found.count(right) >= 0.70 * SWEEPS


def test_levels() -> None:
    """Of more looks, of more setups and of earlier looks they are higher; before the first nothing is decided."""
    levels = Design(4, 12, 1).levels
    equivalence = [levels(n).equivalence for n in range(4, 13)]
    assert equivalence == sorted(equivalence, reverse=True)
    assert levels(3) == levels(0)
    assert decide(mean_of([0.0, 0.0, 0.001]), 1.0, "max", None, Design(4, 12, 1)).kind == UNDECIDED
    for other in (Design(4, 12, 3), Design(3, 30, 1)):
        assert other.levels(12).equivalence > levels(12).equivalence > 0.9
        assert other.levels(12).difference > levels(12).difference > 0.95


def test_seeds_that_were_added_are_judged_so_everywhere() -> None:
    """By the looks that the runs say they had; never together with runs of a number of seeds that was fixed."""
    design = Design(4, 12, 1)

    def kind(of_setup: Design | None, of_baseline: Design | None) -> str:
        differences = [0.9, -0.3] * 3  # a fixed number of six seeds decides
        setup = runs("b", [60 + one for one in differences], design=of_setup)
        verdict = block(runs("a", [60.0] * 6, design=of_baseline), setup, margin=1.0, baseline="a").rows[1].verdict
        assert verdict is not None
        return verdict.kind

    assert kind(None, None) == EQUIVALENT
    assert kind(design, design) == UNDECIDED
    assert kind(design, None) == kind(None, design) == kind(design, Design(4, 13, 1)) == NONE


def test_rows_leave_it_open() -> None:
    """Only if seeds rule out every difference that they could decide; before that more of them are worth it."""
    design, rows = Design(4, 12, 1), RowSampling(400, 0.5, 0.25)
    tight, noisy = (replace(mean_of([0.8 + off, 0.8 - off] * 3), sampling=rows) for off in (0.01, 1.0))
    assert abs(tight.value - noisy.value) < 1e-9
    assert design.rows_leave_open(tight, 1.0)
    assert not design.rows_leave_open(noisy, 1.0)
    assert not design.rows_leave_open(mean_of(tight.pairs), 1.0)


def test_expected_seeds() -> None:
    """Between the fewest and the most; fewer for a clear difference."""
    design = Design(4, 20, 1)
    assert 4 <= design.expected_seeds(4.0) < 6 < design.expected_seeds(1.0) < 20


def test_the_looks_are_drawn(tmp_path: Path) -> None:
    """Where seeds were added, and only there."""
    values = [60.0, 60.5, 59.8, 60.2, 60.1]
    for design in (Design(4, 12, 1), None):
        setup = runs("b", [value + 0.2 * (-1) ** n for n, value in enumerate(values)], design=design)
        written = write_plots(compared(runs("a", values, design=design), setup, margin=1.0), tmp_path)
        assert ("looks.png" in {path.name for path in written}) is (design is not None)
