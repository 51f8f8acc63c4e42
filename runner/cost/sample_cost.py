"""How many more samples a larger batch needs for the same loss, as a branch test (`runner.scale`) has found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from runner.config.plain import from_plain
from runner.cost.quantity import Quantity
from runner.errors import UserError, first_line
from runner.folder.reading import opened, parse_json

#: The result of a test is some kilobytes.
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Beyond:
    """The batch after the largest that trains the same, with its best scaling rule."""

    batch: int
    rule: str


@dataclass(frozen=True)
class SampleCost:
    """What was tested, and what was found, as the `result.json` of a test says it.

    `largest`: the largest batch that needs no more samples than the `reference` batch; `rule`: its best scaling rule,
    None for the reference batch itself. `beyond`: a larger one, which needs `more_samples` times them, with their
    range; None where no larger batch was tried, or it was not found out; infinite if that is beyond what was tried.
    """

    recipe: str
    model: str
    data: str
    reference: int
    largest: int
    rule: str | None
    beyond: Beyond | None
    more_samples: float | None
    more_samples_range: tuple[float, float] | None

    @property
    def more(self) -> Quantity | None:
        """`more_samples` with its interval."""
        if self.more_samples is None or self.more_samples_range is None:
            return None
        return Quantity(self.more_samples, *self.more_samples_range)

    @property
    def best_rule(self) -> str | None:
        """The scaling rule of all larger batches."""
        return self.rule or (self.beyond.rule if self.beyond is not None else None)

    def at(self, batch: int) -> Quantity | None:
        """The factor for a global batch; None if it is not known.

        Above `largest` it grows with the batch as 1 + batch ÷ critical batch (McCandlish et al. 2018, "An Empirical
        Model of Large-Batch Training", equation 2.11), through what was found at `beyond`.
        """
        if batch <= self.largest:
            return Quantity(1.0, 1.0, 1.0)
        if self.beyond is None or self.more is None or (self.more.value <= 1 and batch > self.beyond.batch):
            return None
        more, beyond = self.more, self.beyond.batch
        return Quantity(*(self._factor(batch, beyond, one) for one in (more.value, more.low, more.high)))

    def _factor(self, batch: int, beyond: int, more: float) -> float:
        if more <= 1:
            return 1.0
        if math.isinf(more):
            return math.inf
        useful = beyond - more * self.largest
        if useful <= 0:  # the additional samples of a step are wasted
            return more * batch / beyond
        critical = useful / (more - 1)
        return (critical + batch) / (critical + self.largest)


def read_sample_cost(path: str) -> SampleCost:
    """Read the result from the folder of a branch test, or its `result.json`. Raises UserError."""
    give = "give the folder that python -m runner.scale has printed"
    file = Path(path)
    file = file / "result.json" if file.is_dir() else file
    if not file.exists():
        what = "does not have the result of a branch test" if Path(path).is_dir() else "does not exist"
        raise UserError(f"plan.scale={path} {what}: {give}")
    try:
        with opened(file) as content:
            found = from_plain(SampleCost, parse_json(content.read(_MOST_BYTES + 1), _MOST_BYTES))
        more, beyond = found.more, math.inf if found.beyond is None else found.beyond.batch
        in_order = more is None or 0 < more.low <= more.value <= more.high
        if not (1 <= found.reference <= found.largest < beyond and in_order):
            raise ValueError("its numbers contradict each other")
        return found
    except (UserError, OSError, ValueError) as error:
        raise UserError(f"plan.scale={path} is not the result of a branch test ({first_line(error)}): {give}") from None
