"""The layout of the published tables: samples down, methods and their steps across, metric over speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.tools.compare.results import Block, SetupResult

#: (method, steps), where the method is "" for one worker, `accumulation` or `k`.
Column = tuple[str, int]
ONE_WORKER: Column = ("", 1)


@dataclass(frozen=True)
class Cell:
    """`doubtful`: a flag puts the numbers in doubt; `uncertain_speed`: the speed-up belongs in parentheses."""

    metric: float
    speed_up: float | None
    doubtful: bool
    uncertain_speed: bool

    @property
    def text(self) -> tuple[str, str]:
        """Metric and speed-up, rounded as in the published tables."""
        metric = f"{self.metric:.1f}" if abs(self.metric) >= 10 or not self.metric else f"{self.metric:.3g}"
        metric += "*" if self.doubtful else ""
        if self.speed_up is None:
            return (metric, "")
        return (metric, f"({self.speed_up:.1f}×)" if self.uncertain_speed else f"{self.speed_up:.1f}×")


@dataclass(frozen=True)
class PublishedTable:
    """One table per experiment and number of workers. `rows`: (samples, cells by column)."""

    title: str
    workers: int
    columns: tuple[Column, ...]
    rows: tuple[tuple[int, dict[Column, Cell]], ...]

    @property
    def has_doubtful(self) -> bool:
        return any(cell.doubtful for _, cells in self.rows for cell in cells.values())

    def texts(self, samples: int) -> list[tuple[str, str]]:
        """The cells of a row; empty where nothing was run."""
        cells = dict(self.rows)[samples]
        return [cells[column].text if column in cells else ("", "") for column in self.columns]

    def only(self, method: str) -> PublishedTable:
        """The columns of one method, next to one worker."""
        return replace(self, columns=tuple(column for column in self.columns if column[0] in ("", method)))


def published_tables(blocks: Sequence[Block]) -> list[PublishedTable]:
    """The tables of all blocks that have this shape. Blocks of one experiment share a table."""
    experiments: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        experiments.setdefault((block.key.experiment, block.key.conditions, block.key.metric), []).append(block)
    tables = []
    for members in experiments.values():
        # Two blocks with the same number of samples have different data: they are not rows of one table.
        distinct = len({block.key.total_samples for block in members}) == len(members)
        tables += [
            table for group in ([members] if distinct else [[one] for one in members]) for table in _tables(group)
        ]
    return tables


def _tables(blocks: Sequence[Block]) -> list[PublishedTable]:
    tables = []
    for workers in sorted({row.setup.first.workers for block in blocks for row in block.rows} - {1}):
        rows = {block.key.total_samples: cells for block in blocks if (cells := _cells(block, workers)) is not None}
        if rows:
            key = blocks[0].key
            title = " · ".join(word for word in (key.experiment, *key.conditions, f"{workers} workers") if word)
            columns = sorted({column for cells in rows.values() for column in cells})
            tables.append(PublishedTable(title, workers, tuple(columns), tuple(sorted(rows.items()))))
    return tables


def _cells(block: Block, workers: int) -> dict[Column, Cell] | None:
    """One row; None if the block's setups with this number of workers do not have the published shape."""
    if block.baseline.first.workers != 1:
        return None
    cells = {ONE_WORKER: _cell(block, block.rows[0])}
    for row in block.rows:
        if row.setup.first.workers == workers:
            columns = _columns(row)
            if not columns or any(column in cells for column in columns):
                return None
            cells |= {column: _cell(block, row) for column in columns}
    steps = {method: max(number for other, number in cells if other == method) for method, _ in cells}
    counted = {column: cell for column, cell in cells.items() if column == ONE_WORKER or steps[column[0]] > 1}
    return counted if any(sum(method == other for other, _ in counted) >= 2 for method in steps) else None


def _columns(row: SetupResult) -> list[Column]:
    """The columns of a setup. A fully synchronous run is the first step of each method that has more, unless its file
    names one."""
    run = row.setup.first
    if run.accumulation > 1 and run.k > 1:
        return []
    if run.accumulation == run.k == 1 and run.certificate is not None:
        return [("accumulation", 1), ("k", 1)]
    return [("k", run.k)] if run.method == "k" else [("accumulation", run.accumulation)]


def _cell(block: Block, row: SetupResult) -> Cell:
    doubtful = any(flag.doubtful for flag in block.flags_of(row.setup))
    speed_up = row.speed_up.value if row.speed_up is not None else None
    return Cell(row.metric.value, speed_up, doubtful, block.uncertain_speed(row))
