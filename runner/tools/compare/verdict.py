"""Equivalent, different or undecided: the margin, the rule, and how many more seeds a decision would take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runner.errors import require
from runner.tools.compare.design import Design, Levels
from runner.tools.compare.runs import LOWER_IS_BETTER
from runner.tools.compare.statistics import PAIRED, SINGLE_VALUE, Estimate, Interval

EQUIVALENT, DIFFERENT, UNDECIDED, NONE = "equivalent", "different", "undecided", "no verdict"
#: Two one-sided tests at 5% are a 90% interval inside the margin (Schuirmann 1987). One two-sided test at 5% is a 95%
#: interval without 0.
EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL = 0.90, 0.95
FIXED = Levels(EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL)
_MOST_SEEDS = 1_000

PERCENT, FRACTION, UNKNOWN = "percentage points", "fraction of 1", "unit of the metric"
#: The largest value on each scale, and the default margin: 1 percentage point. Other metrics have no default.
_SCALES = {FRACTION: (1.0, 0.01), PERCENT: (100.0, 1.0)}
#: Correlations, which can be negative, and other rates. `metric` is the column of a file of published scores.
_CORRELATION = re.compile(r"(^|[^a-z0-9])(matthews|mcc|kappa|pearson|spearman)", re.IGNORECASE)
_RATE = re.compile(
    r"(^|[^a-z0-9])(acc|accuracy|f1|exact_match|em|precision|recall|sensitivity|specificity|auc|auroc|roc_auc|iou|dice|"
    r"bleu|rouge\w*|metric)([^a-z0-9]|$)",
    re.IGNORECASE,
)
#: Those of them to which a row contributes one prediction that is right or wrong. Tokens and rankings of rows are none.
_COUNTS_ROWS = re.compile(
    r"(^|(?<!token)[^a-z0-9])(acc|accuracy|exact_match|em|f1|(?<!average.)precision|recall|sensitivity|specificity|matthews|"
    r"mcc|kappa|metric)([^a-z0-9]|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Margin:
    """Differences within ± `value` are equivalent. None: --margin was not given and the metric has no default.

    `lowest`, `width`: of the metric's scale, if the metric counts rows, so that it moves in steps.
    """

    value: float | None
    unit: str
    source: str
    lowest: float = 0.0
    width: float | None = None

    @property
    def text(self) -> str:
        """Words such as `±0.01 (fraction of 1, default)`."""
        if self.value is None:
            return "none, because the scale of the metric is unknown: give --margin"
        return f"±{self.value:g} ({self.unit}, {self.source})"


def margin_of(metric: str, values: Iterable[float], given: float | None) -> Margin:
    """The margin for a metric, in the unit of its `values` (all runs). `given`: --margin.

    Raises UserError for a given margin as wide as the metric itself, which would make every setup equivalent.
    """
    finite = [value for value in values if math.isfinite(value)]
    unit = _unit(metric, finite)
    limit, default = _SCALES.get(unit, (math.inf, None))
    if given is None:
        return Margin(default, unit, "default", *_scale(metric, unit))
    largest = max(map(abs, finite), default=0.0)
    if largest and not _CORRELATION.search(metric):  # a correlation may well be near 0
        limit = min(limit, largest)
    rule = f"use less than {limit:g}, which is as wide as {metric} itself ({unit}): everything would be equivalent"
    require(given < limit, "--margin", f"{given:g}", rule)
    return Margin(given, unit, "--margin", *_scale(metric, unit))


def has_default_margin(metric: str) -> bool:
    """Return whether a metric of this name has one, if its values are fractions or percentages."""
    return not LOWER_IS_BETTER.search(metric) and bool(_CORRELATION.search(metric) or _RATE.search(metric))


def _scale(metric: str, unit: str) -> tuple[float, float | None]:
    """The lower end of the scale of a metric that counts rows, and its width."""
    if unit == UNKNOWN or not _COUNTS_ROWS.search(metric):
        return 0.0, None
    limit, _ = _SCALES[unit]
    return (-limit, 2 * limit) if _CORRELATION.search(metric) else (0.0, limit)


def _unit(metric: str, values: Sequence[float]) -> str:
    """Rates are fractions if every value can be one and not all are 0, else percentages; that of a loss is unknown."""
    signed = _CORRELATION.search(metric) is not None
    if LOWER_IS_BETTER.search(metric) or not (signed or _RATE.search(metric)):
        return UNKNOWN
    scales = _SCALES if any(values) else [PERCENT]  # 0 is on either scale, and our own recipes log percentages
    for unit in scales if values else ():
        limit, _ = _SCALES[unit]
        if all((-limit if signed else 0) <= value <= limit for value in values):
            return unit
    return UNKNOWN


@dataclass(frozen=True)
class Verdict:
    """`kind`: one of the four words; `detail`: the rest of the text; `better`: whether a difference is an improvement;
    `bootstrap`: what the bootstrap interval would decide, if that is another kind; `constant`: whether the metric says
    nothing, since it is the same in every run, or no better than that of a constant answer; `certain`: known without
    a test."""

    kind: str
    detail: str = ""
    better: bool | None = None
    bootstrap: str | None = None
    constant: bool = False
    certain: bool = False

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    @property
    def short(self) -> str:
        """The words for counting: without what differs from setup to setup."""
        return f"{self.kind} ({self.detail})" if self.kind == DIFFERENT or self.constant else self.kind


def decide(
    difference: Estimate, margin: float | None, goal: str, constant: float | None = None, design: Design | None = None
) -> Verdict:
    """The verdict on setup − baseline. `margin`: None if there is none; `goal`: `max` or `min`; `constant`: the value
    of the metric if every run of both has the same one, as a model has that always predicts the most frequent class;
    `design`: of a sweep that added seeds until there was a verdict."""
    if not math.isfinite(difference.value):
        return Verdict(NONE, "a metric is NaN or infinite")
    levels = levels_of(difference, design)
    narrow, wide = difference.interval(levels.equivalence), difference.interval(levels.difference)
    if difference.how == SINGLE_VALUE:
        return Verdict(UNDECIDED, "at least 2 more seeds")
    if constant is not None:
        return Verdict(
            UNDECIDED, f"the metric is {constant:.4g} in every run and cannot tell setups apart", constant=True
        )
    identical = bool(difference.pairs) and not any(difference.pairs)
    if identical and (margin is None or difference.sampling is None):
        return Verdict(EQUIVALENT, "identical values")
    kind = kind_of(narrow, wide, margin)
    bootstrap = _by_bootstrap(difference, margin) if design is None else kind
    disagreement = bootstrap if bootstrap != kind else None
    if kind == DIFFERENT:
        better = (difference.value > 0) == (goal == "max")
        return Verdict(kind, "better" if better else "worse", better, disagreement)
    detail = "identical values" if identical else ""
    if kind == UNDECIDED:
        detail = _what_would_decide(difference, margin) if design is None else _left_to_do(difference, margin, design)
    return Verdict(kind, detail, None, disagreement)


def levels_of(difference: Estimate, design: Design | None) -> Levels:
    """The levels that decide: of one look at a number of seeds that was fixed before, or of a design's next look."""
    if design is None:
        return FIXED
    return design.levels(difference.sizes[0] if difference.how == PAIRED else 0)


