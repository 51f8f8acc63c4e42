"""One job of a sweep: skipped if it has finished before; if it fails, the other jobs still run."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape

from runner.config.compose import register, settings, tracking_of
from runner.config.schema import Tracking
from runner.data.cache import silent
from runner.errors import RunFailed, Terminal, UserError, printable
from runner.folder.lock import is_locked, locked
from runner.folder.record import FAILED, RunRecord
from runner.launch.local import WorkerFailed, start_forkserver
from runner.launch.signals import handle_signals, requests
from runner.log import LOG
from runner.measure.fitting import with_fitting_micro_batches
from runner.measure.store import threads_of
from runner.plan.experiment import Experiment, prepare
from runner.run.context import RunContext, SweepContext
from runner.run.finish import note_failure, one_line
from runner.run.job import announce, run
from runner.run.resume import Resumption, continuation
from runner.tools.sweep.progress import sweep_progress
from runner.tools.sweep.slots import CORE, needed, taken
from runner.tools.sweep.sweep import Rung, Sweep, attempts, finished_run, job_name, note_wanted, write_job
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord, user_tags
from runner.track.names import setting_labels
from runner.track.secrets import masked
from runner.track.store import store_of
from runner.track.tracker import build_tracker


class JobInterrupted(Exception):
    """A job in a separate process was ended from outside."""


def run_in_sweep(cfg: DictConfig, sweep: Sweep) -> float | None:
    """Run one job, in any process; its objective. Raises the job's error, which Hydra raises after the last job."""
    register()
    handle_signals()
    requests.raise_pending()  # the job before was just finished when the sweep was asked to end
    if not sweep.in_process:
        start_forkserver(several_jobs=True)
    try:
        with contextlib.ExitStack() as slots:
            return _run(cfg, sweep, slots)
    except KeyboardInterrupt as error:
        if sweep.in_process:
            raise
        # Only this job was interrupted; the launcher would end itself on a KeyboardInterrupt.
        raise JobInterrupted("the job was interrupted") from error


def _run(cfg: DictConfig, sweep: Sweep, slots: contextlib.ExitStack) -> float | None:
    """`slots`: holds the devices that the job takes."""
    hydra = HydraConfig.get()
    overrides, devices = list(hydra.overrides.task), ""
    experiment: Experiment | None = None
    invalid: Exception | None = None
    rung = Rung.read(Path(sweep.folder))
    try:
        labels, typed = setting_labels(overrides, sweep.varied)
        experiment = prepare(settings(cfg), varied=labels, typed=typed)
        finished = finished_run(Path(sweep.folder), experiment.job_digest, rung.until)
        if finished is not None:
            note_wanted(finished, job_name(overrides))
            record = RunRecord.read(finished)
            return None if record is None else record.objective
        if sweep.divides_machine:
            own = needed(experiment.placement, threads_of(experiment, sweep.at_once))
            names = slots.enter_context(taken(own, Path(sweep.folder)))
            if own.kind != CORE:
                devices = f"; on {own.kind} {', '.join(names)}"
        experiment = with_fitting_micro_batches(
            experiment, time.monotonic(), silent, LOG.info, jobs_at_once=sweep.at_once
        )
    except Exception as error:  # noqa: BLE001 - raised below, once the job has a folder to report it in
        invalid = error
    resumed = None if experiment is None or invalid is not None else _interrupted(Path(sweep.folder), experiment)
    own_folder = resumed.folder if resumed is not None else free_folder(Path(hydra.runtime.output_dir))
    with _output(own_folder, sweep) as (folder, console), locked(folder):
        varied = sweep.varied_by(overrides)
        shown = ", ".join(f"{key}={value}" for key, value in varied.items()) or "the job"
        started_at = time.time()
        write_job(folder, job_name(overrides), shown, started_at, experiment.job_digest if experiment else None)
        console.rule(f"[bold]{escape(shown)}[/]")
        console.print(f"{sweep_progress(sweep)}{devices}", style="dim", markup=False)
        place = SweepContext(
            tags={"sweep.id": sweep.id, **{f"varied.{key}": value for key, value in varied.items()}},
            varied=varied,
            parent_key=sweep.key,
            at_once=sweep.at_once,
            design=None if sweep.design is None else dataclasses.asdict(sweep.design),
            until=rung.until,
            raced=rung.setups,
            progress=lambda: sweep_progress(sweep),
        )
        try:
            if invalid is not None:
                raise invalid
            assert experiment is not None
            _check_not_obsolete(sweep, folder, job_name(overrides))
            if resumed is not None:
                resumed.rewind(console)
                experiment = resumed.experiment
            announce(experiment, console, _in_one_line(experiment))
            context = RunContext(started_at, console, place)
            record = run(experiment, folder, context, resumption=resumed).record
        except Exception as error:
            _mark_failed(error, folder, tracking_of(cfg), place, shown)
            raise
        return record.objective


