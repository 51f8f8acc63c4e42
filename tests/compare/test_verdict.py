"""The rule of the verdicts: by hand, at its borders, and in simulations of what it promises."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from runner.compare.statistics import Estimate, paired, t_quantile, welch
from runner.compare.verdict import (
    DIFFERENT,
    EQUIVALENT,
    NONE,
    UNDECIDED,
    Verdict,
    decide,
    further_seeds,
    kind_of,
    rule,
)


def spread_of(value: float, error: float, n: int = 4) -> Estimate:
    """Pairs with this mean and standard error."""
    sd = error * math.sqrt(n)
    return Estimate(value, error, n - 1, "paired", (n, n), (value,) * n, (sd, math.nan))


def test_two_one_sided_tests_by_hand() -> None:
    """Four pairs, t(0.95, 3) = 2.3534: a difference of 0.5 is equivalent just while 0.5 + 2.3534 · error < 1."""
    border = 0.5 / 2.3534
    assert decide(spread_of(0.5, border * 0.999), 1.0, "max").kind == EQUIVALENT
    assert decide(spread_of(0.5, border * 1.001), 1.0, "max").kind == UNDECIDED


def test_it_is_schuirmanns_procedure() -> None:
    """Equivalent exactly where both of SciPy's one-sided t tests against ∓margin reject at 5%."""
    draw = np.random.default_rng(0)
    kinds = []
    for _ in range(300):
        pairs = draw.normal(draw.normal(0, 0.6), draw.uniform(0.1, 1), 5)
        low = stats.ttest_1samp(pairs, -1.0, alternative="greater").pvalue
        high = stats.ttest_1samp(pairs, 1.0, alternative="less").pvalue
        kinds.append(decide(paired(list(pairs)), 1.0, "max").kind)
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


def test_equal_values_in_every_pair() -> None:
    """No spread at all: equal in every digit; a constant difference is decided by the margin."""
    assert decide(paired([0.0, 0.0]), 1.0, "max").text == "equivalent: equal in every digit"
    assert decide(paired([0.5, 0.5]), 1.0, "max").text == "equivalent"
    assert decide(paired([1.5, 1.5]), 1.0, "max").text == "different: better"


def test_one_seed_decides_nothing() -> None:
    """A single value has no interval: at least two more seeds, however large the difference."""
    assert decide(welch([90.0], [10.0]), 1.0, "max").text == "undecided: at least 2 more seeds"


def test_a_metric_that_is_no_number_gets_no_verdict() -> None:
    """A diverged seed makes the mean NaN: neither equivalent nor different."""
    assert decide(paired([math.nan, 0.0]), 1.0, "max").kind == NONE


@pytest.mark.parametrize("value", [0.0, 0.3, 0.8, 1.6, 2.5])
def test_further_seeds_are_the_fewest(value: float) -> None:
    """With N more seeds this difference and spread decide, with N − 1 they do not; from the t quantiles directly."""
    n, sd = 3, 1.3
    estimate = spread_of(value, sd / math.sqrt(n), n)
    assert decide(estimate, 1.0, "max").kind == UNDECIDED
    more = further_seeds(estimate, 1.0)
    assert more is not None

    def decides(seeds: int) -> bool:
        error = sd / math.sqrt(seeds)
        equivalent = value + t_quantile(0.90, seeds - 1) * error < 1
        return equivalent or value - t_quantile(0.95, seeds - 1) * error > 0

    assert decides(n + more)
    assert not decides(n + more - 1)


def test_further_seeds_of_unpaired_runs() -> None:
    """Welch: both sides get more seeds, and the answer decides where one fewer does not."""
    estimate = welch([1.0, 2.0, 3.5], [0.5, 2.5])
    more = further_seeds(estimate, 1.0)
    assert more is not None
    spreads = estimate.spreads
    for extra, decided in ((more, True), (more - 1, False)):
        a, b = (spread**2 / (n + extra) for spread, n in zip(spreads, estimate.sizes, strict=True))
        df = (a + b) ** 2 / (a**2 / (2 + extra) + b**2 / (1 + extra))
        half = [t_quantile(level, df) * math.sqrt(a + b) for level in (0.90, 0.95)]
        assert decided == (abs(estimate.value) + half[0] < 1 or abs(estimate.value) > half[1])


def test_the_search_ends() -> None:
    """A difference on the margin's edge with a large spread is not decided by a thousand seeds."""
    verdict = decide(spread_of(0.02, 30.0), 0.03, "max")
    assert verdict.text == "undecided: more than 1,000 more seeds"
    assert Verdict(UNDECIDED, more_seeds=1).text == "undecided: about 1 more seed"


