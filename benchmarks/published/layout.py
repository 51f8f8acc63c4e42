"""The layout of the published tables: samples down, methods and their steps across, metric over speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.tools.compare.results import Block, SetupResult
from runner.tools.compare.runs import grouped

#: (method, steps), where the method is "" for one worker, `accumulation` or `k`.
Column = tuple[str, int]
ONE_WORKER: Column = ("", 1)


@dataclass(frozen=True)
class Layout:
    """One table per experiment and number of workers. `rows`: metric and speed-up by column, by number of samples."""

    title: str
    workers: int
    columns: tuple[Column, ...]
    rows: dict[int, dict[Column, tuple[str, str]]]


def layouts(blocks: Sequence[Block]) -> list[Layout]:
    """The tables of all blocks with one worker and setups that vary only in accumulation or in k."""
    experiments = grouped(blocks, lambda block: (block.key.experiment, block.key.conditions, block.key.metric))
    return [table for members in experiments.values() for table in _tables(members)]


def _tables(blocks: Sequence[Block]) -> list[Layout]:
    tables = []
    for workers in sorted({row.setup.first.workers for block in blocks for row in block.rows} - {1}):
        rows = {block.key.total_samples: cells for block in blocks if (cells := _cells(block, workers)) is not None}
        if rows:
            key = blocks[0].key
            title = " · ".join(word for word in (key.experiment, *key.conditions, f"{workers} workers") if word)
            columns = sorted({column for cells in rows.values() for column in cells})
            tables.append(Layout(title, workers, tuple(columns), dict(sorted(rows.items()))))
    return tables


def _cells(block: Block, workers: int) -> dict[Column, tuple[str, str]] | None:
    """One row; None if the block's setups with this number of workers do not have the published shape."""
    if block.baseline.first.workers != 1:
        return None
    cells = {ONE_WORKER: _cell(block, block.rows[0])}
    for row in block.rows:
        run = row.setup.first
        if run.workers == workers:
            column = ("k", run.k) if run.method == "k" else ("accumulation", run.accumulation)
            if column in cells:
                return None
            cells[column] = _cell(block, row)
    steps = [method for method, _ in cells]
    return cells if any(steps.count(method) >= 2 for method in steps) else None


def _cell(block: Block, row: SetupResult) -> tuple[str, str]:
    """Metric and speed-up, rounded as in the published tables. `*`: a flag puts the numbers in doubt."""
    metric = f"{row.metric.value:.1f}" + "*" * any(flag.doubtful for flag in block.flags_of(row.setup))
    return (metric, f"{row.speed_up.value:.1f}×" if row.speed_up is not None else "")