def _interrupted(sweep_folder: Path, experiment: Experiment) -> Resumption | None:
    """The latest attempt at this job that was interrupted and has a checkpoint."""
    own = [state.folder for state in attempts(sweep_folder) if state.digest == experiment.job_digest]
    found = (continuation(folder, experiment) for folder in reversed(own))
    return next((resumed for resumed in found if resumed is not None), None)


def _check_not_obsolete(sweep: Sweep, folder: Path, name: str) -> None:
    """Refuse a job that a launcher starts after the sweep has ended, or a second time. Raises UserError."""
    if sweep.host == socket.gethostname() and not is_locked(Path(sweep.folder)):
        raise UserError("the sweep had ended before this job started")
    for state in attempts(Path(sweep.folder)):
        if name in state.names and state.folder.resolve() != folder.resolve() and is_locked(state.folder):
            raise UserError(f"the job is already running, in {state.folder}")


@contextlib.contextmanager
def _output(folder: Path, sweep: Sweep) -> Iterator[tuple[Path, Console]]:
    """A job's folder and console. Jobs in separate processes write to `console.log`: their lines would be mixed."""
    folder.mkdir(parents=True, exist_ok=True)
    if sweep.in_process:
        yield folder, Terminal(highlight=False)
        return
    with (folder / "console.log").open("a", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        yield folder, Terminal(highlight=False, file=file, width=120)


def free_folder(folder: Path) -> Path:
    """`folder`, or with a number appended if it contains files of an earlier attempt."""
    free, number = folder, 1
    while free.exists() and any(free.iterdir()):
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _in_one_line(experiment: Experiment) -> str:
    """What a job prints where a single run prints ten lines."""
    plan = experiment.plan
    scaled = f" ({plan.base_lr:.4g} × {plan.lr_factor:.4g})" if plan.lr_factor != 1 else ""
    return (
        f"{escape(experiment.setup_name)}: global batch {plan.global_batch}, learning rate {plan.lr:.4g}{scaled}, "
        f"{plan.optimizer_steps:,} optimizer steps; {experiment.certificate.level} to one fp32 worker"
    )


def _mark_failed(error: Exception, folder: Path, tracking: Tracking, place: SweepContext, name: str) -> None:
    """Report the error on the terminal, in the job's folder, and in the tracking store even if it has no run yet."""
    note_failure(folder, error)
    if isinstance(error, (UserError, RunFailed, WorkerFailed)):
        errors = Terminal(stderr=True, highlight=False, soft_wrap=True)
        errors.print(f"[bold red]error:[/] {escape(masked(str(error)))}")
    else:
        sys.stderr.write(printable(masked("".join(traceback.format_exception(error)))))
    if (folder / CARD_FILE).exists():
        return
    store = store_of(tracking)
    card = TrackingRecord(
        experiment=tracking.experiment,
        run_name=name,
        params=dict(place.varied),
        tags={**user_tags(), **place.tags},
        store=None if store is None else masked(store),
        parent_key=place.parent_key,
    )
    tracker = build_tracker(tracking, card, folder)
    tracker.tag("error", masked(one_line(error)))
    tracker.start()
    tracker.finish(FAILED)
