"""Measurements as lines of a CSV file, so that an interrupted series can be resumed."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One variant in one repetition.

    `rate`: of the link, in tc's words. `samples_per_s`: of all workers. `step_s`: seconds from step to step, everything
    included. `sync_bytes`: what a worker puts into one synchronisation. `stall_s`: seconds a step in which its compute
    waited for synchronisations. `closing_s`: of the last one, which happens once per run. None: not known.
    """

    rate: str
    repetition: int
    variant: str
    samples_per_s: float
    step_s: float
    measured_steps: int
    sync_bytes: int | None
    stall_s: float | None
    closing_s: float


_FIELDS = [field.name for field in dataclasses.fields(Row)]


def read(path: Path, rate: str) -> list[Row]:
    """The measurements at this rate; empty without a file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [_row(line) for line in csv.DictReader(file)]
    return [row for row in rows if row.rate == rate]


def append(path: Path, row: Row) -> None:
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow({name: _text(value) for name, value in dataclasses.asdict(row).items()})


def _text(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _row(line: dict[str, str]) -> Row:
    return Row(
        rate=line["rate"],
        repetition=int(line["repetition"]),
        variant=line["variant"],
        samples_per_s=float(line["samples_per_s"]),
        step_s=float(line["step_s"]),
        measured_steps=int(line["measured_steps"]),
        sync_bytes=int(line["sync_bytes"]) if line["sync_bytes"] else None,
        stall_s=float(line["stall_s"]) if line["stall_s"] else None,
        closing_s=float(line["closing_s"]),
    )
