"""Predict the training times of a series of setups from a few of them: seconds = a + b/k.

In a series only `k`, or only the accumulation, differs. Each run then computes the same samples, which takes *a*
seconds, and k decides how often workers synchronise, which takes *b* seconds if they do so in every step. With
accumulation *b* contains the optimizer's steps, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.errors import UserError, did_you_mean, require
from runner.tools.compare.runs import ACCUMULATION, BlockKey, K, grouped

if TYPE_CHECKING:  # imports scipy
    from runner.tools.compare.results import Block
    from runner.tools.compare.setups import SetupRuns

OPTION = "--predict-from"
#: A time further than this from a fit contradicts it.
CONTRADICTION = 0.10
#: Cells are called wrong if they are off by this multiple of the others' largest error, and at least `AGREEING` others
#: agree; at most `MOST_WRONG` of a series.
CLEAR, AGREEING, MOST_WRONG = 2, 3, 2
TELLING_FROM = AGREEING + 1
#: How the steps of a method are called, in small letters and with underscores; `steps` stands for both methods.
_NAMES = {
    **dict.fromkeys(("k", "k_batch", "sync.k", "local_steps"), (K,)),
    **dict.fromkeys(("accumulation", "accumulation_steps", "acc", "accum"), (ACCUMULATION,)),
    **dict.fromkeys(("gradient_accumulation", "gradient_accumulation_steps", "grad_accumulation"), (ACCUMULATION,)),
    "steps": (K, ACCUMULATION),
}
_CELL = re.compile(r"([a-z_.]*)\s*[= :]?\s*([0-9]+)")
_FORMULA = {K: "b/k", ACCUMULATION: "b/accumulation_steps"}


def named_cells(text: str) -> dict[str, frozenset[int]]:
    """The steps by method that `k=1,k=16` names. A number alone continues the name before it. Raises UserError."""
    steps: dict[str, set[int]] = {}
    methods: tuple[str, ...] = ()
    for part in re.split("[,;]", text):
        found = _CELL.fullmatch(part.strip().lower().replace("-", "_").replace("gradient ", "gradient_"))
        require(found is not None, OPTION, text, "write cells as k=1,k=16 or accumulation=1,accumulation=16")
        assert found is not None
        name, number = found[1], int(found[2])
        require(name in _NAMES or not name, OPTION, text, f"'{name}' is no name of steps{did_you_mean(name, _NAMES)}")
        methods = _NAMES[name] if name else methods
        require(bool(methods), OPTION, text, f"say what {number} counts: k={number} or accumulation={number}")
        require(number >= 1, OPTION, text, "steps are whole numbers from 1")
        for method in methods:
            steps.setdefault(method, set()).add(number)
    for method, numbers in steps.items():
        example = f"name another one, such as {method}={16 if 16 not in numbers else 1}"
        require(len(numbers) >= 2, OPTION, text, f"two cells determine a and b, and {method} has one: {example}")
    return {method: frozenset(numbers) for method, numbers in steps.items()}


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
        return abs(self.error(steps, seconds)) > CONTRADICTION


@dataclass(frozen=True)
class Cell:
    """A setup of a series. `predicted`: seconds; `named`: the fit uses it; `flagged`: its time contradicts others."""

    steps: int
    setup: SetupRuns
    predicted: float
    named: bool
    flagged: bool

    @property
    def seconds(self) -> float:
        """The mean over seeds."""
        return fmean(self.setup.seconds.values())

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1."""
        return self.predicted / self.seconds - 1

    @property
    def texts(self) -> tuple[str, str, str]:
        """Measured and predicted seconds, and the error; `fitted` instead of a prediction."""
        measured = seconds_text(self.seconds) + ("*" if self.flagged else "")
        if self.named:
            return (measured, "fitted", "")
        return (measured, seconds_text(self.predicted), f"{self.error:+.1%}".replace("-", "−"))


@dataclass(frozen=True)
class Series:
    """Setups that differ only in their steps, in that order. `flags`: a sentence for each flagged cell."""

    key: BlockKey
    workers: int
    method: str
    fit: Fit
    cells: tuple[Cell, ...]
    flags: tuple[str, ...]

    @property
    def predicted(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.named]

    @property
    def trusted(self) -> list[Cell]:
        """The predicted cells without those that several others contradict, or that are predicted from such a cell."""
        if len(self.cells) < TELLING_FROM:
            return self.predicted
        wrong = any(cell.named and cell.flagged for cell in self.cells)
        return [] if wrong else [cell for cell in self.predicted if not cell.flagged]

    @property
    def title(self) -> str:
        """Of all series that differ only in the number of samples."""
        words = (self.key.experiment, *self.key.conditions, _family(self.workers, self.method))
        return " · ".join(word for word in words if word)

    @property
    def summary(self) -> str:
        sign = "+" if self.fit.b >= 0 else "−"
        formula = _FORMULA[self.method].replace("b", seconds_text(abs(self.fit.b)), 1)
        errors = [cell.error for cell in self.predicted]
        text = f"{self.key.total_samples:,} samples: seconds = {seconds_text(self.fit.a)} {sign} {formula}; "
        text += errors_text(errors)
        if not self.flags and max(map(abs, errors)) > CONTRADICTION:
            text += "; no cell is clearly wrong, so a + b/steps may not hold, or the named cells are too close together"
        return text


