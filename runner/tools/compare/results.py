"""The result of a comparison: blocks of setups, each setup compared with the baseline of its block."""

from __future__ import annotations

from dataclasses import dataclass

from runner.tools.compare.comparability import Comparability
from runner.tools.compare.design import Levels
from runner.tools.compare.runs import BlockKey, SkippedRun
from runner.tools.compare.setups import SetupRuns
from runner.tools.compare.statistics import SINGLE_VALUE, Estimate, SpeedUp
from runner.tools.compare.verdict import FIXED, Margin, Verdict


@dataclass(frozen=True)
class Flag:
    """Something unusual about runs. It excludes no value from a mean.

    `setups`: names, and `runs`: sources that it concerns; `doubtful`: whether it puts their numbers in doubt; `seeds`:
    of the runs that stand out in them; `value`: what is unusual about them, such as a time ÷ the median of its setup;
    `number`: as displayed, from 1.
    """

    kind: str
    text: str
    setups: tuple[str, ...]
    runs: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    doubtful: bool = False
    seeds: tuple[int, ...] = ()
    value: float | None = None
    number: int = 0


@dataclass(frozen=True)
class SetupResult:
    """One setup compared with the baseline. `difference`, `verdict` and `comparability` are None for the baseline.

    `levels`: of the intervals of the difference that decide; `seconds`: mean training time; `speed_up`: None without
    times on both sides; `left_out`: seeds without a partner, which a paired difference does not use.
    """

    setup: SetupRuns
    metric: Estimate
    seconds: float | None
    difference: Estimate | None = None
    levels: Levels = FIXED
    verdict: Verdict | None = None
    speed_up: SpeedUp | None = None
    comparability: Comparability | None = None
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """Setups that are compared with each other. `rows[0]` is the baseline; `baseline_note`: why it was chosen, if that
    is not obvious; `corrected_for`: the number of verdicts that share one error, 0 if each has its own."""

    key: BlockKey
    title: str
    rows: tuple[SetupResult, ...]
    margin: Margin
    baseline_note: str = ""
    flags: tuple[Flag, ...] = ()
    corrected_for: int = 0

    @property
    def tests(self) -> dict[str, tuple[Verdict, Estimate]]:
        """Verdict and difference by setup, where the verdict is that of a test, which may be wrong by chance."""
        return {
            row.setup.name: (row.verdict, row.difference)
            for row in self.rows
            if row.verdict is not None and row.difference is not None
            if not row.verdict.certain and row.difference.how != SINGLE_VALUE
        }

    @property
    def baseline(self) -> SetupRuns:
        return self.rows[0].setup

    def flags_of(self, setup: SetupRuns) -> tuple[Flag, ...]:
        return tuple(flag for flag in self.flags if setup.name in flag.setups)

    def uncertain_speed(self, row: SetupResult) -> bool:
        """Return whether a speed-up uses unreliable times, which were measured while other jobs or programs ran."""
        return row.setup.uncertain_time or self.baseline.uncertain_time


@dataclass(frozen=True)
class RunComparison:
    blocks: tuple[Block, ...]
    skipped: tuple[SkippedRun, ...]
