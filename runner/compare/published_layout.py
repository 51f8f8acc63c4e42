"""The layout of the published tables: samples down, one worker, accumulation and k across, metric over speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.compare.comparison import Block, Row

#: A column: one worker is (None, 1), then ("accumulation", steps) and ("k", steps).
Column = tuple[str | None, int]
ONE_WORKER: Column = (None, 1)


@dataclass(frozen=True)
class Cell:
    """`speed_up`: None if there is none; `doubtful`: a finding marks the setup; `aside`: speed goes in parentheses."""

    metric: float
    speed_up: float | None
    doubtful: bool
    aside: bool


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

    def only(self, method: str) -> PublishedTable:
        """The table with the columns of one method beside the one worker's."""
        columns = tuple(column for column in self.columns if column[0] in (None, method))
        return PublishedTable(self.title, self.workers, columns, self.rows)


def published_tables(blocks: Sequence[Block]) -> list[PublishedTable]:
    """The tables of all blocks that have this shape; blocks of one experiment share a table."""
    experiments: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        key = block.key
        experiments.setdefault((key.experiment, _conditions(block), key.metric), []).append(block)
    tables = []
    for members in experiments.values():
        samples = [_samples(block) for block in members]
        # Two blocks of one size differ in their data: they are no rows of one table.
        groups = [members] if len(set(samples)) == len(samples) else [[block] for block in members]
        tables += [table for group in groups for table in _tables(group)]
    return tables


def _conditions(block: Block) -> tuple[str, ...]:
    return tuple(word for word in block.key.conditions if word)


def _samples(block: Block) -> int:
    return block.key.samples * block.key.epochs


def _tables(blocks: Sequence[Block]) -> list[PublishedTable]:
    numbers = sorted({row.setup.first.workers for block in blocks for row in block.rows} - {1})
    tables = []
    for workers in numbers:
        rows = [(_samples(block), cells) for block in blocks if (cells := _cells(block, workers)) is not None]
        columns = {column for _, cells in rows for column in cells}
        if rows:
            title = " · ".join([blocks[0].key.experiment, *_conditions(blocks[0]), f"{workers} workers"])
            ordered = tuple(sorted(columns, key=_order)), tuple(sorted(rows, key=_size))
            tables.append(PublishedTable(title, workers, *ordered))
    return tables


def _order(column: Column) -> tuple[str, int]:
    return (column[0] or "", column[1])


def _size(row: tuple[int, dict[Column, Cell]]) -> int:
    return row[0]


def _cells(block: Block, workers: int) -> dict[Column, Cell] | None:
    """One row, or None if the block's setups of this many workers do not have the published shape."""
    if block.baseline.first.workers != 1:
        return None
    cells = {ONE_WORKER: _cell(block, block.rows[0])}
    for row in block.rows:
        if row.setup.first.workers != workers:
            continue
        columns = _columns(row)
        if not columns or any(column in cells for column in columns):
            return None
        cells |= {column: _cell(block, row) for column in columns}
    steps = [sum(column[0] == method for column in cells) for method in ("accumulation", "k")]
    return cells if max(steps) >= 2 else None


def _columns(row: Row) -> list[Column]:
    """Where a setup stands: a run synchronous at every step starts both halves, unless it says which half is meant."""
    run = row.setup.first
    if run.accumulation > 1 and run.k > 1:
        return []
    if run.accumulation == run.k == 1 and run.certificate is not None:
        return [("accumulation", 1), ("k", 1)]
    return [("k", run.k)] if run.method == "k" else [("accumulation", run.accumulation)]


def _cell(block: Block, row: Row) -> Cell:
    doubtful = any(finding.marks for finding in block.about(row.setup))
    speed_up = row.speed_up.value if row.speed_up is not None else None
    return Cell(row.metric.value, speed_up, doubtful, block.side_by_side(row))
