"""`table.md` and `plot.png` from the runs in `runs.csv` so far."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sync_table.compared import compare_rows, current
from benchmarks.sync_table.plot import write_plot
from benchmarks.sync_table.rows import read_rows
from benchmarks.sync_table.table import markdown


def write_report(results: Path, base_lr: float, epochs: int) -> None:
    """Write both files into the folder of `results`, the CSV file, for runs with these settings."""
    every = read_rows(results)
    rows = current(every, base_lr, epochs)
    if not rows:
        print(f"{results} holds no run at learning rate {base_lr:g} over {epochs} epochs: no report")
        return
    kept = {id(row) for row in rows}
    aside = [row for row in every if id(row) not in kept]
    (results.parent / "table.md").write_text(markdown(rows, aside), encoding="utf-8")
    blocks = compare_rows(rows, "accuracy")
    if blocks:
        write_plot(blocks, float(rows[-1]["majority"]), results.parent / "plot.png")
    print(f"{len(rows)} runs: {results.parent / 'table.md'}")
