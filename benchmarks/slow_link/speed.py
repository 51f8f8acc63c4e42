"""The training speed of a run, from the times at which all its workers were synchronised."""

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
    """All workers have done `step` optimizer steps at `seconds`, of any clock."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Speed:
    """`steps` optimizer steps after step `first` in `seconds`, whole windows with their synchronisations.

    `closing_s`: of the synchronisation at the end of a run, which would count too much in a short one.
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

    `moments`: ascending. With overlap the last one is the end of the blocking synchronisation that closes the run.
    """
    last = moments[-1]
    inner = list(moments[:-1]) if variant.overlap else list(moments)
    starts = [moment for moment in inner if moment.step >= steps.first]
    if not starts:
        raise ValueError(f"{variant.name}: the workers never synchronised between steps {steps.first} and {last.step}")
    start = starts[0]
    ends = [moment for moment in inner if moment.step > start.step and (moment.step - start.step) % variant.k == 0]
    if not ends:
        raise ValueError(f"{variant.name}: no whole window of {variant.k} steps after step {start.step}")
    end = ends[-1]
    count, seconds = end.step - start.step, end.seconds - start.seconds
    closing = last.seconds - end.seconds - (last.step - end.step) * seconds / count
    return Speed(start.step, count, seconds, closing if variant.overlap else 0.0)


def stalled_s(metrics: Path, variant: Variant, speed: Speed) -> float | None:
    """Seconds per measured step in which computation waited for averages; None without any, and for k = 1.

    Without the average that closes the run.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    stalls = [(int(row["step"]), row["value"]) for row in rows if row["key"] == "sync/stall_seconds"]
    finished = [seconds for step, seconds in stalls if 0 < step + variant.steps_in_flight - speed.first <= speed.steps]
    return sum(finished) / speed.steps if finished else None


def runner_moments(metrics: Path, variant: Variant) -> list[Moment]:
    """From `metrics.jsonl`, to which rank 0 writes after each synchronisation."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    if not variant.overlap:
        # Bytes are logged with losses, which the workers reduce after they have synchronised.
        return [Moment(int(row["step"]), row["timestamp"] / 1000) for row in rows if row["key"] == "comm/bytes"]
    # Losses are logged later here. A synchronisation is logged when it finishes, or together with the next one.
    noted = [(int(row["step"]), row["timestamp"] / 1000) for row in rows if row["key"] == "sync/bytes"]
    last_of_all = noted[-1][0] if noted else 0
    following = [*(seconds for _, seconds in noted[1:]), math.inf]
    return [
        Moment(step if step == last_of_all else step + variant.steps_in_flight, seconds)
        for (step, seconds), after in zip(noted, following, strict=True)
        if after - seconds > _AT_ONCE
    ]
