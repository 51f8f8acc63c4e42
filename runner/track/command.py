"""`python -m runner.track`: look at what MLflow has (`ui`), and bring to it what it has not taken (`sync`)."""

from __future__ import annotations

import os
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from runner.config.arguments import ArgumentParser
from runner.config.choices import TrackerName
from runner.config.schema import Tracking
from runner.errors import UserError
from runner.folder.lock import is_held
from runner.track.preflight import check_tracking
from runner.track.secrets import masked
from runner.track.store import default_store
from runner.track.upload import deliver, runs_below, store_and_runs


def track(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments; the exit code. Raises UserError."""
    options = _parser().parse_args(arguments)
    action = {"sync": _sync, "ui": _ui}[options.command]
    return action(options, console)


def _sync(options: Namespace, console: Console) -> int:
    troubled = 0
    given = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    folders = {folder: store_and_runs(folder, given) for folder in map(Path, options.folders)}
    for uri in {uri for uri, _ in folders.values()}:
        check_tracking(Tracking(TrackerName.mlflow, uri))
    for folder, (uri, runs) in folders.items():
        for run in runs:
            try:
                done = deliver(run, uri, "KILLED" if options.killed and not is_held(run) else None)
            except Exception as error:  # noqa: BLE001 - database, network, disk: the other runs may still arrive
                troubled += 1
                console.print(f"{run}  not delivered: {masked(str(error))}", style="red", soft_wrap=True, markup=False)
                continue
            state = "delivered" if done.closed else "delivered as far as it is; it has not ended (--killed if it was)"
            console.print(f"{run}  →  {done.run_id}  {state}", soft_wrap=True, markup=False)
        if left_out := len(runs_below(folder)) - len(runs):
            console.print(
                f"{left_out} runs below {folder} were logged to no store: --tracking-uri would bring them, too"
            )
    return 1 if troubled else 0


def _ui(options: Namespace, console: Console) -> int:
    uri = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or default_store(Path.cwd())
    if uri.startswith(("http://", "https://")):
        raise UserError(f"{masked(uri)} is a server, which has its own pages: open it in a browser")
    check_tracking(Tracking(TrackerName.mlflow, uri))
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise UserError(f"there is no {uri.removeprefix('sqlite:///')}: run something first, or give --tracking-uri")
    _check_port(options.port)
    console.print(f"MLflow: http://127.0.0.1:{options.port}  (Ctrl-C ends it)", highlight=False)
    sys.stdout.flush()
    # One user on one machine: one worker process is up sooner than the default of four, and enough.
    where = ["--host", "127.0.0.1", "--port", str(options.port)]
    command = [sys.executable, "-m", "mlflow", "ui", *where, "--workers", "1"]
    # Not on the command line, which every user of the machine can read: the address may hold a password.
    os.execve(sys.executable, command, {**os.environ, "MLFLOW_BACKEND_STORE_URI": uri})


def _check_port(port: int) -> None:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise UserError(f"--port={port} cannot be used ({error}): give another one") from error


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m runner.track", description="MLflow beside the runs themselves.")
    commands = parser.add_subparsers(dest="command", required=True)
    sync = commands.add_parser(
        "sync", help="send metrics, files and status that are missing; nothing is sent twice", allow_abbrev=False
    )
    sync.add_argument("folders", nargs="+", metavar="FOLDER", help="a run's folder, a sweep's, or one that holds them")
    sync.add_argument("--tracking-uri", help="the store; without it the one that the runs were logged to")
    sync.add_argument("--killed", action="store_true", help="close runs that never ended, as KILLED")
    ui = commands.add_parser("ui", help="serve MLflow's pages of these runs on this machine only", allow_abbrev=False)
    ui.add_argument("--tracking-uri", help="the store (default: outputs/mlflow.db below this folder)")
    ui.add_argument("--port", type=int, default=5000)
    return parser