@dataclass(frozen=True)
class PredictionTable:
    """Series that differ only in the number of samples: one per row."""

    title: str
    rows: tuple[Series, ...]

    @property
    def steps(self) -> list[int]:
        """The columns."""
        return sorted({cell.steps for series in self.rows for cell in series.cells})

    def texts(self, series: Series) -> list[tuple[str, str, str]]:
        """The cells of a row; empty where nothing was run."""
        cells = {cell.steps: cell.texts for cell in series.cells}
        return [cells.get(steps, ("", "", "")) for steps in self.steps]


@dataclass(frozen=True)
class Predictions:
    """`notes`: what was not predicted, and why."""

    series: tuple[Series, ...]
    notes: tuple[str, ...]

    @property
    def tables(self) -> list[PredictionTable]:
        groups = grouped(self.series, lambda one: one.title).items()
        return [PredictionTable(title, tuple(members)) for title, members in groups]

    @property
    def summary(self) -> str:
        """Such as `48 times predicted: median error 1.6%, largest 15.4%; without what is flagged …`."""
        cells = [cell for one in self.series for cell in one.predicted]
        text = f"{len(cells)} times predicted: {errors_text([cell.error for cell in cells])}"
        trusted = [cell.error for one in self.series for cell in one.trusted]
        if len(trusted) < len(cells):
            text += f"; without flagged cells and what is predicted from them {len(trusted)}"
            text += f": {errors_text(trusted)}" if trusted else ""
        return text


def errors_text(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median error {median(sizes):.1%}, largest {max(sizes):.1%}"


def predict(blocks: Iterable[Block], text: str) -> Predictions:
    """Fit each series on the cells that `text` names and predict its other cells. Raises UserError."""
    named = named_cells(text)
    found = [one for block in blocks for one in _series_of(block)]
    asked = [one for one in found if one.method in named]
    complete = [one for one in asked if named[one.method] <= one.seconds.keys()]
    if not complete:
        raise UserError(f"{OPTION}={text} is invalid: {_what_is_missing(named, asked)}")
    series = [one.fitted(named[one.method]) for one in complete if one.seconds.keys() - named[one.method]]
    require(bool(series), OPTION, text, "the series have no other cell to predict: name fewer, or other ones")
    return Predictions(tuple(series), tuple(_notes(named, found, complete)))


def _what_is_missing(named: Mapping[str, AbstractSet[int]], asked: Sequence[_Timed]) -> str:
    """Why no series has the named cells, by the one that has most of them."""
    if not asked:
        return f"no {' or '.join(named)} series with several times is in the file: name cells that are there"
    nearest = max(asked, key=lambda one: len(named[one.method] & one.seconds.keys()))
    missing = ", ".join(f"{nearest.method}={steps}" for steps in sorted(named[nearest.method] - nearest.seconds.keys()))
    there = ", ".join(map(str, nearest.seconds))
    return f"no series has times of all these cells; {nearest.name} has {nearest.method}={there}, but not {missing}"


def _notes(named: Mapping[str, AbstractSet[int]], found: Sequence[_Timed], complete: Sequence[_Timed]) -> Iterator[str]:
    if incomplete := [one.name for one in found if one.method in named and one not in complete]:
        yield f"not predicted, since a named cell has no time: {'; '.join(incomplete)}"
    for method, members in grouped(found, lambda one: one.method).items():
        if method not in named:
            example = f"{method}={min(members[0].seconds)},{method}={max(members[0].seconds)}"
            yield f"not predicted, since no cell of theirs is named: {len(members)} series by {method} (add {example})"


@dataclass(frozen=True)
class _Timed:
    """A series whose setups have times. `setups`: by steps, in ascending order."""

    key: BlockKey
    workers: int
    method: str
    setups: Mapping[int, SetupRuns]

    @property
    def seconds(self) -> dict[int, float]:
        """The mean over seeds, by steps."""
        return {steps: fmean(setup.seconds.values()) for steps, setup in self.setups.items()}

    @property
    def name(self) -> str:
        return f"{self.key.title} · {_family(self.workers, self.method)}"

    def fitted(self, named: AbstractSet[int]) -> Series:
        """`named`: steps of the cells to fit."""
        seconds = self.seconds
        fit = _fit_of(seconds, named)
        flagged, others = _contradicting(seconds, named)
        cells = tuple(
            Cell(steps, setup, fit.seconds(steps), steps in named, steps in flagged)
            for steps, setup in self.setups.items()
        )
        flags = tuple(self._flag(cell, others) for cell in cells if cell.flagged)
        return Series(self.key, self.workers, self.method, fit, cells, flags)

    def _flag(self, cell: Cell, others: AbstractSet[int]) -> str:
        """Such as `4 GPUs · k = 4 · 4,000 samples: 240 s, where k = 1, 2, 8, 16 say 187 s (1.28 ×)`."""
        expected = _fit_of(self.seconds, others).seconds(cell.steps)
        text = f"{cell.setup.name} · {self.key.total_samples:,} samples: {seconds_text(cell.seconds)} s, where "
        text += f"{self.method} = {', '.join(map(str, sorted(others)))} say {seconds_text(expected)} s"
        if seeds := self._seeds_off(cell, others):
            text += f"; {' and '.join(seeds)}"
        if cell.named:
            text += "; what is predicted from this cell is as far off: name another one"
        return text

    def _seeds_off(self, cell: Cell, others: AbstractSet[int]) -> list[str]:
        """The seeds, if not all, that contradict the other cells of the same seed: a seed may have run elsewhere."""
        off = []
        for seed, seconds in cell.setup.seconds.items():
            own = {steps: self.setups[steps].seconds.get(seed) for steps in others}
            known = {steps: value for steps, value in own.items() if value is not None}
            if len(known) >= 2 and (fit := Fit.through(known)).contradicted_by(cell.steps, seconds):
                by_own = seconds_text(fit.seconds(cell.steps))
                off.append(f"seed {seed} took {seconds_text(seconds)} s, where its own other cells say {by_own} s")
        return off if len(off) < len(cell.setup.seconds) else []


def _family(workers: int, method: str) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''} by {method}"


