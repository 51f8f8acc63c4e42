"""A sweep from its command to its exit code: opened, run by Hydra, closed, compared."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.markup import escape

from runner.config.arguments import HydraOptions
from runner.config.compose import hydra_quoted
from runner.config.hydra_main import hydra_main
from runner.config.schema import Decide, Evaluation, Tracking
from runner.errors import Terminal, first_line
from runner.folder.lock import terminate_all, wait_until_unlocked
from runner.folder.record import FAILED, FINISHED, KILLED, PREEMPTED, STOPPED
from runner.launch.signals import EXIT_PREEMPTED, handle_signals, signals_ignored
from runner.log import LOG
from runner.measure.tables import seconds_words
from runner.run.progress import Background
from runner.tools.compare.design import Design
from runner.tools.sweep.grid import Grid, Launcher, without_hydra
from runner.tools.sweep.job import free_folder, run_in_sweep
from runner.tools.sweep.parent_run import ParentRun, parent_card
from runner.tools.sweep.progress import monitor_jobs, progress_line
from runner.tools.sweep.race import Race
from runner.tools.sweep.resume import KEY, mark_killed_jobs, sweep_lock
from runner.tools.sweep.rounds import SeedsUntilDecided, run_rounds
from runner.tools.sweep.rungs import share_trained
from runner.tools.sweep.slots import in_use
from runner.tools.sweep.sweep import FILE_NAME as SWEEP_FILE
from runner.tools.sweep.sweep import Overrides, Sweep, attempts, check_same_question, setup_of
from runner.track.store import error_summary, how_to_sync, store_of
from runner.track.tracker import how_to_open_jobs

EXIT_FAILED, EXIT_USER_ERROR = 1, 2


@dataclass(frozen=True)
class SweepRequest:
    """A sweep after its preflight. `evaluation`: of its first job; `folder`: of a resumed sweep, or for a new one.

    `predicted_s`: of all jobs, with `seed=auto` of one seed; None if one of them was not measured, or some have
    finished. `decide`: of a sweep that adds seeds, or races. `setups`: with `seed=auto`, the overrides to which its
    sweeper adds seeds.
    """

    command: tuple[str, ...]
    grid: Grid
    launcher: Launcher
    tracking: Tracking
    evaluation: Evaluation
    recipe: str
    folder: Path
    started_at: float
    predicted_s: float | None = None
    decide: Decide | None = None
    setups: tuple[Overrides, ...] = ()

    @property
    def design(self) -> Design | None:
        if self.decide is None or not self.setups:
            return None
        return Design(self.decide.min_seeds, self.decide.max_seeds, len(self.setups) - 1)

    @property
    def asked(self) -> dict[str, Any] | None:
        """What the verdicts of a sweep that adds seeds depend on, besides its design, or a race, as JSON has it."""
        if self.decide is None:
            return None
        setups = sorted(" ".join(setup) for setup in self.setups) or sorted(self.grid.jobs or ())
        asked = {"margin": self.decide.margin, "baseline": self.decide.baseline, "race": self.decide.race}
        return {**asked, "metric": self.evaluation.metric, "setups": setups}


def run_sweep(request: SweepRequest, options: HydraOptions) -> int:
    """Run all jobs that are not finished; the exit code. `options`: of the command, for Hydra's sweeper."""
    handle_signals()
    console = Terminal(highlight=False)
    with sweep_lock(request.folder):
        mark_killed_jobs(request.folder)
        sweep, parent = _open(request)
        over = escape(", ".join(sweep.varied) or "nothing")
        smallest, at_once = request.launcher.smallest_job, request.launcher.at_once
        together = "" if smallest is None or at_once == 1 else f"; {at_once} at a time, which share {smallest}"
        console.print(f"sweep [bold]{escape(sweep.id)}[/]: {_number_of_jobs(request)} over {over}{together}")
        for line in _plan(request):
            console.print(line, soft_wrap=True)
        if smallest is not None and (used := in_use(smallest)):
            console.print(f"in use by another sweep: {smallest.kind} {', '.join(used)}; jobs wait for it", markup=False)
        status, complete = FAILED, False
        try:
            # Jobs in this process show their own progress.
            monitor = Background("jobs", functools.partial(monitor_jobs, sweep, console))
            with contextlib.nullcontext() if sweep.in_process else monitor:
                complete = _run_all(request, options, sweep, console)
            status = FINISHED if complete else FAILED
        except KeyboardInterrupt:
            status = KILLED
            console.print(f"to resume: the same command with [bold]{KEY}={escape(sweep.id)}[/]", soft_wrap=True)
            raise
        finally:
            if status != FINISHED and not sweep.in_process:
                console.print("waiting for the jobs to end")
            with signals_ignored():
                _close(sweep, parent, status)
    code = _report(sweep, console) or (0 if complete else EXIT_FAILED)
    _compare(sweep, request, console)
    if parent is not None:
        console.print("\n".join(parent.how_to_open()), soft_wrap=True, markup=False)
    for line in how_to_open_jobs(request.tracking, request.folder):
        console.print(line, soft_wrap=True, markup=False)
    return code


