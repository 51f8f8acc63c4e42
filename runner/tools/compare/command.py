"""The command `python -m runner.compare`: its options, where the runs come from, and where the files go."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from runner.config.arguments import ArgumentParser
from runner.errors import UserError, first_line, require
from runner.folder.files import check_folder
from runner.tools.compare.from_csv import read_csv
from runner.tools.compare.from_folders import read_folders, run_folders
from runner.tools.compare.from_mlflow import RUN_ID, ExistingStore, store_exists, store_uri
from runner.tools.compare.runs import FoundRuns, newest_of_each_seed
from runner.track.secrets import masked


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m runner.compare",
        description="Compare setups over several seeds by metric and speed, and decide for each setup whether it is "
        "equivalent to the baseline, different, or undecided. Prints tables; writes them with plots and a report into "
        "a folder.",
        epilog="example: python -m runner.compare --sweep 2026-11-21_10-00-00-1234 --baseline cpu --margin 0.5",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="MLflow run ids (the id of a parent stands for its "
                        "children), folders of runs, or folders that contain them, such as a sweep's")  # fmt: skip
    parser.add_argument("--experiment", metavar="NAME", help="all runs of an MLflow experiment")
    parser.add_argument("--sweep", metavar="ID", help="all runs of a sweep: the name of its folder in outputs/sweeps")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="published runs from a CSV file")
    parser.add_argument("--baseline", metavar="SETUP", help="the setup to compare with, named as in the table "
                        "(default: one worker, no accumulation, fp32)")  # fmt: skip
    parser.add_argument("--metric", metavar="NAME", help="a metric other than the runs' own objective")
    parser.add_argument("--margin", type=float, metavar="POINTS", help="differences within ± this are equivalent, in "
                        "the unit of the metric (default: 1 percentage point for rates such as accuracy, which is 0.01 "
                        "if they are fractions of 1; no default for other metrics, such as a loss)")  # fmt: skip
    parser.add_argument("--family-wise", action="store_true", help="correct the verdicts for their number (Holm): at "
                        "most 5%% for any wrong one among the setups of a table")  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="folder to write (default: outputs/compare/<time>)")
    parser.add_argument("--tracking-uri", metavar="URI", help="the MLflow store (default: MLFLOW_TRACKING_URI, else "
                        "outputs/mlflow.db)")  # fmt: skip
    parser.add_argument("--no-log", action="store_true", help="do not log the report to the sweep's parent run")
    return parser


def compare(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments; the exit code. Raises UserError."""
    options = parsed(arguments)
    out = options.out.expanduser() if options.out is not None else _default_folder()
    _check_folder(out)
    found = finished_runs(options)
    # These need scipy, and a wrong option should be reported without waiting for it.
    from runner.tools.compare.comparison import compare_runs
    from runner.tools.compare.report import logged_metrics, logged_tags, write_report  # likewise
    from runner.tools.compare.terminal import print_comparison  # likewise

    comparison = compare_runs(found, options.baseline, options.margin, options.family_wise)
    print_comparison(comparison, console)
    out.mkdir(parents=True, exist_ok=True)
    write_report(comparison, out, masked("python -m runner.compare " + shlex.join(arguments)))
    console.print(Text(f"report: {os.path.relpath(out / 'report.html')}"), soft_wrap=True)
    if not options.no_log:
        metrics, tags = logged_metrics(comparison), logged_tags(comparison)
        _log_to_parent(found, out, metrics, tags, options.tracking_uri, console)
    return 0


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command's options, as far as they can be checked alone. Raises UserError."""
    options = _parser().parse_intermixed_args(list(arguments))
    _check(options)
    return options


def finished_runs(options: argparse.Namespace) -> FoundRuns:
    """The runs that the options name, the newest of each seed. Raises UserError if none has finished."""
    found = newest_of_each_seed(find_runs(options))
    if not found.runs:
        reasons = "; ".join(f"{one.source}: {one.reason}" for one in found.skipped)
        raise UserError(f"there is no finished run to compare ({reasons or 'none was found'})")
    return found


