"""The margin, and the rule of the verdicts: by hand, at its borders, and in simulations of what it promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from runner.errors import UserError
from runner.tools.compare.statistics import Estimate, mean_of, welch
from runner.tools.compare.text import summary
from runner.tools.compare.verdict import (
    DIFFERENT,
    EQUIVALENT,
    FRACTION,
    NONE,
    PERCENT,
    UNDECIDED,
    UNKNOWN,
    decide,
    further_seeds,
    kind_of,
    margin_of,
)
from tests.tools.compare.make import KEY, block, compared, runs


def spread_of(value: float, error: float, n: int = 4) -> Estimate:
    """Pairs with this mean and standard error."""
    return Estimate(value, "paired", (n, n), (error * math.sqrt(n), math.nan))


@pytest.mark.parametrize(
    ("metric", "values", "value", "unit"),
    [
        ("accuracy", [73.0, 59.0], 1.0, PERCENT),
        ("accuracy", [0.73, 0.59], 0.01, FRACTION),
        ("accuracy", [0.4, 80.0], 1.0, PERCENT),  # a collapsed seed does not make it a fraction
        ("accuracy", [730.0, 590.0], None, UNKNOWN),
        ("metric", [0.73, 0.59], 0.01, FRACTION),  # the column of a CSV file
        ("eval_f1", [0.73], 0.01, FRACTION),
        ("exact_match", [73.0], 1.0, PERCENT),
        ("matthews", [-0.1, 0.5], 0.01, FRACTION),
        ("matthews", [-3.0, 50.0], 1.0, PERCENT),
        ("f1", [-0.1, 0.5], None, UNKNOWN),
        ("loss", [0.73, 0.59], None, UNKNOWN),
        ("f1_loss", [0.73, 0.59], None, UNKNOWN),
        ("seconds", [0.73, 0.59], None, UNKNOWN),
        ("accuracy", [math.nan, 0.5], 0.01, FRACTION),
        ("matthews", [0.0, 0.0], 1.0, PERCENT),  # of models that always predict the most frequent class
        ("accuracy", [], None, UNKNOWN),
    ],
)
def test_the_default_margin_has_the_unit_of_the_metric(
    metric: str, values: list[float], value: float | None, unit: str
) -> None:
    margin = margin_of(metric, values, None)
    assert (margin.value, margin.unit) == (value, unit)


def test_a_given_margin_is_used_as_it_is() -> None:
    assert margin_of("accuracy", [0.73], 0.05).text == "±0.05 (fraction of 1, --margin)"
    assert margin_of("loss", [2.5], 0.1).value == 0.1
    assert margin_of("matthews", [0.001, -0.002], 0.01).value == 0.01  # a correlation may be near 0


@pytest.mark.parametrize(
    ("metric", "values", "given"),
    [("accuracy", [0.73], 1.0), ("accuracy", [0.73], 0.8), ("accuracy", [99.0], 100.0), ("loss", [0.5, 0.6], 1.0)],
)
def test_a_margin_as_wide_as_the_metric_is_refused(metric: str, values: list[float], given: float) -> None:
    with pytest.raises(UserError, match=rf"--margin={given:g} .*\((fraction|percentage|unit)"):
        margin_of(metric, values, given)


def test_fractions_14_points_apart_are_not_equivalent() -> None:
    """The default margin was once 1 in whatever unit, which is the whole range of a fraction."""
    found = block(runs("one", [0.73, 0.735, 0.728]), runs("four", [0.59, 0.594, 0.589], workers=4))
    assert found.margin.text == "±0.01 (fraction of 1, default)"
    assert found.rows[1].verdict is not None
    assert found.rows[1].verdict.text == "different: worse"
    with pytest.raises(UserError, match="--margin=1 "):
        block(runs("one", [0.73, 0.735]), runs("four", [0.59, 0.594], workers=4), margin=1.0)


def test_the_blocks_of_an_experiment_share_a_scale() -> None:
    """A block in which every setup collapsed, below 1%, is still in percent."""
    low = replace(KEY, samples=10)
    groups = [runs("one", [80.0, 81.0]), runs("one", [0.5, 0.6], block=low), runs("two", [0.4, 0.6], block=low)]
    assert {one.margin.unit for one in compared(*groups).blocks} == {PERCENT}


def test_a_metric_of_unknown_scale_needs_a_margin() -> None:
    """Without --margin no loss is equivalent, unless it is identical; a sure difference is still different."""
    key = replace(KEY, metric="loss", goal="min")
    base = runs("one", [0.50, 0.51, 0.52], block=key)
    near = runs("near", [0.501, 0.51, 0.519], block=key)
    groups = [base, near, runs("worse", [0.60, 0.61, 0.625], block=key), runs("same", [0.50, 0.51, 0.52], block=key)]
    found = block(*groups, baseline="one")
    texts = {row.setup.name: row.verdict.text for row in found.rows[1:] if row.verdict}
    assert texts["near"] == "undecided: give --margin"
    assert texts["worse"] == "different: worse"
    assert texts["same"].startswith("equivalent: identical")
    near_row = next(row for row in found.rows if row.setup.name == "near")
    assert near_row.difference is not None
    assert near_row.difference.interval(0.9).known
    (_, row) = block(base, near, baseline="one", margin=0.05).rows
    assert row.verdict is not None
    assert row.verdict.kind == EQUIVALENT


def test_it_is_schuirmanns_procedure() -> None:
    """Equivalent exactly where both of SciPy's one-sided t tests against ∓margin reject at 5%."""
    draw = np.random.default_rng(0)
    kinds = []
    for _ in range(300):
        pairs = draw.normal(draw.normal(0, 0.6), draw.uniform(0.1, 1), 5)
        low = stats.ttest_1samp(pairs, -1.0, alternative="greater").pvalue
        high = stats.ttest_1samp(pairs, 1.0, alternative="less").pvalue
        kinds.append(decide(mean_of(list(pairs)), 1.0, "max").kind)
        assert (kinds[-1] == EQUIVALENT) == (max(low, high) < 0.05)
        if kinds[-1] != EQUIVALENT:
            assert (kinds[-1] == DIFFERENT) == (stats.ttest_1samp(pairs, 0.0).pvalue < 0.05)
    assert {EQUIVALENT, DIFFERENT, UNDECIDED} == set(kinds)


