"""The rows as `runner.compare` sees runs: its differences, intervals and verdicts, against one worker."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.sync_table.experiment import TRAIN_SAMPLES
from benchmarks.sync_table.rows import FINISHED, Row
from benchmarks.sync_table.setups import ONE, SCALINGS
from runner.compare.comparison import compare_runs
from runner.compare.results import Block
from runner.compare.runs import ACCUMULATION, SINGLE, BlockKey, FoundRuns, K, Run, newest_of_each_seed

#: Points of accuracy.
MARGIN = 1.0


def current(rows: Sequence[Row], base_lr: float, epochs: int) -> list[Row]:
    """The finished rows of one experiment: these numbers, the newest data, and of each setup the newest settings."""
    finished = [row for row in rows if row["status"] == FINISHED]
    same = [row for row in finished if float(row["base_lr"]) == base_lr and int(row["epochs"]) == epochs]
    data = same[-1]["data"] if same else ""
    newest = {row["setup"]: row["digest"] for row in same if row["data"] == data}
    return [row for row in same if row["data"] == data and newest[row["setup"]] == row["digest"]]


def compare_rows(rows: Sequence[Row], metric: str) -> dict[str, Block]:
    """By learning rate, `none` or `linear`: all setups against the one worker. Empty while that has not run."""
    blocks = {}
    for scaling in SCALINGS:
        own = [row for row in rows if row["setup"] == ONE or row["scaling"] == scaling]
        runs = [_run(number, row, scaling, metric) for number, row in enumerate(own)]
        if any(run.setup == ONE for run in runs):
            margin = MARGIN if metric == "accuracy" else None
            (blocks[scaling],) = compare_runs(newest_of_each_seed(FoundRuns(runs)), ONE, margin).blocks
    return blocks


def _run(number: int, row: Row, scaling: str, metric: str) -> Run:
    workers, k = int(row["workers"]), int(row["k"])
    return Run(
        source=f"{row['setup']} seed {row['seed']}",
        block=BlockKey("cola", (f"scaling={scaling}",), TRAIN_SAMPLES, int(row["epochs"]), metric, "max", row["data"]),
        setup=row["setup"],
        digest=row["digest"],
        seed=int(row["seed"]),
        workers=workers,
        accumulation=int(row["accumulation"]),
        k=k,
        precision="fp32",
        method=SINGLE if workers == 1 else K if k > 1 else ACCUMULATION,
        metric=float(row[metric]),
        seconds=float(row["training_s"]) if row["training_s"] else None,
        machine=row["machine"] or None,
        order=f"{number:06d}",
    )
