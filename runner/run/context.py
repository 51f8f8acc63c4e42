"""The surroundings of a run: the command, and the sweep if it is part of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Console


@dataclass(frozen=True)
class SweepContext:
    """A run's place in a sweep; the default is a single run.

    `tags`: for the tracking store. `varied`: the settings that the sweep varies, with this run's values. `parent_key`:
    of the sweep's card. `at_once`: how many jobs share this machine. `design`: when a sweep that adds seeds stops.
    `until`: the share of training after which a race pauses the run; `raced`: the setups that began the race.
    `progress`: describes the state of the sweep.
    """

    tags: Mapping[str, str] = field(default_factory=dict)
    varied: Mapping[str, str] = field(default_factory=dict)
    parent_key: str | None = None
    at_once: int = 1
    design: Mapping[str, int] | None = None
    until: float = 1.0
    raced: int | None = None
    progress: Callable[[], str] | None = None


@dataclass(frozen=True)
class RunContext:
    """`started_at`: when the command, or the job of a sweep, started, in seconds since the epoch."""

    started_at: float
    console: Console
    sweep: SweepContext = SweepContext()