def _fit_of(seconds: Mapping[int, float], cells: AbstractSet[int]) -> Fit:
    return Fit.through({steps: seconds[steps] for steps in cells})


def _contradicting(seconds: Mapping[int, float], named: AbstractSet[int]) -> tuple[AbstractSet[int], AbstractSet[int]]:
    """The cells whose times contradict others, and those others.

    If a prediction is off, a cell may be wrong, and it may be a named one, which spoils the predictions of all others.
    Wrong are the fewest cells without which a fit of the rest holds, and from which they are far off by the errors of
    the rest. If there are none, the law or the choice of named cells may be wrong. Fewer cells than that takes are
    compared with the named ones.
    """
    fit = _fit_of(seconds, named)
    off = {steps for steps in seconds.keys() - named if fit.contradicted_by(steps, seconds[steps])}
    if not off or len(seconds) < TELLING_FROM:
        return off, named
    for count in range(1, min(MOST_WRONG, len(seconds) - AGREEING, (len(seconds) - 1) // 2) + 1):
        subsets = [frozenset(one) for one in itertools.combinations(seconds, count)]
        wrong = min(subsets, key=lambda one: _errors(seconds, seconds.keys() - one)[0])
        others = seconds.keys() - wrong
        largest, errors = _errors(seconds, others)
        if largest <= CONTRADICTION and min(errors[steps] for steps in wrong) > max(CONTRADICTION, CLEAR * largest):
            return wrong, others
    return frozenset(), named


def _errors(seconds: Mapping[int, float], cells: AbstractSet[int]) -> tuple[float, dict[int, float]]:
    """Of a fit of `cells`: the size of their largest error, and that of each error, by steps."""
    fit = _fit_of(seconds, cells)
    errors = {steps: abs(fit.error(steps, value)) for steps, value in seconds.items()}
    return max(errors[steps] for steps in cells), errors


def _series_of(block: Block) -> Iterator[_Timed]:
    """The series of a block: setups with as many workers and the same method.

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
                yield _Timed(block.key, workers, method, dict(sorted(series.items())))


def _of_method(setups: Sequence[SetupRuns], method: str) -> dict[int, SetupRuns]:
    """By steps."""
    members = [one for one in setups if one.first.method == method]
    return {one.first.k if method == K else one.first.accumulation: one for one in members}


def prediction_rows(predictions: Predictions) -> list[dict[str, Any]]:
    """One row per cell, as in `predictions.csv`."""
    return [
        {
            "block": one.key.title,
            "setup": cell.setup.name,
            "workers": one.workers,
            "method": one.method,
            "steps": cell.steps,
            "fitted": cell.named,
            "train_seconds": cell.seconds,
            "predicted_seconds": cell.predicted,
            "error": cell.error,
            "a": one.fit.a,
            "b": one.fit.b,
            "contradicts": cell.flagged,
        }
        for one in predictions.series
        for cell in one.cells
    ]


def seconds_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