def _check(options: argparse.Namespace) -> None:
    sources = {"RUN": options.runs or None, "--experiment": options.experiment}
    sources |= {"--sweep": options.sweep, "--csv": options.csv}
    given = [name for name, value in sources.items() if value is not None]
    if not given:
        raise UserError("no runs are given: use run ids or folders, --experiment NAME, --sweep ID, or --csv FILE")
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are given together: use one source of runs at a time")
    margin = options.margin
    require(margin is None or (math.isfinite(margin) and margin > 0), "--margin", margin, "use a number above 0")
    only = "use it without --csv: a file has one metric, in the column 'metric'"
    require(options.csv is None or options.metric in (None, "metric"), "--metric", options.metric, only)
    for name in ("experiment", "sweep", "baseline", "metric"):
        require(getattr(options, name) != "", f"--{name}", "''", "give a name, or leave out the option")


def _default_folder() -> Path:
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path("outputs") / "compare" / f"{now}-{secrets.token_hex(2)}"


def _check_folder(folder: Path) -> None:
    """Refuse an output folder that cannot be created or that holds files, without creating it. Raises UserError."""
    require(not folder.is_dir() or not any(folder.iterdir()), "--out", folder, "use a new or an empty folder")
    check_folder("--out", folder)


def find_runs(options: argparse.Namespace) -> FoundRuns:
    """The runs that the options name. Raises UserError."""
    if options.csv is not None:
        return read_csv(options.csv)
    folder = Path("outputs") / "sweeps" / options.sweep if options.sweep is not None else None
    if folder is not None and folder.is_dir():
        return _from_arguments([str(folder)], options)
    if options.runs:
        return _from_arguments(options.runs, options)
    store = ExistingStore(options.tracking_uri, folder)
    by_experiment = options.experiment is not None
    runs = store.experiment(options.experiment) if by_experiment else store.sweep(options.sweep)
    if not runs:
        name = f"--experiment={options.experiment}" if by_experiment else f"--sweep={options.sweep}"
        raise UserError(f"{name} has no runs in {masked(store.uri)}: check the name, or --tracking-uri")
    return store.read(runs, options.metric)


def _from_arguments(arguments: Sequence[str], options: argparse.Namespace) -> FoundRuns:
    """Runs by folder and by MLflow id, in any mixture; a run given by both counts once."""
    folders: dict[str, Path] = {}
    ids: list[str] = []
    for argument in dict.fromkeys(arguments):
        if Path(argument).exists():
            folders |= {os.path.relpath(path): path for path in run_folders(Path(argument))}
        elif RUN_ID.fullmatch(argument):
            ids.append(argument)
        else:
            raise UserError(f"{argument} is neither a folder nor an MLflow run id (32 hexadecimal digits)")
    found = read_folders(list(folders.items()), options.metric) if folders else FoundRuns([])
    if not ids:
        return found
    store = ExistingStore(options.tracking_uri)
    logged = store.read([run for one in ids for run in store.run_or_children(one)], options.metric)
    known = {run.mlflow_run_id for run in found.runs}
    runs = [*found.runs, *(run for run in logged.runs if run.mlflow_run_id not in known)]
    return FoundRuns(runs, [*found.skipped, *logged.skipped])


def _log_to_parent(
    found: FoundRuns,
    folder: Path,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    tracking_uri: str | None,
    console: Console,
) -> None:
    """Log the comparison to the sweep that the runs belong to, if they all belong to one and the store exists."""
    ids = [run.mlflow_run_id for run in found.runs if run.mlflow_run_id]
    if len(ids) < len(found.runs) or not store_exists(store_uri(tracking_uri)):
        return
    try:
        store = ExistingStore(tracking_uri)
        parent = store.common_parent(ids)
        if parent is None:
            return
        store.log(parent, folder, metrics, tags)
    except UserError as error:  # the comparison is complete without it
        console.print(Text(f"not logged to MLflow: {masked(first_line(error))}", style="yellow"), soft_wrap=True)
    else:
        console.print(Text(f"logged to MLflow run {parent}, under compare/"), soft_wrap=True)