def _number_of_jobs(request: SweepRequest) -> str:
    total, setups = request.grid.total, len(request.setups)
    if (design := request.design) is not None:
        least, most = (setups * seeds for seeds in (design.min_seeds, design.max_seeds))
        return f"{least} to {most} jobs, until {setups} setups are decided,"
    return "jobs chosen by its sweeper" if total is None else f"{total} job{'s' * (total != 1)}"


def _plan(request: SweepRequest) -> list[str]:
    """What is predicted before the first job, in lines."""
    seconds = request.predicted_s
    if (design := request.design) is not None:
        setups = len(request.setups)
        parts = [("at least", float(design.min_seeds)), ("at most", float(design.max_seeds))]
        for what, truth in (("without a difference", 0.0), ("with one of the margin", 1.0)):
            parts.insert(-1, (f"{what} about", design.expected_seeds(truth)))
        words = [f"{what} {round(setups * seeds)} jobs{_time(seconds, seeds)}" for what, seeds in parts]
        return [f"{', '.join(words)}; expected where differences between pairs of runs spread as much as the margin"]
    if request.decide is not None:
        setups = len({setup_of(without_hydra(job)) for job in (request.grid.overrides or {}).values()})
        shares = [("at least", share_trained(setups, 0.0)), ("about", share_trained(setups, 1.0)), ("at most", 1.0)]
        words = [f"{what} {100 * share:.0f}%{_time(seconds, share)}" for what, share in shares]
        return [f"of their training a race takes {', '.join(words)}"]
    if seconds is None:
        return []
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + seconds))
    return [f"predicted: {seconds_words(seconds)} for all of them, until {end}"]


def _time(seconds: float | None, times: float) -> str:
    return "" if seconds is None else f" ({seconds_words(seconds * times)})"


def _open(request: SweepRequest) -> tuple[Sweep, ParentRun | None]:
    if (request.folder / SWEEP_FILE).exists():
        check_same_question(request.folder, request.design, request.asked)
    uri = store_of(request.tracking)
    grid = request.grid
    card = parent_card(request.tracking, request.folder, request.recipe, grid.varied, request.evaluation.metric)
    sweep = Sweep(
        folder=str(request.folder.absolute()),
        command=request.command,
        varied=grid.varied,
        jobs=grid.jobs,
        total=grid.total,
        at_once=request.launcher.at_once,
        in_process=request.launcher.in_process,
        divides_machine=request.launcher.smallest_job is not None,
        key=card.key if uri is not None else None,
        started_at=request.started_at,
        design=request.design,
        asked=request.asked,
    )
    sweep.write()
    if uri is None:
        return sweep, None
    parent = ParentRun(card, sweep, uri, request.evaluation)
    parent.open()
    return sweep, parent


def _run_jobs(request: SweepRequest, options: HydraOptions, sweep: Sweep, console: Console) -> None:
    """Let Hydra run the jobs of a sweep, with the options of its command."""
    # Hydra would derive the folder's name from the clock again.
    arguments = [*options.for_hydra, f"hydra.sweep.dir={hydra_quoted(sweep.folder)}", *request.launcher.overrides]
    job = functools.partial(run_in_sweep, sweep=sweep)
    if request.decide is None:
        hydra_main(arguments, job)
    elif request.decide.race:
        jobs = [tuple(without_hydra(one)) for one in (request.grid.overrides or {}).values()]
        run_rounds(Race(sweep, jobs, request.evaluation, console).rounds(), arguments, job)
    else:
        run_rounds(SeedsUntilDecided(sweep, request.setups, request.decide, console).rounds(), arguments, job)


