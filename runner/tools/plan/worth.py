"""What are more workers worth? Their speed-up to the same loss, as a sentence and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runner.cost.quantity import Quantity
from runner.tools.compare.plots import plot_file
from runner.tools.plan.ranking import RankedSetup

#: Further workers are worth it if they are at least this share as useful as the ones before.
_WORTH = 0.5


@dataclass(frozen=True)
class Worth:
    """The speed-up to the same loss of this number of workers, each at its fastest, over the fewest workers.

    `per_sample`: with as many samples, as if every batch learnt as much from them.
    """

    workers: int
    speed_up: Quantity
    per_sample: float
    is_worth_it: bool


def worth_of(setups: Sequence[RankedSetup]) -> list[Worth]:
    """What each number of workers is worth, the fewest first; empty if fewer than two have a time to the same loss.

    The first number's speed-up is 1. Those after the first that is not worth it are not worth it either.
    """
    fastest: dict[int, tuple[Quantity, float]] = {}
    for one in sorted(setups, key=lambda one: one.seconds):
        if one.may_fit and one.same_loss is not None and math.isfinite(one.same_loss.value):
            fastest.setdefault(one.experiment.plan.world_size, (one.same_loss, one.seconds[1]))
    if len(fastest) < 2:
        return []
    base, base_total_s = fastest[min(fastest)]
    found: list[Worth] = []
    for workers, (seconds, total_s) in sorted(fastest.items()):
        speed_up, is_worth_it = Quantity(1.0, 1.0, 1.0), True
        if found:
            before = found[-1]
            speed_up = Quantity(*(base.value / one for one in (seconds.value, seconds.high, seconds.low)))
            gain, more = speed_up.value / before.speed_up.value - 1, workers / before.workers - 1
            is_worth_it = before.is_worth_it and gain >= _WORTH * more
        found.append(Worth(workers, speed_up, base_total_s / total_s, is_worth_it))
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


def write_plot(found: Sequence[Worth], predicted: bool, path: str) -> None:
    """Draw the speed-up over the number of workers, of which there are at least two. Arguments as of `worth_words`."""
    workers = [one.workers for one in found]
    with plot_file(path) as (axes,):
        axes.plot(workers, [each / workers[0] for each in workers], color="#b5b8be", linestyle=":", label="ideal")
        axes.plot(workers, [one.per_sample for one in found], color="#8a8f99", marker="o", label="the same samples")
        speed = [one.speed_up.value for one in found]
        # An interval can end at infinity: a loss that was perhaps never reached has a speed-up from 0 on.
        below = [one.speed_up.value - one.speed_up.low for one in found]
        above = [one.speed_up.high - one.speed_up.value for one in found]
        axes.errorbar(
            workers, speed, yerr=[below, above], marker="o", capsize=3, color="#2f6fb0", label="the same loss"
        )
        not_worth = [(one.workers, one.speed_up.value) for one in found if not one.is_worth_it]
        if not_worth:
            axes.plot(*zip(*not_worth, strict=True), "o", mfc="white", color="#2f6fb0", zorder=3, label="not worth it")
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, [str(each) for each in workers])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("workers")
        axes.set_ylabel(f"speed-up over {workers[0]} worker{'s' * (workers[0] > 1)}{' (predicted)' * predicted}")
        axes.legend(loc="upper left")
