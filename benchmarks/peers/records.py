"""Measurements as lines of a JSON Lines file, so that an interrupted series can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # remove a line that was cut off
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_rounded(asdict(row))) + "\n")


def read(path: Path, device: str) -> list[Row]:
    """The measurements on this kind of device, without a last line that was cut off."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [Row(**{**row, "cell": Cell(**row["cell"])}) for row in found if row["device"] == device]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
