"""Equivalent, different or undecided: the rule, and how many more seeds a decision would take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from runner.compare.statistics import PAIRED, Estimate, Interval, bootstrap_interval, welch_error

EQUIVALENT, DIFFERENT, UNDECIDED, NONE = "equivalent", "different", "undecided", "no verdict"
#: Two one-sided tests at 5% are a 90% interval inside the margins (Schuirmann 1987); one two-sided test at 5% is a 95%
#: interval without 0.
EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL = 0.90, 0.95
_MOST_SEEDS = 1_000


@dataclass(frozen=True)
class Verdict:
    """`kind`: one of the four words; `better`: the sign of a difference in the metric's own direction.

    `more_seeds`: the fewest further seeds that would decide, None beyond 1,000 or where the kind needs none; `reason`:
    why there is no verdict; `disagreement`: what the bootstrap would have said, if something else.
    """

    kind: str
    better: bool | None = None
    more_seeds: int | None = None
    few_values: bool = False
    all_equal: bool = False
    reason: str = ""
    disagreement: str | None = None

    @property
    def text(self) -> str:
        """As it stands in a table."""
        if self.kind == DIFFERENT:
            return f"different: {'better' if self.better else 'worse'}"
        if self.kind == UNDECIDED:
            if self.few_values:
                return "undecided: at least 2 more seeds"
            number = f"more than {_MOST_SEEDS:,}" if self.more_seeds is None else f"about {self.more_seeds}"
            return f"undecided: {number} more seed{'s' if self.more_seeds != 1 else ''}"
        if self.kind == EQUIVALENT and self.all_equal:
            return "equivalent: equal in every digit"
        return self.kind if not self.reason else f"{self.kind}: {self.reason}"

    @property
    def in_short(self) -> str:
        """To be counted."""
        if self.kind == NONE:
            return "without verdict"
        return self.kind if self.better is None else f"{self.kind} ({'better' if self.better else 'worse'})"


def decide(difference: Estimate, margin: float, goal: str) -> Verdict:
    """The verdict on setup − baseline. `margin`: in the metric's unit; `goal`: `max` or `min`."""
    if not math.isfinite(difference.value):
        return Verdict(NONE, reason="a metric is no number")
    narrow, wide = difference.interval(EQUIVALENCE_LEVEL), difference.interval(DIFFERENCE_LEVEL)
    if narrow is None or wide is None:
        return Verdict(UNDECIDED, few_values=True)
    kind = kind_of(narrow, wide, margin)
    better = (difference.value > 0) == (goal == "max") if kind == DIFFERENT else None
    return Verdict(
        kind,
        better,
        further_seeds(difference, margin) if kind == UNDECIDED else None,
        all_equal=bool(difference.pairs) and not any(difference.pairs),
        disagreement=_disagreement(difference.pairs, kind, margin),
    )


def kind_of(narrow: Interval, wide: Interval, margin: float) -> str:
    """Equivalent, different or undecided, from the 90% and the 95% interval of a difference."""
    if -margin < narrow.low and narrow.high < margin:
        return EQUIVALENT
    return DIFFERENT if wide.low > 0 or wide.high < 0 else UNDECIDED


def further_seeds(difference: Estimate, margin: float) -> int | None:
    """The fewest further seeds with which this difference and spread would decide; None if that takes over 1,000."""
    for more in range(1, _MOST_SEEDS + 1):
        later = _with_more(difference, more)
        narrow, wide = later.interval(EQUIVALENCE_LEVEL), later.interval(DIFFERENCE_LEVEL)
        assert narrow is not None
        assert wide is not None
        if kind_of(narrow, wide, margin) != UNDECIDED:
            return more
    return None


def _with_more(difference: Estimate, more: int) -> Estimate:
    """The same difference and spread, had `more` seeds been run on each side."""
    sizes = (difference.sizes[0] + more, difference.sizes[1] + more)
    if difference.how == PAIRED:
        error, df = difference.spreads[0] / math.sqrt(sizes[0]), float(sizes[0] - 1)
    else:
        error, df = welch_error(difference.spreads, sizes)
    return dataclasses.replace(difference, standard_error=error, df=df, sizes=sizes, pairs=())


def _disagreement(pairs: Sequence[float], kind: str, margin: float) -> str | None:
    narrow, wide = (bootstrap_interval(pairs, level) for level in (EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL))
    if narrow is None or wide is None:
        return None
    other = kind_of(narrow, wide, margin)
    return other if other != kind else None


def rule(margin: float, unit: str) -> list[str]:
    """The rule in full, sentence by sentence, for the end of every report."""
    return [
        "The difference is setup − baseline, paired by seed as soon as two seeds are common (a rule that looks at the "
        "seeds alone), otherwise Welch's with Satterthwaite's degrees of freedom; its intervals are Student's t.",
        f"equivalent: the 90% interval of the difference lies inside ±{margin:g} {unit}, which is two one-sided tests "
        "at 5% (Schuirmann 1987).",
        "different: otherwise, if the 95% interval excludes 0; better or worse in the metric's own direction.",
        "undecided: otherwise. The number of further seeds is the fewest, up to 1,000, with which the observed "
        "difference and spread would decide either way; it is as uncertain as they are.",
        "Each verdict stands alone: of 20 setups that are truly like the baseline, one is expected to be called "
        "different.",
        "Speed-up is exp of the mean over seeds of log(baseline's seconds ÷ setup's seconds), with a 95% t interval on "
        "the log scale. ± after a mean is half of its 95% t interval.",
        "From 10 pairs on a BCa bootstrap interval is computed beside t's (Efron 1987); t decides, and where the "
        "bootstrap would decide otherwise the report says so.",
        "Nothing that is flagged is left out of a mean.",
    ]
