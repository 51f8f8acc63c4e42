"""What are more workers worth? Their speed-up to the same loss, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runner.cost.quantity import Quantity
from runner.tools.plan.ranking import RankedSetup

#: Further workers are worth it if they are at least this share as useful as the ones before.
_WORTH = 0.5


@dataclass(frozen=True)
class Worth:
    """The speed-up to the same loss of this number of workers, each at its fastest, over the fewest workers."""

    workers: int
    speed_up: Quantity
    is_worth_it: bool


def worth_of(setups: Sequence[RankedSetup]) -> list[Worth]:
    """What each number of workers is worth, the fewest first; empty if fewer than two have a time to the same loss.

    The first number's speed-up is 1. Those after the first that is not worth it are not worth it either.
    """
    fastest: dict[int, Quantity] = {}
    for one in sorted(setups, key=lambda one: one.seconds):
        if one.may_fit and one.same_loss is not None and math.isfinite(one.same_loss.value):
            fastest.setdefault(one.experiment.plan.world_size, one.same_loss)
    if len(fastest) < 2:
        return []
    base_s = fastest[min(fastest)].value
    found: list[Worth] = []
    for workers, seconds in sorted(fastest.items()):
        speed_up, is_worth_it = Quantity(1.0, 1.0, 1.0), True
        if found:
            before = found[-1]
            speed_up = Quantity(base_s / seconds.value, base_s / seconds.high, base_s / seconds.low)
            gain, more = speed_up.value / before.speed_up.value - 1, workers / before.workers - 1
            is_worth_it = before.is_worth_it and gain >= _WORTH * more
        found.append(Worth(workers, speed_up, is_worth_it))
    return found


def worth_words(found: Sequence[Worth], predicted: bool) -> str:
    """How much faster more workers are to the same loss, and from which number on they are not worth it.

    `predicted`: times come from published figures, not from measurements on this machine.
    """
    if not found:
        return ""
    fewest, *others = found
    parts = [
        f"{one.workers} workers {one.speed_up.value:.1f} ({one.speed_up.low:.1f} to {one.speed_up.high:.1f})"
        f"{'' if one.is_worth_it else ', not worth it'}"
        for one in others
    ]
    over = f"{fewest.workers} worker{'s' * (fewest.workers > 1)}{' (predicted)' * predicted}"
    return f"Speed-up to the same loss over {over}: {'; '.join(parts)}."
