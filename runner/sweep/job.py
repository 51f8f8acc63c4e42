"""One job of a sweep: skipped if it was done before, marked if it fails, and never the end of the others."""

from __future__ import annotations

import contextlib
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
from runner.errors import UserError
from runner.folder.lock import held, is_held
from runner.launch.elastic import WorkerFailed, start_forkserver
from runner.launch.signals import handle_signals
from runner.plan.experiment import Experiment, prepare
from runner.run.job import run
from runner.run.summary import FAILED, Role, note_failure, objective, one_line
from runner.sweep.progress import line_of
from runner.sweep.states import also_known_as, attempts, finished_run, note_start, read_summary
from runner.sweep.sweep import Sweep, job_name, tags_of
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import RunCard, user_tags
from runner.track.secrets import masked
from runner.track.tracker import build_tracker, store_of


class JobInterrupted(Exception):
    """A job in a process of its own was ended from outside."""


def run_in_sweep(cfg: DictConfig, sweep: Sweep) -> float | None:
    """Run one job, in whatever process; its objective. Raises what went wrong, which Hydra keeps to itself."""
    register()
    handle_signals()
    if not sweep.in_process:
        start_forkserver()
    hydra = HydraConfig.get()
    overrides = list(hydra.overrides.task)
    folder = Path(hydra.runtime.output_dir)
    experiment: Experiment | None = None
    trouble: Exception | None = None
    try:
        experiment = prepare(settings(cfg))
        done = finished_run(Path(sweep.folder), experiment.setup_digest, experiment.config.seed)
        if done is not None:
            also_known_as(done, job_name(overrides))
            return objective(read_summary(done))
    except Exception as error:  # noqa: BLE001 - raised again below, where the job has a folder to say it in
        trouble = error
    with _output(free_folder(folder), sweep) as (folder, console), held(folder):
        varied = sweep.varied_by(overrides)
        shown = ", ".join(f"{key}={value}" for key, value in varied.items()) or "the job"
        started_at = time.time()
        note_start(folder, job_name(overrides), shown, started_at)
        console.rule(f"[bold]{escape(shown)}[/]")
        console.print(line_of(sweep), style="dim")
        role = Role(
            tags=tags_of(sweep, varied),
            varied=varied,
            parent_key=sweep.key,
            at_once=sweep.at_once,
            progress=lambda: line_of(sweep),
        )
        try:
            if experiment is None:
                assert trouble is not None
                raise trouble
            _check_wanted(sweep, folder, job_name(overrides))
            _announce(experiment, console)
            summary, _ = run(experiment, folder, started_at, console, role)
        except KeyboardInterrupt as error:
            if sweep.in_process:
                raise
            # Of a job elsewhere it is no more than one job that was ended; a launcher would take it for its own end.
            raise JobInterrupted("the job was interrupted") from error
        except Exception as error:
            _mark_failed(error, folder, tracking_of(cfg), role, shown)
            raise
        return objective(summary)


def _check_wanted(sweep: Sweep, folder: Path, name: str) -> None:
    """Refuse a job that a launcher starts too late, or a second time. Raises UserError."""
    if sweep.host == socket.gethostname() and not is_held(Path(sweep.folder)):
        raise UserError("the sweep was ended before this job began")
    for state in attempts(Path(sweep.folder)):
        if name in state.names and state.folder.resolve() != folder.resolve() and is_held(state.folder):
            raise UserError(f"the job is running already, in {state.folder}")


@contextlib.contextmanager
def _output(folder: Path, sweep: Sweep) -> Iterator[tuple[Path, Console]]:
    """A job's folder, and where it says what it does: jobs that run side by side would mix up their lines."""
    folder.mkdir(parents=True, exist_ok=True)
    if sweep.in_process:
        yield folder, Console(highlight=False)
        return
    with (folder / "console.log").open("w", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        yield folder, Console(highlight=False, file=file, width=120)


def free_folder(folder: Path) -> Path:
    """A folder for a job, or one beside it if something of an earlier attempt is in there."""
    free, number = folder, 1
    while free.exists() and any(free.iterdir()):
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _announce(experiment: Experiment, console: Console) -> None:
    """Say in a line what is run: many jobs follow each other."""
    if banner := experiment.placement.banner():
        console.print(banner)
    plan = experiment.plan
    console.print(
        f"{escape(experiment.setup_name)}: global batch {plan.global_batch}, learning rate {plan.lr:.4g}, "
        f"{plan.optimizer_steps:,} optimizer steps; {experiment.certificate.level} to one fp32 worker",
        soft_wrap=True,
    )


def _mark_failed(error: Exception, folder: Path, tracking: Tracking, role: Role, name: str) -> None:
    """Say it on the screen, in the job's folder, and in the tracking store even if no run was opened there."""
    note_failure(folder, error)
    if isinstance(error, (UserError, WorkerFailed)):
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        errors.print(f"[bold red]error:[/] {escape(masked(str(error)))}")
    else:
        sys.stderr.write(masked("".join(traceback.format_exception(error))))
    if (folder / CARD_FILE).exists():
        return
    store = store_of(tracking)
    card = RunCard(
        experiment=tracking.experiment,
        run_name=name,
        params=dict(role.varied),
        tags={**user_tags(), **role.tags},
        store=None if store is None else masked(store),
        parent_key=role.parent_key,
    )
    tracker = build_tracker(tracking, card, folder)
    tracker.tag("error", masked(one_line(error)))
    tracker.start()
    tracker.finish(FAILED)
