"""Measurements as a Markdown table, each repetition against its own run of one worker."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.slow_link.records import Row

BASE = "one"

_HEADINGS = (
    "variant",
    "samples/s: median (range)",
    "of one worker: median (range)",
    "MB a synchronisation",
    "stalled, ms a step",
    "beyond one worker's step, ms",
    "closing, s",
    "runs",
)


def ratios(rows: Sequence[Row], variant: str) -> list[float]:
    """Samples per second against one worker's of the same repetition; repetitions without one are left out."""
    base = {row.repetition: row.samples_per_s for row in rows if row.variant == BASE}
    own = [row for row in rows if row.variant == variant and row.repetition in base]
    return [row.samples_per_s / base[row.repetition] for row in own]


def markdown(rows: Sequence[Row], order: Sequence[str]) -> str:
    """The variants that were measured: those of `order` first, in that order, then others."""
    measured = dict.fromkeys(row.variant for row in rows)
    names = [name for name in order if name in measured] + [name for name in measured if name not in order]
    lines = [_line(_HEADINGS), _line(["---", *["--:"] * (len(_HEADINGS) - 1)])]
    return "\n".join([*lines, *(_line(_cells(rows, name)) for name in names)])


def _cells(rows: Sequence[Row], name: str) -> list[str]:
    own = [row for row in rows if row.variant == name]
    base_step = {row.repetition: row.step_s for row in rows if row.variant == BASE}
    beyond = [row.step_s - base_step[row.repetition] for row in own if row.repetition in base_step and name != BASE]
    return [
        f"`{name}`",
        spread([row.samples_per_s for row in own], ".1f"),
        spread(ratios(rows, name), ".2f") if name != BASE else "1",
        _median([row.sync_bytes for row in own], lambda size: f"{size / 1e6:.1f}"),
        _median([row.stall_s for row in own], lambda seconds: f"{seconds * 1e3:.0f}"),
        _median(beyond, lambda seconds: f"{seconds * 1e3:.0f}"),
        _median([row.closing_s or None for row in own], lambda seconds: f"{seconds:.1f}"),
        str(len(own)),
    ]


def spread(values: Sequence[float], form: str) -> str:
    """Median, and smallest to largest."""
    if not values:
        return ""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _median(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return show(statistics.median(known)) if known else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
