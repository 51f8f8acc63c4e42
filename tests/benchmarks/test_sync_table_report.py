"""Table and plot of `benchmarks/sync_table`, from rows with known numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.sync_table.compared import compare_rows, current
from benchmarks.sync_table.report import write_report
from benchmarks.sync_table.rows import COLUMNS, append_row, read_rows
from benchmarks.sync_table.setups import all_setups
from benchmarks.sync_table.table import markdown

SETUPS = {setup.name: setup for setup in all_setups()}
ONE = [80.0, 80.4, 80.2]


def rows(name: str, accuracies: Sequence[float], **more: object) -> list[dict[str, str]]:
    """As `read_rows` gives them: one per accuracy, seeds from 0."""
    setup = SETUPS[name]
    common = {
        "setup": name,
        "status": "FINISHED",
        "policy": setup.policy,
        "workers": setup.workers,
        "accumulation": setup.accumulation,
        "k": setup.k,
        "scaling": setup.scaling,
        "base_lr": 0.0003,
        "epochs": 3,
        "majority": 69.26,
        "training_s": 50.0,
        "comm_bytes": 2_000_000,
        "data": "d0",
        "digest": name,
        "commit": "abc",
        **more,
    }
    found = []
    for seed, accuracy in enumerate(accuracies):
        row = {**common, "seed": seed, "accuracy": accuracy, "matthews": accuracy - 60, "eval_loss": 0.6}
        found.append({column: str(row.get(column, "")) for column in COLUMNS})
    return found


def test_verdicts_are_those_of_runner_compare() -> None:
    found = [
        *rows("one", [*ONE, 80.3]),
        *rows("k16-none", [80.1, 80.4, 80.3]),
        *rows("sync-linear", [70.0, 70.5, 70.2]),
    ]
    none, linear = compare_rows(found, "accuracy").values()
    same, worse = none.rows[1], linear.rows[1]
    assert same.verdict is not None
    assert same.verdict.kind == "equivalent"
    assert same.difference is not None
    assert same.difference.pairs == pytest.approx((0.1, 0.0, 0.1))
    assert same.left_out == (3,)
    assert worse.verdict is not None
    assert worse.verdict.text == "different: worse"


def test_rows_of_other_settings_are_not_used() -> None:
    old = rows("one", [60.0], base_lr=0.0001) + rows("one", [61.0], data="d-") + rows("k2-none", [62.0], digest="old")
    failed = [{**rows("k4-none", [0.0])[0], "status": "FAILED", "accuracy": ""}]
    new = [*rows("one", ONE), *rows("k2-none", [80.0])]
    assert current([*old, *failed, *new], 0.0003, 3) == new
    assert current(new, 0.0003, 4) == []


def test_published_layout() -> None:
    found = [
        *rows("one", ONE),
        *rows("sync-none", [79.0, 79.4, 79.2]),
        *rows("accumulation16-none", [30.0, 30.0, 30.0]),
        *rows("k16-none", [80.1, 80.4, 80.3], drift_last=0.0123, cosine_mean=0.25),
        *rows("outer-none", [79.9]),
    ]
    text = markdown(found, [])
    lines = text.splitlines()
    assert "| one worker | 80.2 ± 0.2 |  |  |  |  |" in lines
    k_line = next(line for line in lines if line.startswith("| 4 workers, k |"))
    cells = [cell.strip() for cell in k_line.strip("|").split("|")]
    assert cells[1].startswith("79.2 ± 0.2<br>")
    assert cells[2:5] == ["–", "–", "–"]
    assert cells[5] == "80.3 ± 0.2<br>equivalent"
    accumulation = next(line for line in lines if line.startswith("| 4 workers, accumulation |"))
    assert accumulation.split("|")[2] == k_line.split("|")[2]
    assert "30.0 ± 0.0<br>different: worse" in accumulation
    details = next(line for line in lines if line.startswith("| `k16-none` | 3 | 80.3 ± 0.2 | +0.07 ["))
    assert details.endswith("| equivalent | 1.2e-02 | 0.25 | 2 |")
    assert "collapsed" in text
    assert "| k = 16 | periodic | gradients | accumulated | outer | overlap-bf16 |" in lines
    assert "69.26%" in text
    assert "| one worker | 20.2 ± 0.2 |  |  |  |  |" in lines
    assert "| one worker | 0.600 ± 0.000 |  |  |  |  |" in lines


def test_report_of_some_runs(tmp_path: Path) -> None:
    results = tmp_path / "runs.csv"
    write_report(results, 0.0003, 3)
    assert list(tmp_path.iterdir()) == []
    append_row(results, rows("k16-none", [80.0])[0])
    write_report(results, 0.0003, 3)
    assert "One worker has not run yet" in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "plot.png").exists()
    for row in [*rows("one", ONE[:1]), *rows("outer-linear", [78.0]), *rows("k2-none", [79.0], base_lr=0.5)]:
        append_row(results, row)
    write_report(results, 0.0003, 3)
    text = (tmp_path / "table.md").read_text()
    assert "undecided: at least 2 more seeds" in text
    assert "1 run of that file is no part of this" in text
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_rows(results)) == 4