@pytest.mark.parametrize(
    ("value", "goal", "text"),
    [
        (5.0, "max", "different: better"),
        (-5.0, "max", "different: worse"),
        (5.0, "min", "different: worse"),
        (-5.0, "min", "different: better"),
    ],
)
def test_better_or_worse_in_the_metrics_own_direction(value: float, goal: str, text: str) -> None:
    """More accuracy is better; more loss is worse."""
    assert decide(spread_of(value, 0.1), 1.0, goal).text == text


def test_a_small_sure_difference_is_equivalent() -> None:
    """Equivalence comes first: an interval inside the margins that excludes 0 is called equivalent."""
    assert decide(spread_of(0.5, 0.01), 1.0, "max").kind == EQUIVALENT
    assert decide(spread_of(0.5, 0.01), 0.4, "max").kind == DIFFERENT


def test_verdicts_without_a_spread() -> None:
    """Identical values; a constant difference, decided by the margin; one seed; a metric that is not a number."""
    assert decide(mean_of([0.0, 0.0]), 1.0, "max").text.startswith("equivalent: identical")
    assert decide(mean_of([0.5, 0.5]), 1.0, "max").text == "equivalent"
    assert decide(mean_of([1.5, 1.5]), 1.0, "max").text == "different: better"
    assert decide(welch([90.0], [10.0]), 1.0, "max").text == "undecided: at least 2 more seeds"
    assert decide(mean_of([math.nan, 0.0]), 1.0, "max").kind == NONE


def test_a_metric_with_one_value_in_every_run_decides_nothing() -> None:
    """Paired by seed or not. If seeds differ, identical values are equivalent; one seed is undecided as ever."""
    dead = runs("one", [0.0, 0.0, 0.0])
    unpaired = [replace(one, seed=one.seed + 10) for one in runs("unpaired", [0.0, 0.0], workers=4)]
    found = block(dead, runs("paired", [0.0, 0.0, 0.0], workers=2), unpaired, runs("alive", [0.0, 0.0, 0.1], workers=8))
    verdicts = {row.setup.name: row.verdict for row in found.rows if row.verdict}
    for name in ("paired", "unpaired"):
        assert verdicts[name].kind == UNDECIDED
        assert "0 in every run" in verdicts[name].text
    assert "in every run" not in verdicts["alive"].text
    assert "2 undecided (the metric is 0 in every run" in summary(found)
    (_, row) = block(runs("one", [0.0, 1.0]), runs("two", [0.0, 1.0], workers=2)).rows
    assert row.verdict is not None
    assert row.verdict.text == "equivalent: identical values"
    (_, row) = block(runs("one", [0.0]), runs("two", [0.0], workers=2)).rows
    assert row.verdict is not None
    assert row.verdict.text == "undecided: at least 2 more seeds"


