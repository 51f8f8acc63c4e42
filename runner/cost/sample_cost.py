"""How many more samples a larger batch needs for the same loss, as a branch test (`runner.scale`) has found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from runner.cost.quantity import Quantity
from runner.errors import UserError, first_line
from runner.folder.reading import opened, parse_json

#: The result of a test is some kilobytes.
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class SampleCost:
    """`largest`: the largest batch that needs no more samples. `beyond`: a larger one, which needs `more` times them.

    None where no larger batch was tried, or it was not found out; `more` is infinite if that is beyond what was tried.
    `tested`: recipe, model, data and reference batch. `rule`: the scaling rule of both.
    """

    largest: int
    beyond: int | None
    more: Quantity | None
    tested: tuple[str, str, str, int]
    rule: str | None

    def at(self, batch: int) -> Quantity | None:
        """The factor for a global batch; None if it is not known.

        Above `largest` it grows with the batch as 1 + batch ÷ critical batch (McCandlish et al. 2018, "An Empirical
        Model of Large-Batch Training", equation 2.11), through what was found at `beyond`.
        """
        if batch <= self.largest:
            return Quantity(1.0, 1.0, 1.0)
        if self.beyond is None or self.more is None or (self.more.value <= 1 and batch > self.beyond):
            return None
        return Quantity(*(self._factor(batch, more) for more in (self.more.value, self.more.low, self.more.high)))

    def _factor(self, batch: int, more: float) -> float:
        assert self.beyond is not None
        if more <= 1:
            return 1.0
        if math.isinf(more):
            return math.inf
        useful = self.beyond - more * self.largest
        if useful <= 0:  # the additional samples of a step are wasted
            return more * batch / self.beyond
        critical = useful / (more - 1)
        return (critical + batch) / (critical + self.largest)


def read_sample_cost(path: str) -> SampleCost:
    """Read the result from the folder of a branch test, or its `result.json`. Raises UserError."""
    file = Path(path)
    file = file / "result.json" if file.is_dir() else file
    if not file.exists():
        what = "does not have the result of a branch test" if Path(path).is_dir() else "does not exist"
        raise UserError(f"plan.scale={path} {what}: give the folder that python -m runner.scale has printed")
    try:
        with opened(file) as content:
            found = parse_json(content.read(_MOST_BYTES + 1), _MOST_BYTES)
        beyond, rule = None, found["rule"]
        if found["beyond"] is not None:
            beyond, rule = int(found["beyond"]["batch"]), rule or found["beyond"]["rule"]
        more = found["more_samples"]
        quantity = None if more is None else Quantity(float(more), *map(float, found["more_samples_range"]))
        largest, reference = int(found["largest"]), int(found["reference"])
        in_order = quantity is None or 0 < quantity.low <= quantity.value <= quantity.high
        if not (1 <= reference <= largest < (beyond or math.inf) and in_order):
            raise ValueError("its numbers contradict each other")
        tested = (str(found["recipe"]), str(found["model"]), str(found["data"]), reference)
        return SampleCost(largest, beyond, quantity, tested, rule)
    except (UserError, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(
            f"plan.scale={path} is not the result of a branch test ({first_line(error)}): give the folder that "
            "python -m runner.scale has printed"
        ) from None
