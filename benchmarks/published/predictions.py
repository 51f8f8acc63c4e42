"""Predict the training times of a series of setups from a few of them: seconds = a + b/steps.

In a series only `k`, or only the accumulation, differs. Each run then computes the same samples, which takes *a*
seconds, and k decides how often workers synchronise, which takes *b* seconds if they do so in every step. With
accumulation *b* contains the optimizer's steps, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from runner.tools.compare.results import Block
from runner.tools.compare.runs import ACCUMULATION, BlockKey, K, grouped
from runner.tools.compare.setups import SetupRuns

#: A time further than this from a fit contradicts it.
MAX_FIT_ERROR = 0.10
#: Wrong cells are off by at least this multiple of the largest error of the others.
MIN_ERROR_RATIO = 2
#: Cells are called wrong if at least so many others agree, and at most so many of a series are.
MIN_AGREEING_CELLS, MAX_WRONG_CELLS = 3, 2


@dataclass(frozen=True)
class Fit:
    """seconds = `a` + `b` / steps."""

    a: float
    b: float

    @classmethod
    def through(cls, seconds: Mapping[int, float]) -> Fit:
        """The fit with the smallest sum of squared relative errors; `seconds` by steps, two at least."""
        rows = [[1 / value, 1 / steps / value] for steps, value in seconds.items()]
        a, b = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
        return cls(float(a), float(b))

    def seconds(self, steps: int) -> float:
        return self.a + self.b / steps

    def error(self, steps: int, seconds: float) -> float:
        """Predicted ÷ measured − 1."""
        return self.seconds(steps) / seconds - 1

    def contradicted_by(self, steps: int, seconds: float) -> bool:
        return abs(self.error(steps, seconds)) > MAX_FIT_ERROR


@dataclass(frozen=True)
class Series:
    """Setups that differ only in their steps, by steps in ascending order, all with times.

    `fitted`: the steps whose times `fit` uses; `wrong`: those whose times contradict those of `agreeing`.
    """

    key: BlockKey
    workers: int
    method: str
    setups: Mapping[int, SetupRuns]
    fit: Fit
    fitted: AbstractSet[int]
    wrong: AbstractSet[int]
    agreeing: AbstractSet[int]

    @property
    def title(self) -> str:
        words = (self.key.experiment, *self.key.conditions, f"{self.workers} workers by {self.method}")
        return " · ".join(word for word in words if word)

    @property
    def seconds(self) -> dict[int, float]:
        return _seconds(self.setups)

    @property
    def errors(self) -> dict[int, float]:
        """Predicted ÷ measured − 1 of the predicted cells, by steps."""
        return {k: self.fit.error(k, value) for k, value in self.seconds.items() if k not in self.fitted}

    @property
    def trusted_errors(self) -> dict[int, float]:
        """The same without cells that several others contradict, and without what is predicted from such a cell."""
        if len(self.setups) <= MIN_AGREEING_CELLS:
            return self.errors
        return {} if self.wrong & self.fitted else {k: one for k, one in self.errors.items() if k not in self.wrong}

    @property
    def contradictions(self) -> Iterator[str]:
        """Such as `4 GPUs · k = 4 · 4,000 samples: 240 s, where k = 1, 2, 8, 16 say 187 s`."""
        for steps in sorted(self.wrong):
            expected = Fit.through({k: self.seconds[k] for k in self.agreeing}).seconds(steps)
            text = f"{self.setups[steps].name} · {self.key.total_samples:,} samples: {shown(self.seconds[steps])} s, "
            text += f"where {self.method} = {', '.join(map(str, sorted(self.agreeing)))} say {shown(expected)} s"
            for seed, (seconds, by_own) in self.seeds_off(steps).items():
                text += f"; seed {seed} took {shown(seconds)} s, where its own other cells say {shown(by_own)} s"
            yield text

    def seeds_off(self, steps: int) -> dict[int, tuple[float, float]]:
        """Measured and expected seconds of the seeds, if not all, that contradict the other cells of the same seed.

        A seed may have run elsewhere.
        """
        off, times = {}, {k: setup.seconds for k, setup in self.setups.items()}
        for seed, seconds in times[steps].items():
            known = {k: times[k][seed] for k in self.agreeing if seed in times[k]}
            if len(known) >= 2 and (fit := Fit.through(known)).contradicted_by(steps, seconds):
                off[seed] = (seconds, fit.seconds(steps))
        return off if len(off) < len(times[steps]) else {}


def predict(blocks: Iterable[Block], fitted: AbstractSet[int]) -> list[Series]:
    """Fit each series that has these steps and others on these, and predict the others."""
    found = []
    for block in blocks:
        for workers, method, setups in _series_of(block):
            if fitted < setups.keys():
                seconds = _seconds(setups)
                fit = Fit.through({steps: seconds[steps] for steps in fitted})
                wrong, agreeing = _contradicting(seconds, fitted)
                found.append(Series(block.key, workers, method, setups, fit, fitted, wrong, agreeing))
    return found


def _seconds(setups: Mapping[int, SetupRuns]) -> dict[int, float]:
    """The mean over seeds, by steps."""
    return {steps: fmean(setup.seconds.values()) for steps, setup in setups.items()}


def _contradicting(seconds: Mapping[int, float], fitted: AbstractSet[int]) -> tuple[AbstractSet[int], AbstractSet[int]]:
    """The cells whose times contradict others, and those others.

    If a prediction is off, a cell may be wrong, and it may be a fitted one, which spoils the predictions of all others.
    Wrong are the fewest cells without which a fit of the rest holds, and from which they are far off by the errors of
    the rest. If there are none, the law or the choice of fitted cells may be wrong. Fewer cells than that takes are
    compared with the fitted ones.
    """
    fit = Fit.through({steps: seconds[steps] for steps in fitted})
    off = {steps for steps in seconds.keys() - fitted if fit.contradicted_by(steps, seconds[steps])}
    if not off or len(seconds) <= MIN_AGREEING_CELLS:
        return off, fitted
    for count in range(1, min(MAX_WRONG_CELLS, len(seconds) - MIN_AGREEING_CELLS, (len(seconds) - 1) // 2) + 1):
        subsets = [frozenset(one) for one in itertools.combinations(seconds, count)]
        wrong = min(subsets, key=lambda one: _errors(seconds, seconds.keys() - one)[0])
        others = seconds.keys() - wrong
        largest, errors = _errors(seconds, others)
        smallest = max(MAX_FIT_ERROR, MIN_ERROR_RATIO * largest)
        if largest <= MAX_FIT_ERROR and min(errors[steps] for steps in wrong) > smallest:
            return wrong, others
    return frozenset(), fitted


def _errors(seconds: Mapping[int, float], cells: AbstractSet[int]) -> tuple[float, dict[int, float]]:
    """The largest error of a fit of `cells` among them, and the size of each error, by steps."""
    fit = Fit.through({steps: seconds[steps] for steps in cells})
    errors = {steps: abs(fit.error(steps, value)) for steps, value in seconds.items()}
    return max(errors[steps] for steps in cells), errors


def _series_of(block: Block) -> Iterator[tuple[int, str, dict[int, SetupRuns]]]:
    """Workers, method and setups by steps of each series of a block.

    A fully synchronous setup is the same experiment under both methods: a series that lacks it begins with
    that of the other method.
    """
    timed = [row.setup for row in block.rows if row.setup.seconds]
    for workers, setups in grouped(timed, lambda one: one.first.workers).items():
        by_method = {K: _of_method(setups, K), ACCUMULATION: _of_method(setups, ACCUMULATION)}
        for method, own in by_method.items():
            other = by_method[ACCUMULATION if method == K else K]
            series = {steps: one for steps, one in other.items() if steps == 1} | own
            if own and len(series) > 1:
                yield workers, method, dict(sorted(series.items()))


def _of_method(setups: Sequence[SetupRuns], method: str) -> dict[int, SetupRuns]:
    """The setups by steps."""
    members = [one for one in setups if one.first.method == method]
    return {one.first.k if method == K else one.first.accumulation: one for one in members}


def shown(seconds: float) -> str:
    return f"{seconds:,.0f}" if abs(seconds) >= 100 else f"{seconds:.3g}"
