"""A sweep from its command to its answer: opened, run by Hydra, closed, compared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from runner.config.schema import Evaluation, Tracking
from runner.errors import first_line
from runner.folder.lock import end_all, is_held, wait_for
from runner.launch.signals import handle_signals, signals_ignored
from runner.run.progress import Background
from runner.sweep.grid import Grid, at_once, in_process
from runner.sweep.job import free_folder
from runner.sweep.parent_run import ParentRun, parent_card
from runner.sweep.progress import Overview, progress_line
from runner.sweep.resume import KEY, close_books, only_one
from runner.sweep.states import FAILED, FINISHED, KILLED, JobState, attempts, latest
from runner.sweep.sweep import Sweep
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import RunCard
from runner.track.mlflow_tracker import say, short
from runner.track.secrets import masked
from runner.track.tracker import store_of
from runner.track.upload import deliver

EXIT_FAILED, EXIT_USER_ERROR = 1, 2


@dataclass(frozen=True)
class SweepRequest:
    """What the preflight has found out about a sweep.

    `evaluation`: of its first job; `folder`: of a sweep that goes on, or for a new one.
    """

    command: tuple[str, ...]
    grid: Grid
    hydra: Any
    tracking: Tracking
    evaluation: Evaluation
    folder: Path
    started_at: float


def run_sweep(request: SweepRequest, run_jobs: Callable[[Sweep], None]) -> int:
    """Run all jobs that are missing; the exit code. `run_jobs`: hands them to Hydra's sweeper."""
    handle_signals()
    console = Console(highlight=False)
    together = at_once(request.hydra, request.grid.total)
    request.folder.mkdir(parents=True, exist_ok=True)
    with only_one(request.folder):
        close_books(request.folder)
        sweep, parent = _open(request, together)
        jobs = (
            "jobs as its sweeper draws them" if sweep.total is None else f"{sweep.total} job{'s' * (sweep.total != 1)}"
        )
        console.print(f"sweep [bold]{sweep.id}[/]: {jobs} over {escape(', '.join(sweep.varied) or 'nothing')}")
        status = FAILED
        try:
            with _overview(sweep, console):
                gave_up = _tolerantly(run_jobs, sweep)
            status = FAILED if gave_up else FINISHED
        except KeyboardInterrupt:
            status = KILLED
            console.print(f"to go on: the same command with [bold]{KEY}={sweep.id}[/]", soft_wrap=True)
            raise
        finally:
            if status != FINISHED and not sweep.in_process:
                console.print("waiting for the jobs to end")
            with signals_ignored():
                _close(sweep, parent, request.tracking, status)
    code = _report(sweep, console) or (EXIT_FAILED if gave_up else 0)
    _compare(sweep, request.tracking, console)
    if parent is not None:
        console.print("\n".join(parent.how_to_open(request.evaluation)), soft_wrap=True, markup=False)
    return code


def _compare(sweep: Sweep, tracking: Tracking, console: Console) -> None:
    """What the runs come to, in tables, plots and a report that lies beside them and with the parent run."""
    from runner.compare.command import compare

    folder = os.path.relpath(sweep.folder)
    store = ["--tracking-uri", tracking.uri] if tracking.uri else []
    console.print()
    try:
        compare([folder, "--out", str(free_folder(Path(folder) / "compare")), *store], console)
    except Exception as error:  # noqa: BLE001 - the jobs have come to what they have come to, with or without it
        again = f"python -m runner.compare {folder} repeats it"
        say(f"the comparison is not complete ({masked(first_line(error))}): {again}")


def _overview(sweep: Sweep, console: Console) -> contextlib.AbstractContextManager[object]:
    """Jobs in this process show their own progress; for those elsewhere somebody has to look."""
    if sweep.in_process:
        return contextlib.nullcontext()
    return Background("overview", Overview(sweep, console).follow)


