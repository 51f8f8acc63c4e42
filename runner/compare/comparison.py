"""Blocks of setups, each compared with its block's baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from runner.compare.comparability import Comparability, comparability
from runner.compare.runs import BlockKey, Found, Refused
from runner.compare.setups import Setup, setups_by_block
from runner.compare.statistics import Estimate, SpeedUp, common_seeds, difference, mean_of, speed_up
from runner.compare.verdict import NONE, Verdict, decide
from runner.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Finding:
    """Something that a reader of the numbers has to know.

    `setups`: the names, and `runs`: the sources that it is about; `marks`: whether the setups' numbers themselves are
    in doubt; `number`: as shown, from 1.
    """

    kind: str
    text: str
    setups: tuple[str, ...]
    runs: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    marks: bool = False
    number: int = 0


@dataclass(frozen=True)
class Row:
    """One setup. `difference`, `verdict`, `comparability`: None for the baseline; `seconds`: mean of training's;
    `speed_up`: None where a side has no time; `left_out`: seeds that have no partner in a paired difference."""

    setup: Setup
    metric: Estimate
    seconds: float | None
    difference: Estimate | None = None
    verdict: Verdict | None = None
    speed_up: SpeedUp | None = None
    comparability: Comparability | None = None
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """What is compared with one another. `rows[0]` is the baseline; `baseline_note`: why, where that is not plain."""

    key: BlockKey
    title: str
    rows: tuple[Row, ...]
    baseline_note: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def baseline(self) -> Setup:
        return self.rows[0].setup

    def about(self, setup: Setup) -> tuple[Finding, ...]:
        """The findings about a setup."""
        return tuple(finding for finding in self.findings if setup.name in finding.setups)

    def side_by_side(self, row: Row) -> bool:
        """Whether a row's speed-up rests on times taken while other jobs ran."""
        return row.setup.side_by_side or self.baseline.side_by_side


@dataclass(frozen=True)
class Comparison:
    blocks: tuple[Block, ...]
    refused: tuple[Refused, ...]
    margin: float


def compare_runs(found: Found, baseline: str | None, margin: float) -> Comparison:
    """Compare all runs, block by block. `baseline`: a setup's name as in the table. Raises UserError."""
    by_block = setups_by_block(found.runs)
    names = [setup.name for setups in by_block.values() for setup in setups]
    if baseline is not None and baseline not in names:
        raise UserError(f"--baseline={baseline} is none of the setups{did_you_mean(baseline, names)}")
    titles = _titles(list(by_block))
    blocks = tuple(
        compare_block(key, titles[key], setups, baseline, margin)
        for key, setups in sorted(by_block.items(), key=lambda item: _order(item[0]))
    )
    from runner.compare.findings import with_findings

    return Comparison(with_findings(blocks, margin), tuple(found.refused), margin)


def _order(key: BlockKey) -> tuple[object, ...]:
    return (key.experiment, key.conditions, key.samples * key.epochs, key.metric)


def _titles(keys: Sequence[BlockKey]) -> dict[BlockKey, str]:
    """Titles, with the data's digest where two blocks differ in nothing else."""
    titles = [key.title for key in keys]
    return {key: f"{key.title} · data {key.data[:6]}" if titles.count(key.title) > 1 else key.title for key in keys}


def compare_block(key: BlockKey, title: str, setups: Sequence[Setup], wanted: str | None, margin: float) -> Block:
    """One block. `wanted`: the baseline asked for, if this block has it."""
    baseline, note = choose_baseline(setups, wanted)
    others = [setup for setup in setups if setup is not baseline]
    rows = [_baseline_row(baseline), *(compare_setup(setup, baseline, margin, key.goal) for setup in others)]
    return Block(key, title, tuple(rows), note)


def choose_baseline(setups: Sequence[Setup], wanted: str | None) -> tuple[Setup, str]:
    """The baseline and a note: the one asked for; else one worker, no accumulation, in fp32 or the only precision there
    is, if just one setup is that; else the first with fewest workers."""
    for setup in setups:
        if setup.name == wanted:
            return setup, ""
    missing = f"{wanted} is not in this block; " if wanted is not None else ""
    only_precision = len({setup.first.precision for setup in setups}) == 1
    plain = [
        setup
        for setup in setups
        if (setup.first.workers, setup.first.accumulation, setup.first.k) == (1, 1, 1)
        and (setup.first.precision == "fp32" or only_precision)
    ]
    if len(plain) == 1:
        return plain[0], f"{missing}{plain[0].name} is taken" if missing else ""
    first = min(plain or setups, key=lambda setup: setup.first.workers)
    how_many = "no" if not plain else f"{len(plain)}"
    note = f"{first.name}, the first setup with fewest workers: {how_many} "
    note += f"setup{'s' if len(plain) > 1 else ''} with one worker, no accumulation and fp32 (--baseline chooses)"
    return first, missing + note


def _baseline_row(setup: Setup) -> Row:
    return Row(setup, mean_of(list(setup.metrics.values())), _mean_seconds(setup))


def _mean_seconds(setup: Setup) -> float | None:
    return fmean(setup.seconds.values()) if setup.seconds else None


def compare_setup(setup: Setup, baseline: Setup, margin: float, goal: str) -> Row:
    """One setup against the baseline; without verdict and speed-up where they are not comparable."""
    # Lines of a table have no settings, and nobody expects a certificate of them.
    published = not any(one.first.values or one.first.certificate for one in (setup, baseline))
    relation = None if published else comparability(setup.runs, baseline.runs)
    row = dataclasses.replace(_baseline_row(setup), comparability=relation)
    if relation is not None and relation.forbids:
        return dataclasses.replace(row, verdict=Verdict(NONE, reason="not comparable"))
    estimate = difference(setup.metrics, baseline.metrics)
    common = common_seeds(setup.metrics, baseline.metrics)
    left_out = set(setup.seeds).symmetric_difference(baseline.seeds) if len(common) >= 2 else set()
    return dataclasses.replace(
        row,
        difference=estimate,
        verdict=decide(estimate, margin, goal),
        speed_up=speed_up(setup.seconds, baseline.seconds) if setup.seconds and baseline.seconds else None,
        left_out=tuple(sorted(left_out)),
    )
