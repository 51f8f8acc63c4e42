"""The command `python -m runner.compare`: what it takes, and where its files go."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from runner.compare.runs import Found, newest_of_each_seed
from runner.compare.sources import find_runs, with_parent
from runner.config.arguments import ArgumentParser
from runner.errors import UserError, first_line
from runner.track.secrets import masked


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m runner.compare",
        description="Compare setups over seeds: metric, speed, and for each setup whether it is equivalent to the "
        "baseline, different, or undecided. Prints tables, and writes them with plots and one report into a folder.",
        epilog="example: python -m runner.compare --sweep 2026-11-21_10-00-00-1234 --baseline cpu --margin 0.5",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="MLflow run ids (a parent's stands for its children), "
                        "runs' folders, or folders of these such as a sweep's")  # fmt: skip
    parser.add_argument("--experiment", metavar="NAME", help="every run of an MLflow experiment")
    parser.add_argument("--sweep", metavar="ID", help="every run of a sweep: its folder's name below outputs/sweeps")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="published runs from a CSV file")
    parser.add_argument("--baseline", metavar="SETUP", help="what to compare with, named as in the table "
                        "(default: one worker, no accumulation, fp32)")  # fmt: skip
    parser.add_argument("--metric", metavar="NAME", help="another metric than the runs' own objective")
    parser.add_argument("--margin", type=float, default=1.0, metavar="POINTS", help="differences within ± this are "
                        "equivalent, in the metric's unit: points of a percentage (default: 1)")  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where files go (default: outputs/compare/<time>)")
    parser.add_argument("--tracking-uri", metavar="URI", help="the MLflow store (default: MLFLOW_TRACKING_URI, else "
                        "outputs/mlflow.db)")  # fmt: skip
    parser.add_argument("--no-log", action="store_true", help="do not log the report to the sweep's parent run")
    return parser


def compare(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments; the exit code. Raises UserError."""
    options = _parser().parse_intermixed_args(list(arguments))
    _check(options)
    out = options.out.expanduser() if options.out is not None else _default_folder()
    _check_folder(out)
    found = newest_of_each_seed(find_runs(options))
    if not found.runs:
        reasons = "; ".join(f"{one.source}: {one.reason}" for one in found.refused)
        raise UserError(f"there is no finished run to compare ({reasons or 'none was found'})")
    from runner.compare.comparison import compare_runs

    comparison = compare_runs(found, options.baseline, options.margin)
    from runner.compare.markdown import description
    from runner.compare.report import write_report
    from runner.compare.terminal import print_comparison

    print_comparison(comparison, console)
    out.mkdir(parents=True, exist_ok=True)
    write_report(comparison, out, masked("python -m runner.compare " + shlex.join(arguments)))
    console.print(Text(f"report: {os.path.relpath(out / 'report.html')}"), soft_wrap=True)
    if not options.no_log:
        _log(found, out, description(comparison), options.tracking_uri, console)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Everything that can be wrong with the options themselves. Raises UserError."""
    sources = {
        "RUN": bool(options.runs),
        "--experiment": options.experiment is not None,
        "--sweep": options.sweep is not None,
        "--csv": options.csv is not None,
    }
    given = [name for name, there in sources.items() if there]
    if not given:
        raise UserError("which runs? Give run ids or folders, --experiment NAME, --sweep ID, or --csv FILE")
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are given together: runs come from one source at a time")
    if not (math.isfinite(options.margin) and options.margin > 0):
        raise UserError(f"--margin={options.margin:g} cannot be: it is a number of points above 0, such as 1")
    if options.csv is not None and options.metric not in (None, "metric"):
        raise UserError(f"--metric={options.metric} cannot be chosen with --csv: a file has the one column 'metric'")
    for name in ("experiment", "sweep", "baseline", "metric"):
        if getattr(options, name) is not None and not getattr(options, name).strip():
            raise UserError(f"--{name} is empty: give a name, or leave the option out")


def _default_folder() -> Path:
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path("outputs") / "compare" / f"{now}-{secrets.token_hex(2)}"


def _check_folder(folder: Path) -> None:
    """Refuse an output folder that cannot be made, or would mix two reports, without making it."""
    existing = folder.expanduser().absolute()
    if existing.is_dir() and any(existing.iterdir()):
        raise UserError(f"--out={folder} holds files already: choose a new folder")
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"--out={folder} cannot be made: {existing} is a file; choose another folder")
    if not os.access(existing, os.W_OK):
        raise UserError(f"--out={folder} cannot be made: {existing} cannot be written to; choose another folder")


def _log(found: Found, folder: Path, description: str, tracking_uri: str | None, console: Console) -> None:
    """Put the files beside the sweep they are about, and the answer on its page."""
    try:
        found, store = with_parent(found, tracking_uri)
        if found.parent is None or store is None:
            return
        store.log(found.parent, folder, description)
    except Exception as error:  # noqa: BLE001 - a store's troubles are many; the comparison is done, its files are there
        console.print(Text(f"not logged to MLflow: {masked(first_line(error))}", style="yellow"), soft_wrap=True)
    else:
        console.print(Text(f"logged to MLflow run {found.parent}, under compare/"), soft_wrap=True)