def _tolerantly(run_jobs: Callable[[Sweep], None], sweep: Sweep) -> bool:
    """Hydra raises the error of the first failed job after the last one; the jobs' folders tell them all.

    Whether a sweeper that draws its jobs has ended before it had drawn them all, which no folder tells.
    """
    folder = Path(sweep.folder)
    try:
        run_jobs(sweep)
    except Exception as error:
        begun = [state for state in attempts(folder) if state.started_at >= sweep.started_at]
        if not begun:
            raise  # it is the sweeper or the launcher that cannot begin
        wait_for([state.folder for state in begun])  # a launcher may give up at one job while others still run
        close_books(folder)
        if not any(state.status == FAILED for state in _states(sweep)):
            say(f"the sweep did not come to its end: {first_line(error)}")
            return sweep.jobs is None
    return False


def _states(sweep: Sweep) -> list[JobState]:
    return latest(attempts(Path(sweep.folder)), sweep.jobs)


def _open(request: SweepRequest, together: int) -> tuple[Sweep, ParentRun | None]:
    uri = store_of(request.tracking)
    grid = request.grid
    card = parent_card(request.tracking, request.folder, grid.varied)
    sweep = Sweep(
        folder=str(request.folder.absolute()),
        command=request.command,
        varied=grid.varied,
        jobs=grid.jobs,
        total=grid.total,
        at_once=together,
        in_process=in_process(request.hydra),
        key=card.key if uri is not None else None,
        started_at=request.started_at,
    )
    sweep.write()
    if uri is None:
        return sweep, None
    parent = ParentRun(card, sweep, uri)
    parent.open()
    return sweep, parent


def _close(sweep: Sweep, parent: ParentRun | None, tracking: Tracking, status: str) -> None:
    folder = Path(sweep.folder)
    if status != FINISHED and not sweep.in_process and (left := end_all([state.folder for state in attempts(folder)])):
        say(f"still running, until somebody ends them: {'; '.join(left)}")
    close_books(folder)
    if parent is None:
        return
    states = _states(sweep)
    failed = any(state.status != FINISHED for state in states) or len(states) < len(sweep.jobs or ())
    counts = {name: sum(state.status == name for state in states) for name in (FINISHED, FAILED, KILLED)}
    parent.settle(FAILED if status == FINISHED and failed else status, counts)
    try:
        parent.close()
        _close_runs(sweep, tracking)
    except Exception as error:  # noqa: BLE001 - database, network, disk: none of it may hide what the jobs came to
        say(
            f"MLflow has not taken everything ({short(error)}): python -m runner.track sync "
            f"{os.path.relpath(sweep.folder)} brings what is missing"
        )


def _close_runs(sweep: Sweep, tracking: Tracking) -> None:
    """Tell the store of jobs whose process was killed before it had done so: nobody else is left to do it."""
    uri = store_of(tracking)
    assert uri is not None
    for state in attempts(Path(sweep.folder)):
        if (state.folder / CARD_FILE).exists() and not is_held(state.folder):
            card = RunCard.read(state.folder)
            if card.store == masked(uri) and card.status is not None and not card.delivered:
                deliver(state.folder, uri)


def _report(sweep: Sweep, console: Console) -> int:
    """Say what the jobs came to; the exit code of the command."""
    states = _states(sweep)
    failed = [state for state in states if state.status != FINISHED]
    total = len(states) if sweep.jobs is None else len(sweep.jobs)  # a sweeper may draw the same job twice
    console.print()
    console.print(f"sweep [bold]{sweep.id}[/]: {escape(progress_line(states, total, sweep.at_once))}")
    if len(states) == total and not failed:
        return 0
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    never = f"{total - len(states)} never began" if len(states) < total else ""
    not_finished = ", ".join(part for part in (never, "failed:" if failed else "") if part)
    errors.print(f"[bold]{len(states) - len(failed)} of {total} jobs finished[/]; {not_finished}")
    for state in failed:
        errors.print(f"  {escape(state.shown)}: {escape(state.error or state.status)}")
    errors.print(f"to run them again: the same command with [bold]{KEY}={escape(sweep.id)}[/]")
    by_user = failed and all(state.user_error for state in failed) and not never
    return EXIT_USER_ERROR if by_user else EXIT_FAILED
