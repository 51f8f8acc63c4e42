"""What has happened to a run: its segments, and what only its training shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from runner.config.schema import Sync
from runner.plan.levels import COMPARABLE, EQUIVALENT, IDENTICAL, worst

#: In a checkpoint's identity: what computed.
PROCESSOR = "processor"


@dataclass(frozen=True)
class Segment:
    """A part of a run on one set of workers. A run that was not resumed, and had enough memory, has one.

    `after_step`: optimizer steps done before it; `until_step`: at its end, None if it is not known yet. `device`: as
    requested, such as `cpu4`; `sync`: the policy and k. `level`, `differs`: of its own certificate, against the same
    baseline.
    """

    after_step: int
    until_step: int | None
    device: str
    workers: int
    accumulation_steps: int
    precision: str
    sync: str
    level: str
    differs: tuple[str, ...]

    @property
    def setup(self) -> tuple[str, int, int, str, str]:
        """What executed it."""
        return self.device, self.workers, self.accumulation_steps, self.precision, self.sync

    def after_changes(self, changed: Sequence[str]) -> Segment:
        """The segment of a run whose code, libraries or processor have `changed` since the one before."""
        if not changed:
            return self
        # Other code is not surely equivalent; another processor rounds differently.
        only_processor = all(name.startswith(PROCESSOR) for name in changed)
        level = worst((self.level, EQUIVALENT if only_processor else COMPARABLE), IDENTICAL)
        return dataclasses.replace(self, level=level, differs=(*self.differs, *changed))

    def split(self, after_step: int, accumulation_steps: int) -> tuple[Segment, Segment]:
        """The two segments of a run whose micro-batches became smaller, for lack of memory, within this one."""
        then = dataclasses.replace(
            self,
            after_step=after_step,
            accumulation_steps=accumulation_steps,
            level=worst((self.level, EQUIVALENT), IDENTICAL),
            differs=tuple(dict.fromkeys((*self.differs, "accumulation_steps"))),
        )
        return dataclasses.replace(self, until_step=after_step), then


def split_at(segments: tuple[Segment, ...], after_step: int, accumulation_steps: int) -> tuple[Segment, ...]:
    """The segments of a run that from a step on had more micro-batches, unless they say so already."""
    parts: list[Segment] = []
    for one in segments:
        within = one.after_step <= after_step and (one.until_step is None or after_step < one.until_step)
        smaller = within and one.accumulation_steps < accumulation_steps
        parts += one.split(after_step, accumulation_steps) if smaller else (one,)
    return tuple(parts)


def ended_at(segments: tuple[Segment, ...], step: int | None) -> tuple[Segment, ...]:
    """The same segments, of which the last one ended after this optimizer step."""
    return (*segments[:-1], *(dataclasses.replace(last, until_step=step) for last in segments[-1:]))


@dataclass(frozen=True)
class Outcome:
    """What only training shows.

    `segments`: all of the run's. `sync`: its settings without `auto`. `batch_statistics`: whether the model normalises
    by the statistics of a micro-batch. `stopped_after`: samples seen, if it stopped before the end of its plan.
    """

    segments: tuple[Segment, ...]
    sync: Sync
    batch_statistics: bool
    stopped_after: int | None


@dataclass(frozen=True)
class History:
    """What has happened to a run; nothing before its first start.

    `earlier`: the segments before this one. `began_after`: the optimizer step of the checkpoint that it continues from,
    0 without one. `changed`: code and libraries that are not those of that checkpoint. `outcome`: None until its
    workers have ended.
    """

    earlier: tuple[Segment, ...] = ()
    began_after: int = 0
    changed: tuple[str, ...] = ()
    outcome: Outcome | None = None
