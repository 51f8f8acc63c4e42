"""Read published runs from a CSV file, one run per line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import UserError, did_you_mean, first_line
from runner.tools.compare.runs import ACCUMULATION, SINGLE, BlockKey, FoundRuns, K, Run

if TYPE_CHECKING:
    import pandas as pd

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
#: May be missing, or empty.
EVAL_SAMPLES = "eval_samples"
_METHODS = {"single": SINGLE, "accumulation": ACCUMULATION, "k_batch": K}
#: Smallest value of each numeric column.
_NUMBERS = {"gpus": 1, "train_samples": 1, "steps": 1, "seed": 0, "metric": -1e15, "train_seconds": 1e-9}
_NUMBERS |= {EVAL_SAMPLES: 1}
_FRACTIONAL, _MAY_BE_EMPTY = ("metric", "train_seconds"), ("train_seconds", EVAL_SAMPLES)


def read_csv(path: Path) -> FoundRuns:
    """The runs of a file with the columns `COLUMNS`. Raises UserError."""
    table = _read_table(path)
    table.loc[(table["method"] == "single") & (table["steps"] == ""), "steps"] = "1"
    known = table["method"].isin(list(_METHODS))
    _require(path, table, "method", known, "use single, accumulation or k_batch")
    numbers = {name: _numbers(path, table, name) for name in _NUMBERS}
    single = table["method"] == "single"
    _require(path, table, "gpus", ~single | (numbers["gpus"] == 1), "use method=accumulation or k_batch for several")
    _require(path, table, "steps", ~single | (numbers["steps"] == 1), "use method=accumulation for several steps")
    same_run = [name for name in COLUMNS if name not in _FRACTIONAL]
    _require(path, table, "seed", ~table.duplicated(same_run), "this run is already in the file; remove one of the two")
    lines = table.assign(**numbers)
    return FoundRuns([_run(line, cells) for line, cells in zip(lines.index + 2, lines.to_dict("records"), strict=True)])


def _read_table(path: Path) -> pd.DataFrame:
    """All cells as text without surrounding blanks, without empty lines. The index counts lines below the header."""
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False, encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # pandas' own errors and UnicodeDecodeError are ValueErrors
        fix = f"give a CSV file in UTF-8 with the columns {','.join(COLUMNS)}"
        raise UserError(f"--csv={path} cannot be read ({first_line(error)}): {fix}") from error
    table.columns = table.columns.str.strip()
    for name in table.columns:
        if name not in (known := (*COLUMNS, EVAL_SAMPLES)):
            raise UserError(f"--csv={path}, line 1: unknown column '{name}'{did_you_mean(name, known)}")
    if missing := [name for name in COLUMNS if name not in table.columns]:
        raise UserError(f"--csv={path}, line 1: missing column(s) {', '.join(missing)}")
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes surplus cells for an index
        raise UserError(f"--csv={path}: the lines have more cells than line 1 has column names")
    table = table.apply(lambda column: column.str.strip())
    table = table[(table != "").any(axis=1)]
    if table.empty:
        raise UserError(f"--csv={path} holds no run: add one line per run below the column names")
    return table if EVAL_SAMPLES in table else table.assign(**{EVAL_SAMPLES: ""})


def _numbers(path: Path, table: pd.DataFrame, name: str) -> pd.Series[float]:
    import pandas as pd

    least = _NUMBERS[name]
    values = pd.to_numeric(table[name], errors="coerce")
    ok = (values >= least) & (values < 1e15)
    rule = "use a finite number" if name == "metric" else "use a number above 0, or leave the cell empty"
    if name not in _FRACTIONAL:
        ok &= values % 1 == 0
        rule = f"use a whole number of at least {least}"
    if name in _MAY_BE_EMPTY:
        ok |= table[name] == ""
    _require(path, table, name, ok, rule)
    return values


def _require(path: Path, table: pd.DataFrame, name: str, ok: pd.Series[bool], rule: str) -> None:
    if not ok.all():
        first = ok.idxmin()
        raise UserError(f"--csv={path}, line {first + 2}: {name}={table[name][first]} is invalid: {rule}")


def _run(line: int, cells: dict[str, Any]) -> Run:
    method, workers, steps = _METHODS[cells["method"]], int(cells["gpus"]), int(cells["steps"])
    rate = cells["learning_rate"] and f"learning rate {cells['learning_rate']}"
    conditions = (cells["task"], cells["precision"], rate)
    name = f"{workers} GPU{'s' if workers > 1 else ''}"
    if method != SINGLE:
        name += f" · accumulation {steps}" if method == ACCUMULATION else f" · k = {steps}"
    seconds, rows = float(cells["train_seconds"]), float(cells[EVAL_SAMPLES])
    return Run(
        source=f"line {line}",
        block=BlockKey(cells["experiment"], conditions, int(cells["train_samples"]), 1, "metric", "max"),
        setup=name,
        digest=name,
        seed=int(cells["seed"]),
        workers=workers,
        accumulation=steps if method == ACCUMULATION else 1,
        k=steps if method == K else 1,
        precision=cells["precision"] or "fp32",
        method=method,
        metric=float(cells["metric"]),
        seconds=seconds if seconds == seconds else None,  # an empty cell is NaN
        eval_rows=int(rows) if rows == rows else None,
    )