def _run_all(request: SweepRequest, options: HydraOptions, sweep: Sweep, console: Console) -> bool:
    """Run the jobs; False if an optimizing sweeper stopped early, which the jobs' folders do not show.

    Hydra raises the error of the first failed job after the last job. It is ignored: the folders show which failed.
    """
    folder = Path(sweep.folder)
    try:
        _run_jobs(request, options, sweep, console)
    except Exception as error:
        started = [state for state in attempts(folder) if state.started_at >= sweep.started_at]
        if not started:
            raise  # the sweeper or the launcher failed
        wait_until_unlocked([state.folder for state in started])  # a launcher may raise while other jobs still run
        mark_killed_jobs(folder)
        if not any(state.status == FAILED for state in sweep.states()):
            LOG.warning(f"the sweep did not run to its end: {first_line(error)}")
            return sweep.jobs is not None
    return True


def _close(sweep: Sweep, parent: ParentRun | None, status: str) -> None:
    folder = Path(sweep.folder)
    if status != FINISHED and not sweep.in_process:
        running = terminate_all([state.folder for state in attempts(folder)])
        if running:
            LOG.warning(f"still running on other machines, end them yourself: {'; '.join(running)}")
    mark_killed_jobs(folder)
    for path in folder.iterdir():  # Hydra makes a folder for each launch of a job, also if it continues in another
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    if parent is None:
        return
    try:
        parent.close(status)
    except Exception as error:  # noqa: BLE001 - database, network, disk: the jobs' results matter more
        LOG.warning(
            f"MLflow did not receive everything ({error_summary(error)}): "
            f"{how_to_sync(Path(os.path.relpath(folder)), parent.uri)} sends what is missing"
        )


def _report(sweep: Sweep, console: Console) -> int:
    """Print how the jobs ended; the exit code."""
    states = sweep.states()
    failed = [state for state in states if state.status not in (FINISHED, STOPPED)]
    total = len(states) if sweep.jobs is None else len(sweep.jobs)  # an optimizing sweeper may repeat a job
    not_started = total - len(states)
    console.print()
    console.print(f"sweep [bold]{escape(sweep.id)}[/]: {escape(progress_line(states, total, sweep.at_once))}")
    if not not_started and not failed:
        return 0
    errors = Terminal(stderr=True, highlight=False, soft_wrap=True)
    parts = [*([f"{not_started} did not start"] if not_started else []), *(["failed:"] if failed else [])]
    errors.print(f"[bold]{len(states) - len(failed)} of {total} jobs finished[/]; {', '.join(parts)}")
    for state in failed:
        errors.print(f"  {escape(state.shown)}: {escape(state.error or state.status)}")
    errors.print(f"to run them again: the same command with [bold]{KEY}={escape(sweep.id)}[/]")
    if failed and all(state.status == PREEMPTED for state in failed):
        return EXIT_PREEMPTED
    by_user = failed and all(state.user_error for state in failed) and not not_started
    return EXIT_USER_ERROR if by_user else EXIT_FAILED


def _compare(sweep: Sweep, request: SweepRequest, console: Console) -> None:
    """Compare the runs, with a report in the sweep's folder."""
    from runner.tools.compare.command import compare  # matplotlib and pandas take seconds to import

    folder = os.path.relpath(sweep.folder)
    decide = request.decide or Decide()
    given = {"tracking-uri": request.tracking.uri, "margin": decide.margin, "baseline": decide.baseline}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    console.print()
    try:
        compare([folder, "--out", str(free_folder(Path(folder) / "compare")), *options], console)
    except Exception as error:  # noqa: BLE001 - the exit code is that of the jobs
        repeat = f"python -m runner.compare {quote(folder)} repeats it"
        LOG.warning(f"the comparison is not complete ({first_line(error)}): {repeat}")
