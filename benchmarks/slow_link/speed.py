"""How fast a run trained, from the moments at which all its workers had come together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.slow_link.variants import Steps, Variant

#: Lines of a log that are no further apart, in seconds, were written together.
_AT_ONCE = 0.1


@dataclass(frozen=True)
class Moment:
    """The workers have all done `step` optimizer steps at `seconds`, of any clock."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Speed:
    """`steps` optimizer steps after step `first` in `seconds`, whole windows with their synchronisations.

    `closing_s`: of the synchronisation that ends a run, which is paid once and would weigh too much in a short one.
    """

    first: int
    steps: int
    seconds: float
    closing_s: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


def steady(moments: Sequence[Moment], variant: Variant, steps: Steps) -> Speed:
    """The speed after the warm-up, over the longest whole number of windows. Raises ValueError.

    `moments`: rising. With overlap the last one is no arrival, but the end of what was closed blocking.
    """
    last = moments[-1]
    inner = list(moments[:-1]) if variant.overlap else list(moments)
    starts = [moment for moment in inner if moment.step >= steps.first]
    if not starts:
        raise ValueError(f"{variant.name}: the workers never came together between steps {steps.first} and {last.step}")
    start = starts[0]
    ends = [moment for moment in inner if moment.step > start.step and (moment.step - start.step) % variant.k == 0]
    if not ends:
        raise ValueError(f"{variant.name}: no whole window of {variant.k} steps after step {start.step}")
    end = ends[-1]
    count, seconds = end.step - start.step, end.seconds - start.seconds
    closing = last.seconds - end.seconds - (last.step - end.step) * seconds / count
    return Speed(start.step, count, seconds, closing if variant.overlap else 0.0)


def stalled_s(metrics: Path, variant: Variant, speed: Speed) -> float | None:
    """Seconds of a measured step in which compute stood still for averages; None without any, and for k = 1.

    The closing average, for which everybody waits, is none of them.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    stalls = [(int(row["step"]), row["value"]) for row in rows if row["key"] == "sync/stall_seconds"]
    arrived = [seconds for step, seconds in stalls if 0 < step + variant.steps_on_the_way - speed.first <= speed.steps]
    return sum(arrived) / speed.steps if arrived else None


def runner_moments(metrics: Path, variant: Variant) -> list[Moment]:
    """From `metrics.jsonl`, where rank 0 notes what workers have come to as soon as they have come together."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    if not variant.overlap:
        # Bytes go with losses, for which the workers wait when their weights have become equal.
        return [Moment(int(row["step"]), row["timestamp"] / 1000) for row in rows if row["key"] == "comm/bytes"]
    # Losses come later here. A synchronisation is noted when it arrives, or together with the next that does.
    noted = [(int(row["step"]), row["timestamp"] / 1000) for row in rows if row["key"] == "sync/bytes"]
    last_of_all = noted[-1][0] if noted else 0
    following = [*(seconds for _, seconds in noted[1:]), math.inf]
    return [
        Moment(step if step == last_of_all else step + variant.steps_on_the_way, seconds)
        for (step, seconds), after in zip(noted, following, strict=True)
        if after - seconds > _AT_ONCE
    ]
