"""`python -m runner.track sync FOLDER`: bring runs to MLflow that it has not, or not wholly, taken."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from runner.arguments import ArgumentParser
from runner.choices import TrackerName
from runner.errors import UserError
from runner.schema import Tracking
from runner.tracking.preflight import check_tracking
from runner.tracking.secrets import masked
from runner.tracking.sync import deliver, runs_below, store_for


def track(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments; the exit code. Raises UserError."""
    options = _parser().parse_args(arguments)
    troubled = 0
    for folder in map(Path, options.folders):
        uri = store_for(folder, options.tracking_uri)
        check_tracking(Tracking(TrackerName.mlflow, uri))
        for run in runs_below(folder):
            try:
                done = deliver(run, uri, "KILLED" if options.killed else None)
            except (UserError, KeyboardInterrupt):
                raise
            except Exception as error:  # noqa: BLE001 - database, network, disk: the other runs may still arrive
                troubled += 1
                console.print(f"[bold red]not delivered[/]  {run}: {masked(str(error))}", soft_wrap=True)
                continue
            state = "delivered" if done.closed else "delivered as far as it is; it has not ended (--killed if it was)"
            console.print(f"{run}  →  {done.run_id}  {state}", soft_wrap=True, markup=False)
    return 1 if troubled else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m runner.track", description="Bring runs to MLflow that it has not wholly taken."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sync = commands.add_parser(
        "sync", help="send metrics, files and status that are missing; nothing is sent twice", allow_abbrev=False
    )
    sync.add_argument("folders", nargs="+", metavar="FOLDER", help="a run's folder, a sweep's, or one that holds them")
    sync.add_argument("--tracking-uri", help="the store; without it the one that the runs were logged to")
    sync.add_argument("--killed", action="store_true", help="close runs that never ended, as KILLED")
    return parser


if __name__ == "__main__":
    from runner.cli import track_main

    sys.exit(track_main(sys.argv[1:]))