def _left_to_do(difference: Estimate, margin: float | None, design: Design) -> str:
    seeds = difference.sizes[0]
    if margin is not None and difference.sampling is not None and design.rows_leave_open(difference, margin):
        more = rows_needed(difference, margin)
        few = f"{difference.sampling.rows:,} evaluation rows are too few for a margin of {margin:g}"
        return few if more is None else f"{few}, use {more:,}"
    words = "after" if seeds < design.max_seeds else "not decidable with"
    return f"{words} {seeds} of at most {design.max_seeds} seeds"


def too_few_rows(difference: Estimate, margin: float | None) -> str | None:
    """The reason why no number of seeds would decide; None if some would, at the levels of a fixed number."""
    if margin is None or further_seeds(difference, margin) is not None:
        return None
    if (rows := rows_needed(difference, margin)) is None:
        return None
    assert difference.sampling is not None
    return f"{difference.sampling.rows:,} evaluation rows are too few for a margin of {margin:g}, use {rows:,}"


def by_holm(
    tests: Mapping[str, tuple[Verdict, Estimate]], margin: float | None, number: int | None = None
) -> dict[str, Verdict]:
    """The verdicts of several setups, of which a wrong one of each kind has a probability of at most 5% (Holm 1979).

    `number`: of the setups from which these were chosen by their results; by default there are no others.
    """
    number = number or len(tests)
    limit = math.inf if margin is None else margin  # without a margin only identical values are equivalent
    p_values = {
        DIFFERENT: {name: one.p_value(abs(one.value)) for name, (_, one) in tests.items()},
        # Two one-sided tests: half of the two-sided p value.
        EQUIVALENT: {name: one.p_value(limit - abs(one.value)) / 2 for name, (_, one) in tests.items()},
    }
    kept = {kind: _rejected(values, 1 - DIFFERENCE_LEVEL, number) for kind, values in p_values.items()}
    undecided = Verdict(UNDECIDED, f"not certain enough for one of {number} verdicts")
    return {
        name: verdict if verdict.kind not in kept or name in kept[verdict.kind] else undecided
        for name, (verdict, _) in tests.items()
    }


