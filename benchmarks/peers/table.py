"""Measurements as Markdown tables. What is compared was measured in the same repetition."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.peers.cells import BASE, LIMIT, PRECISIONS, SHORT_STEPS, Cell
from benchmarks.peers.records import Row
from benchmarks.side_by_side import spread

_SPEED = (
    *("task", "workers", "precision", "variant", "samples/s: median (range)", "of Accelerate's"),
    *("of its better precision", "of the limit", "runs"),
)
_TIMES = (
    *("task", "workers", "precision", "variant", "first step, s", "of Accelerate's", f"{SHORT_STEPS} steps, s"),
    *("long run, s", "its steps", "memory, MB", "loss, first to last"),
)
_LIMIT = (
    "task",
    "workers",
    "precision",
    "samples/s",
    "GFLOP/s per worker",
    "optimizer, ms",
    "GFLOP a sample",
    "tokens",
)


def _speed_of(row: Row) -> float | None:
    return row.samples_per_s


def _first_step_of(row: Row) -> float | None:
    return row.first_step_s


class Measured:
    """All rows; values by cell and repetition."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {(row.cell, row.repetition): row for row in rows}
        #: Those of which the speed is known, without short runs, in the order in which they were measured.
        self.cells = [cell for cell in dict.fromkeys(row.cell for row in rows) if cell.steps != SHORT_STEPS]

    def of(self, cell: Cell) -> list[Row]:
        return [row for (other, _), row in self.rows.items() if other == cell]

    def like(self, cell: Cell, variant: str, *precisions: str) -> list[Cell]:
        """The same work by another variant, in these precisions, by default in the same one."""
        wanted = {(cell.task, cell.workers, precision, variant) for precision in precisions or (cell.precision,)}
        return [one for one in self.cells if (one.task, one.workers, one.precision, one.variant) in wanted]

    def ratios(self, cell: Cell, others: Sequence[Cell], by: Callable[[Row], float | None] = _speed_of) -> list[float]:
        """To the largest value of the others, repetition by repetition; those in which all were measured."""
        found = []
        for row in self.of(cell):
            beside = [self.rows[other, row.repetition] for other in others if (other, row.repetition) in self.rows]
            own, base = by(row), [value for value in map(by, beside) if value is not None]
            if own is not None and base and len(base) == len(others):
                found.append(own / max(base))
        return found


def markdown(rows: Sequence[Row]) -> str:
    measured = Measured(rows)
    trained = [cell for cell in measured.cells if cell.variant != LIMIT]
    limits = [cell for cell in measured.cells if cell.variant == LIMIT]
    tables = (
        (_SPEED, [_speed(measured, cell) for cell in trained]),
        (_TIMES, [_times(measured, cell) for cell in trained]),
        (_LIMIT, [_limit(measured, cell) for cell in limits]),
    )
    return "\n\n".join(_table(headings, lines) for headings, lines in tables if lines)


def _speed(measured: Measured, cell: Cell) -> list[str]:
    own = measured.of(cell)
    return [
        *_names(cell),
        spread([row.samples_per_s for row in own]),
        _spread(measured.ratios(cell, measured.like(cell, BASE))),
        _spread(measured.ratios(cell, measured.like(cell, BASE, *PRECISIONS))),
        _spread(measured.ratios(cell, measured.like(cell, LIMIT))),
        str(len(own)),
    ]


def _times(measured: Measured, cell: Cell) -> list[str]:
    own, short = measured.of(cell), measured.of(replace(cell, steps=SHORT_STEPS))
    losses = [row.losses for row in own if row.losses]
    first, last = (statistics.median(part) for part in zip(*losses, strict=True)) if losses else (0.0, 0.0)
    return [
        *_names(cell),
        _spread([row.first_step_s for row in own]),
        _spread(measured.ratios(cell, measured.like(cell, BASE), _first_step_of)),
        _spread([row.wall_s for row in short]),
        _spread([row.wall_s for row in own]),
        str(cell.steps),
        f"{statistics.median(row.peak_mb or 0 for row in own):.0f}",
        f"{first:.2f} to {last:.2f}",
    ]


def _limit(measured: Measured, cell: Cell) -> list[str]:
    own = measured.of(cell)

    def middle(name: str, factor: float = 1.0) -> str:
        return f"{factor * statistics.median(row.details[name] for row in own):.3g}"

    numbers = [middle("gflops"), middle("optimizer_s", 1e3), middle("gflop_per_sample"), middle("tokens_per_sample")]
    return [*_names(cell)[:3], spread([row.samples_per_s for row in own]), *numbers]


def _names(cell: Cell) -> list[str]:
    return [cell.task, str(cell.workers), cell.precision, f"`{cell.variant}`"]


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return spread(known) if known else ""


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if name in ("task", "precision", "variant") else "--:" for name in headings]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines))
