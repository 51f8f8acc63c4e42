"""Measurements as lines of a JSON Lines file, so that an interrupted series can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import json_lines
from benchmarks.peers.cells import Cell


@dataclass(frozen=True)
class Row:
    """One run. `samples_per_s`: of all workers, in steps after the first ones; for the limit, what it allows.

    `first_step_s`: from the command to the end of the first optimizer step. `wall_s`: of the whole command. `peak_mb`:
    largest memory of all its processes at one time, pages that they share counted once. `losses`: the first, and the
    mean of the last five. `details`: what else the limit's measurement says.
    """

    device: str
    repetition: int
    cell: Cell
    samples_per_s: float
    first_step_s: float | None = None
    wall_s: float | None = None
    peak_mb: float | None = None
    losses: tuple[float, float] | None = None
    commit: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def append(path: Path, row: Row) -> None:
    json_lines.append(path, _rounded(asdict(row)))


def read(path: Path, device: str) -> list[Row]:
    """The measurements on this kind of device."""
    found = json_lines.read(path)
    return [Row(**{**row, "cell": Cell(**row["cell"])}) for row in found if row["device"] == device]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
