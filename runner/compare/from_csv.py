"""Read runs from a CSV file of published results. Every mistake in it is one sentence with its line."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from runner.compare.runs import ACCUMULATION, SINGLE, BlockKey, Found, K, Run
from runner.errors import UserError, did_you_mean

COLUMNS = (
    "experiment",
    "task",
    "precision",
    "learning_rate",
    "gpus",
    "train_samples",
    "method",
    "steps",
    "seed",
    "metric",
    "train_seconds",
)
_METHODS = {"single": SINGLE, "accumulation": ACCUMULATION, "k_batch": K}
#: Larger files are not tables of runs, and would be read for minutes.
_MAX_BYTES = 50_000_000


def read_csv(path: Path) -> Found:
    """The runs of a file with the columns `COLUMNS`. Raises UserError."""
    rows = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        _check_header(path, header)
        runs = [
            _run(_Line(path, rows.line_num, dict(zip(header, row, strict=False))), len(row), len(header))
            for row in rows
            if any(cell.strip() for cell in row)
        ]
    except csv.Error as error:
        raise UserError(f"--csv={path}, line {rows.line_num}: this is no row of a CSV file ({error})") from error
    if not runs:
        raise UserError(f"--csv={path} holds no run: below the line of column names there has to be one line per run")
    _check_unique(path, runs)
    return Found(runs)


def _text(path: Path) -> str:
    if path.is_dir():
        raise UserError(f"--csv={path} is a folder: give a CSV file, or the folder without --csv if it holds runs")
    if not path.exists():
        raise UserError(f"--csv={path} does not exist: check the path")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"--csv={path} is no table of runs: it has more than {_MAX_BYTES:,} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--csv={path} cannot be read: {error.strerror}") from error
    if not content.strip():
        raise UserError(f"--csv={path} is empty: its first line has to be {','.join(COLUMNS)}")
    try:
        text = content.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"--csv={path}, line {line}: this is no text in UTF-8; save the table as a CSV file") from error
    if "\0" in text:
        raise UserError(f"--csv={path}, line {text[: text.index(chr(0))].count(chr(10)) + 1}: this is a binary file")
    return text


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if name not in COLUMNS:
            raise UserError(f"--csv={path}, line 1: there is no column '{name}'{did_you_mean(name, COLUMNS)}")
        if header.count(name) > 1:
            raise UserError(f"--csv={path}, line 1: the column '{name}' is there twice; leave one out")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise UserError(f"--csv={path}, line 1: missing column(s) {', '.join(missing)}; the line has to name them all")


class _Line:
    """One line of the file, read cell by cell."""

    def __init__(self, path: Path, number: int, cells: Mapping[str, str]) -> None:
        self.path, self.number = path, number
        self._cells = {name: cell.strip() for name, cell in cells.items()}

    def refuse(self, problem: str) -> UserError:
        return UserError(f"--csv={self.path}, line {self.number}: {problem}")

    def text(self, name: str) -> str:
        return self._cells.get(name, "")

    def number_in(self, name: str) -> float:
        try:
            value = float(self.text(name))
        except ValueError as error:
            raise self.refuse(f"{name}='{self.text(name)}' is no number; write one such as 89.2") from error
        if not abs(value) < 1e15:
            raise self.refuse(f"{name}={self.text(name)} is out of range; give a run that diverged its score")
        return value

    def count(self, name: str, least: int = 1) -> int:
        value = self.number_in(name)
        if value != int(value) or value < least:
            raise self.refuse(f"{name}={self.text(name)} cannot be: it is a whole number of at least {least}")
        return int(value)


def _run(line: _Line, cells: int, columns: int) -> Run:
    if cells != columns:
        raise line.refuse(f"{cells} cells under {columns} column names; a comma too many or too few")
    if line.text("method") not in _METHODS:
        choices = did_you_mean(line.text("method"), _METHODS)
        raise line.refuse(f"method='{line.text('method')}' is none that is known{choices}")
    method = _METHODS[line.text("method")]
    workers, steps, seed = line.count("gpus"), _steps(line, method), line.count("seed", least=0)
    if method == SINGLE and workers != 1:
        raise line.refuse(f"method=single with gpus={workers}: a single run has one; use accumulation or k_batch")
    conditions = tuple(line.text(name) for name in ("task", "precision", "learning_rate"))
    shown = (*conditions[:2], f"learning rate {conditions[2]}" if conditions[2] else "")
    samples = line.count("train_samples")
    name = f"{workers} GPU{'s' if workers > 1 else ''}"
    if method != SINGLE:
        name += f" · accumulation {steps}" if method == ACCUMULATION else f" · k = {steps}"
    return Run(
        source=f"line {line.number}",
        block=BlockKey(line.text("experiment"), shown, samples, 1, "metric", "max"),
        setup=name,
        digest=name,
        seed=seed,
        workers=workers,
        accumulation=steps if method == ACCUMULATION else 1,
        k=steps if method == K else 1,
        precision=conditions[1] or "fp32",
        method=method,
        metric=line.number_in("metric"),
        seconds=_seconds(line),
    )


def _steps(line: _Line, method: str) -> int:
    steps = 1 if method == SINGLE and not line.text("steps") else line.count("steps")
    if method == SINGLE and steps != 1:
        raise line.refuse(f"method=single with steps={steps}: one GPU that accumulates is method=accumulation")
    return steps


def _seconds(line: _Line) -> float | None:
    if not line.text("train_seconds"):
        return None
    seconds = line.number_in("train_seconds")
    if seconds <= 0:
        raise line.refuse(f"train_seconds={line.text('train_seconds')} cannot be: a training takes more than 0 seconds")
    return seconds


def _check_unique(path: Path, runs: list[Run]) -> None:
    first: dict[object, Run] = {}
    for run in runs:
        same = first.setdefault((run.block, run.setup_key, run.seed), run)
        if same is not run:
            raise UserError(
                f"--csv={path}, {run.source}: {run.setup} with seed {run.seed} stands on {same.source} already "
                f"({run.block.title}); leave one out, or correct its seed"
            )