def test_the_bootstrap_may_disagree_and_t_decides() -> None:
    """A skewed sample that t calls equivalent and BCa different: t's word stands, and the other is kept."""
    pairs = [0.0] * 6 + [0.02, 0.03, 0.05, 3.3]
    verdict = decide(paired(pairs), 1.0, "max")
    assert (verdict.kind, verdict.disagreement) == (EQUIVALENT, DIFFERENT)
    assert decide(paired(pairs[1:]), 1.0, "max").disagreement is None  # nine pairs: not asked


def test_the_rule_says_what_is_promised() -> None:
    """The rule in full names the margin, its source, and the false alarms to expect."""
    text = " ".join(rule(0.5, "points"))
    for words in ("±0.5 points", "Schuirmann 1987", "of 20 setups", "Nothing that is flagged is left out"):
        assert words in text


# Simulations. Each probability is estimated from TRIALS comparisons; the tolerance is 3.5 binomial standard deviations.
TRIALS = 3000
Sampler = Callable[[np.random.Generator, float], Estimate]


def pairs_of(n: int) -> Sampler:
    """Seeds move both setups alike, as pairing assumes."""

    def sample(draw: np.random.Generator, truth: float) -> Estimate:
        common = draw.normal(80, 2, n)
        return paired(list(common + truth + draw.normal(0, 0.6, n) - (common + draw.normal(0, 0.3, n))))

    return sample


def unpaired(sizes: tuple[int, int], spreads: tuple[float, float]) -> Sampler:
    def sample(draw: np.random.Generator, truth: float) -> Estimate:
        return welch(list(draw.normal(truth, spreads[0], sizes[0])), list(draw.normal(0, spreads[1], sizes[1])))

    return sample


#: With each case, by how much Welch's approximation of df is off at its worst (from 400,000 comparisons): it is too
#: careful with three values on both sides, and too bold where the side of three has the larger spread.
CASES = [
    pytest.param(pairs_of(3), 0.0, id="3 pairs"),
    pytest.param(pairs_of(5), 0.0, id="5 pairs"),
    pytest.param(pairs_of(10), 0.0, id="10 pairs"),
    pytest.param(unpaired((3, 3), (0.5, 0.5)), 0.021, id="Welch 3"),
    pytest.param(unpaired((5, 5), (0.5, 0.5)), 0.01, id="Welch 5"),
    pytest.param(unpaired((10, 10), (0.5, 0.5)), 0.01, id="Welch 10"),
    pytest.param(unpaired((3, 10), (0.9, 0.3)), 0.019, id="Welch 3 and 10, spreads 3 to 1"),
    pytest.param(unpaired((10, 5), (0.4, 1.2)), 0.01, id="Welch 10 and 5, spreads 1 to 3"),
]


def sure(share: float) -> float:
    return 3.5 * math.sqrt(share * (1 - share) / TRIALS)


@pytest.mark.parametrize(("sample", "slack"), CASES)
def test_intervals_cover_the_truth(sample: Sampler, slack: float) -> None:
    """A 95% interval holds the true difference in 95 of 100 comparisons, and a 90% interval in 90."""
    draw = np.random.default_rng(11)
    for level in (0.90, 0.95):
        intervals = [sample(draw, 0.7).interval(level) for _ in range(TRIALS)]
        covered = sum(one is not None and one.low <= 0.7 <= one.high for one in intervals) / TRIALS
        assert abs(covered - level) <= sure(level) + slack


def kinds(sample: Sampler, truth: float, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(TRIALS):
        narrow, wide = (estimate.interval(level) for estimate in [sample(draw, truth)] for level in (0.90, 0.95))
        assert narrow is not None
        assert wide is not None
        found.append(kind_of(narrow, wide, 1.0))
    return found


@pytest.mark.parametrize(("sample", "slack"), CASES)
def test_a_difference_of_the_margin_is_rarely_called_equivalent(sample: Sampler, slack: float) -> None:
    """With a true difference of exactly the margin, at most 5 of 100 comparisons say equivalent."""
    for truth in (1.0, -1.0):
        assert kinds(sample, truth, 12).count(EQUIVALENT) / TRIALS <= 0.05 + sure(0.05) + slack


@pytest.mark.parametrize(("sample", "slack"), CASES)
def test_no_difference_is_rarely_called_different(sample: Sampler, slack: float) -> None:
    """With no true difference, at most 5 of 100 comparisons say different."""
    assert kinds(sample, 0.0, 13).count(DIFFERENT) / TRIALS <= 0.05 + sure(0.05) + slack