def _rejected(p_values: Mapping[str, float], alpha: float, number: int) -> set[str]:
    """The hypotheses that Holm's step-down procedure rejects, of this number, where the p values of others are 1."""
    rejected: set[str] = set()
    for name in sorted(p_values, key=lambda name: p_values[name]):
        if p_values[name] > alpha / (number - len(rejected)):
            break
        rejected.add(name)
    return rejected


def kind_of(narrow: Interval, wide: Interval, margin: float | None) -> str:
    """Equivalent, different or undecided, from the 90% and the 95% interval of a difference."""
    if margin is not None and -margin < narrow.low and narrow.high < margin:
        return EQUIVALENT
    return DIFFERENT if wide.low > 0 or wide.high < 0 else UNDECIDED


def _by_bootstrap(difference: Estimate, margin: float | None) -> str | None:
    narrow, wide = (difference.bootstrap(level) for level in (EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL))
    return kind_of(narrow, wide, margin) if narrow is not None and wide is not None else None


def _what_would_decide(difference: Estimate, margin: float | None) -> str:
    if margin is None:
        return "give --margin"
    if (rows := too_few_rows(difference, margin)) is not None:
        return rows
    more = further_seeds(difference, margin)
    if more is None:
        return f"more than {_MOST_SEEDS:,} more seeds"
    return f"about {more} more seed{'s' if more > 1 else ''}"


def further_seeds(difference: Estimate, margin: float) -> int | None:
    """The fewest further seeds on each side with which this difference and spread would decide; None if over 1,000."""
    more = np.arange(1, _MOST_SEEDS + 1)
    narrow, wide = (difference.half_width(level, more) for level in (EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL))
    return _first(more, _decides(difference, margin, narrow, wide))


def rows_needed(difference: Estimate, margin: float) -> int | None:
    """The evaluation rows, in steps of a hundredth, with which many seeds would decide; None if these rows are enough.

    At most a hundred times as many as there are.
    """
    sampling = difference.sampling
    if sampling is None:
        return None
    more = np.ceil(sampling.rows * 1.01 ** np.arange(464)).astype(int)
    widths = (sampling.half_width(level, more) for level in (EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL))
    rows = _first(more, _decides(difference, margin, *widths))
    return None if rows == sampling.rows else rows


def _decides(difference: Estimate, margin: float, narrow: np.ndarray, wide: np.ndarray) -> np.ndarray:
    """Return whether these half widths of the two intervals do, bool of the same shape."""
    size = abs(difference.value)
    return (size + narrow < margin) | (size > wide)


def _first(numbers: np.ndarray, holds: np.ndarray) -> int | None:
    return int(numbers[holds.argmax()]) if holds.any() else None
