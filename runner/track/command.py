"""`python -m runner.track`: `ui` serves MLflow's pages, `sync` sends to a store what it does not have."""

from __future__ import annotations

import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from runner.config.arguments import ArgumentParser
from runner.config.schema import Tracking
from runner.errors import UserError, first_line
from runner.folder.lock import is_locked
from runner.folder.metrics_log import damage_of_metrics
from runner.folder.reading import folders_with
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord
from runner.track.delivery import deliver
from runner.track.secrets import masked
from runner.track.store import (
    EXPERIMENTS_PAGE,
    check_tracking,
    database_of,
    error_summary,
    experiment_page,
    set_up_mlflow,
    store_for,
    store_of,
)
from runner.track.tracker import deliver_locally


def track(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments; the exit code. Raises UserError."""
    options = _parser().parse_args(arguments)
    return _sync(options, console) if options.command == "sync" else _ui(options, console)


def _sync(options: Namespace, console: Console) -> int:
    failed = 0
    folders = {folder: store_and_runs(folder, options.tracking_uri) for folder in map(Path, options.folders)}
    for store in {store for store, _ in folders.values() if store is not None}:
        check_tracking(Tracking(mlflow=True, uri=store))
    for folder, (uri, runs) in folders.items():
        for run in runs_below(folder):
            try:
                for line in _send(run, uri if run in runs else None, options.killed):
                    console.print(f"{run}  →  {line}", soft_wrap=True, markup=False)
            except Exception as error:  # noqa: BLE001 - database, network, disk: continue with the other runs
                failed += 1
                console.print(
                    f"{run}  not delivered: {error_summary(error)}", style="red", soft_wrap=True, markup=False
                )
        if uri is not None and (skipped := len(runs_below(folder)) - len(runs)):
            console.print(f"{skipped} runs below {folder} were not tracked: --tracking-uri would upload them, too")
    return 1 if failed else 0


def _send(run: Path, uri: str | None, killed: bool) -> Iterator[str]:
    """Send what its trackers do not have of a run. Yields a line for each. `uri`: of the MLflow store, if any.

    `killed`: the run has ended if no process has locked it, even if its card does not say so.
    """
    locked = is_locked(run)
    status = "KILLED" if killed and not locked else None
    if uri is not None:
        card = deliver(run, uri, status)
        state = "delivered" if card.status else "delivered so far; it has not ended (if it was killed: --killed)"
        if (damage := damage_of_metrics(run)) is not None:
            yield damage
        yield f"{card.run_id}  {state}"
    if not locked:  # the run itself writes its files, and closes them
        yield from (f"{name}  delivered" for name in deliver_locally(run, status))


def runs_below(folder: Path) -> list[Path]:
    """The folders of all runs in a folder, itself included; a sweep comes before its jobs. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder of a run or a sweep, or one that contains them")
    found = sorted(folders_with(CARD_FILE, folder), key=lambda path: (len(path.parts), path))
    if not found:
        raise UserError(f"{folder} contains no run: there is no {CARD_FILE} in it")
    return found


def store_and_runs(folder: Path, given: str | None) -> tuple[str | None, list[Path]]:
    """The store for the runs below a folder, and these runs; all of them if a store is given.

    Otherwise runs that were not logged to MLflow are left out, and the store is that of the environment, or else the
    one that has them, if it is the user's own; None if only other trackers miss something. Raises UserError.
    """
    runs = runs_below(folder)
    if given:
        return given, runs
    cards: dict[Path, TrackingRecord] = {}
    invalid = []
    for run in runs:
        try:
            cards[run] = TrackingRecord.read(run)
        except UserError as error:
            invalid.append(error)
    if not cards:
        raise invalid[0]
    tracked = {run: card.store for run, card in cards.items() if card.store is not None}
    if not tracked:
        if any(card.undelivered for card in cards.values()):
            return None, []
        raise UserError(f"{folder} was not tracked in MLflow: choose a store with --tracking-uri")
    tracked_or_invalid = [run for run in runs if run in tracked or run not in cards]
    if environment := os.environ.get("MLFLOW_TRACKING_URI"):
        return environment, tracked_or_invalid
    stores = {store_for(store, run, None, "--tracking-uri") for run, store in tracked.items()}
    if len(stores) > 1:
        fix = "choose a store with --tracking-uri or MLFLOW_TRACKING_URI"
        raise UserError(f"{folder} contains runs of several stores: {fix}")
    return stores.pop(), tracked_or_invalid


def _ui(options: Namespace, console: Console) -> int:
    tracking = Tracking(mlflow=True, uri=options.tracking_uri)
    uri = store_of(tracking)
    assert uri is not None
    if uri.startswith(("http://", "https://")):
        raise UserError(f"{masked(uri)} is a server: open it in a browser")
    check_tracking(tracking)
    database = database_of(uri)
    if database is not None and not database.exists():
        raise UserError(f"{database} does not exist: start a run first, or give --tracking-uri")
    _check_port(options.port)
    set_up_mlflow()
    pages = _pages(uri)
    console.print("MLflow is starting, which takes some seconds. Then open", highlight=False)
    for name, page in pages:
        console.print(
            f"  {name}: http://127.0.0.1:{options.port}/{page}", highlight=False, soft_wrap=True, markup=False
        )
    console.print("Ctrl-C ends it.", highlight=False)
    sys.stdout.flush()
    # One server process is enough for one user, and starts sooner than the default of four. Its log of every request
    # would push the addresses off the screen. Without a lifespan task (which removes containers of MLflow's assistant)
    # it has nothing to cancel, with a traceback, on the second SIGINT: the terminal's and the one MLflow forwards.
    serve = ["--host", "127.0.0.1", "--port", str(options.port), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "ui", *serve, "--uvicorn-opts", "--log-level warning --lifespan off"]
    environment = {
        # Not on the command line, which every user of the machine can read: the URI may hold a password.
        "MLFLOW_BACKEND_STORE_URI": uri,
        # Consumers of jobs that only other pages than those of runs start.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PYTHONWARNINGS": "ignore",  # on the libraries that MLflow uses
    }
    # Python does not raise KeyboardInterrupt in a program that starts with an ignored SIGINT; uvicorn handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execve(sys.executable, command, {**os.environ, **environment})


def _pages(uri: str) -> list[tuple[str, str]]:
    """The experiments that have runs, and the pages of these runs, the newest run first. Raises UserError.

    MLflow's own start page, and an experiment's, open an empty view for agents.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    found = []
    try:
        client = MlflowClient(uri)
        for experiment in client.search_experiments():
            newest = client.search_runs([experiment.experiment_id], order_by=["start_time DESC"], max_results=1)
            if newest:
                found.append((newest[0].info.start_time, experiment.name, experiment_page(experiment)))
    except MlflowException as error:
        raise UserError(f"{masked(uri)} cannot be read by MLflow: {masked(first_line(error))}") from error
    return [(name, page) for _, name, page in sorted(found, reverse=True)] or [("MLflow", EXPERIMENTS_PAGE)]


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise UserError(f"--port={port} cannot be used ({error}): choose another port") from error


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m runner.track", description="Open MLflow, or upload what it does not have.")
    commands = parser.add_subparsers(dest="command", required=True)
    sync = commands.add_parser(
        "sync", help="send metrics, files and status that are missing; nothing is sent twice", allow_abbrev=False
    )
    sync.add_argument("folders", nargs="+", metavar="FOLDER", help="of a run or a sweep, or one that contains them")
    default = "MLFLOW_TRACKING_URI, else the one that the runs were logged to, if it is the mlflow.db of their outputs"
    sync.add_argument("--tracking-uri", help=f"the store, also of runs that were not tracked (default: {default})")
    sync.add_argument("--killed", action="store_true", help="close runs that never ended as KILLED")
    ui = commands.add_parser("ui", help="serve MLflow's pages of these runs on this machine only", allow_abbrev=False)
    ui.add_argument("--tracking-uri", help="the store (default: outputs/mlflow.db below this folder)")
    ui.add_argument("--port", type=int, default=5000)
    return parser