@pytest.mark.parametrize(
    "estimate", [spread_of(0.3, 0.75, 3), spread_of(0.8, 0.75, 3), welch([1.0, 2.0, 3.5], [0.5, 2.5])]
)
def test_further_seeds_are_the_fewest(estimate: Estimate) -> None:
    """With N more seeds on each side this difference and spread decide, with N − 1 they do not."""
    more = further_seeds(estimate, 1.0)
    assert more is not None
    for extra, kinds in ((more, {EQUIVALENT, DIFFERENT}), (more - 1, {UNDECIDED})):
        later = replace(estimate, sizes=(estimate.sizes[0] + extra, estimate.sizes[1] + extra), pairs=())
        assert kind_of(later.interval(0.90), later.interval(0.95), 1.0) in kinds


def test_the_search_ends() -> None:
    """A difference near the margin with a large spread is not decided by a thousand seeds."""
    assert decide(spread_of(0.02, 30.0), 0.03, "max").text == "undecided: more than 1,000 more seeds"


def test_the_bootstrap_may_disagree_and_t_decides() -> None:
    """A skewed sample that t calls equivalent and BCa different."""
    pairs = [0.0] * 6 + [0.02, 0.03, 0.05, 3.3]
    verdict = decide(mean_of(pairs), 1.0, "max")
    assert (verdict.kind, verdict.bootstrap) == (EQUIVALENT, DIFFERENT)
    assert decide(mean_of(pairs[1:]), 1.0, "max").bootstrap is None  # nine pairs: no bootstrap


# Simulations. Each probability is estimated from TRIALS comparisons; the tolerance is 3.5 binomial standard deviations.
TRIALS = 3000
Sampler = Callable[[np.random.Generator, float], Estimate]


def pairs_of(n: int) -> Sampler:
    """Seeds move both setups alike, as pairing assumes."""

    def sample(draw: np.random.Generator, truth: float) -> Estimate:
        common = draw.normal(80, 2, n)
        return mean_of(list(common + truth + draw.normal(0, 0.6, n) - (common + draw.normal(0, 0.3, n))))

    return sample


def unpaired(sizes: tuple[int, int], spreads: tuple[float, float]) -> Sampler:
    def sample(draw: np.random.Generator, truth: float) -> Estimate:
        return welch(list(draw.normal(truth, spreads[0], sizes[0])), list(draw.normal(0, spreads[1], sizes[1])))

    return sample


#: With each case, by how much Welch's approximation of df is off at its worst (from 400,000 comparisons): too careful
#: with three values on both sides, too bold if the side of three has the larger spread.
CASES = [
    pytest.param(pairs_of(3), 0.0, id="3 pairs"),
    pytest.param(pairs_of(5), 0.0, id="5 pairs"),
    pytest.param(pairs_of(10), 0.0, id="10 pairs"),
    pytest.param(unpaired((3, 3), (0.5, 0.5)), 0.021, id="Welch 3"),
    pytest.param(unpaired((10, 10), (0.5, 0.5)), 0.01, id="Welch 10"),
    pytest.param(unpaired((3, 10), (0.9, 0.3)), 0.019, id="Welch 3 and 10, spreads 3 to 1"),
]


@pytest.mark.parametrize(("sample", "slack"), CASES)
def test_coverage_and_error_rates(sample: Sampler, slack: float) -> None:
    """Intervals contain the true difference as often as they say; both errors are rare.

    A true difference of the margin is called equivalent, and no difference is called different, in at most 5 of 100.
    """

    def share(truth: float, holds: Callable[[Estimate], bool]) -> float:
        draw = np.random.default_rng(11)
        return sum(holds(sample(draw, truth)) for _ in range(TRIALS)) / TRIALS

    def within(level: float, slack: float = slack) -> float:
        return 3.5 * math.sqrt(level * (1 - level) / TRIALS) + slack

    for level in (0.90, 0.95):
        covered = share(0.7, lambda one: one.interval(level).low <= 0.7 <= one.interval(level).high)  # noqa: B023
        assert abs(covered - level) <= within(level)
    for truth, error in ((1.0, EQUIVALENT), (0.0, DIFFERENT)):
        found = share(truth, lambda one: kind_of(one.interval(0.90), one.interval(0.95), 1.0) == error)  # noqa: B023
        assert found <= 0.05 + within(0.05)
