"""One run, from its settings to its finished folder, as the parent process sees it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape

from runner.backends.machine import threads_per_worker
from runner.config.arguments import RESUME, HydraOptions
from runner.config.compose import parsed
from runner.config.plain import to_plain
from runner.config.schema import Tracking
from runner.errors import Diverged, OutOfMemory, Preempted
from runner.folder.files import write_json, write_text
from runner.folder.lock import locked
from runner.folder.record import FAILED, FINISHED, KILLED, PREEMPTED, STOPPED, RunRecord, RunResult, status_of
from runner.launch.local import WorkerLost, launch
from runner.launch.signals import handle_signals, signals_ignored
from runner.launch.torchrun import ExternalWorld, belongs_to_this_torchrun
from runner.launch.worker import run_launched
from runner.log import LOG
from runner.plan.experiment import Experiment
from runner.plan.tables import brief_tables, certificate_table, plan_tables
from runner.run.context import RunContext
from runner.run.environment import FILE_NAME as ENVIRONMENT
from runner.run.environment import environments
from runner.run.finish import RunCloser, note_failure, one_line
from runner.run.preflight import busy_folder, prepare_run, refuse_used_folder
from runner.run.progress import progress_shown
from runner.run.report import print_sentence, report
from runner.run.resume import Resumption, prepare_resume, restarted, still_running
from runner.run.same_experiment import overrides_to_start_again, recorded_experiment, to_repeat
from runner.speed.run_numbers import Restarts
from runner.track.card import DIVERGED_TAG, card_of, continued
from runner.track.secrets import masked, without_credentials
from runner.track.tracker import build_tracker
from runner.train.checkpoint import saved_folders
from runner.train.job import Job


@dataclass(frozen=True)
class FinishedRun:
    """`how_to_open`: lines for people."""

    folder: Path
    record: RunRecord
    how_to_open: Sequence[str]

    @property
    def result(self) -> RunResult:
        """The measurements."""
        return self.record.result

    @property
    def summary(self) -> Mapping[str, Any]:
        """The content of `summary.json`."""
        return self.record.as_json()


def run_single(
    options: HydraOptions, started_at: float, console: Console, world: ExternalWorld | None = None
) -> FinishedRun | None:
    """Run the one job of a command. Raises UserError before a folder is made.

    `started_at`: when the command started. `world`: the processes that torchrun has started, if it has; None is
    returned if the run that they were to continue has finished.
    """
    identifier, overrides, resumed = options.resumed_run, options.overrides, None
    if identifier is None and world is not None and (earlier := _run_of_this_torchrun(overrides)) is not None:
        if status_of(earlier) == FINISHED:  # a worker was killed after that
            console.print(f"The run in {escape(str(earlier))} has finished.", soft_wrap=True)
            return None
        identifier, overrides = str(earlier), overrides_to_start_again(overrides, world.world_size)
    if identifier is not None:
        resumed = prepare_resume(identifier, overrides, options.config_dirs)
        experiment, folder = resumed.experiment, resumed.folder
    else:
        experiment, folder = prepare_run(options)
    repeated_settings = list(filter(to_repeat, options.overrides))
    handle_signals()
    with _lock(folder, used=resumed is not None):
        if resumed is not None:
            resumed.rewind(console)
        try:
            announce(experiment, console)
            train = train_locally if world is None else world.train
            finished = run(experiment, folder, RunContext(started_at, console), train, resumed)
        except BaseException as error:
            if isinstance(error, Exception):
                note_failure(folder, error)
            if (saved := saved_folders(folder)) or isinstance(error, KeyboardInterrupt):
                what = f"saved after step {int(saved[0].name.rpartition('-')[2]):,}" if saved else "nothing was saved"
                command = " ".join(map(quote, ["python", "-m", "runner", f"{RESUME}={folder}", *repeated_settings]))
                again = f"to {'resume' if saved else 'start again'}: {command}"
                console.print(escape(f"{what}; {again}"), soft_wrap=True)
            raise
    console.print("\n".join(finished.how_to_open), soft_wrap=True, markup=False)
    return finished


def _run_of_this_torchrun(overrides: Sequence[str]) -> Path | None:
    """The folder of the run that torchrun has started before, if a worker has failed or a host has come or gone."""
    folders = [path.parent for path in Path("outputs").glob("*/*/config.yaml")]
    folders += [Path(str(one.value())) for one in parsed(overrides) if one.key_or_group == "hydra.run.dir"]
    ours = (folder for folder in folders if belongs_to_this_torchrun(folder) and (folder / "config.yaml").exists())
    return next(ours, None)


def train_locally(job: Job) -> RunResult:
    """Train on workers that are started on this machine."""
    config = job.config
    grace_s = config.launch.grace_s if config.checkpoint.on_preemption else 0.0
    result: RunResult = launch(run_launched, job.as_json(), job.plan.world_size, grace_s)
    return result


def run(
    experiment: Experiment,
    folder: Path,
    context: RunContext,
    train: Callable[[Job], RunResult] = train_locally,
    resumption: Resumption | None = None,
) -> FinishedRun:
    """Train in `folder`. `resumption`: of the run in the folder, if it has one."""
    resumed, checkpoint = resumption is not None, resumption.saved if resumption is not None else None
    config, placement, sweep = experiment.config, experiment.placement, context.sweep
    _write_plan(experiment, folder)
    job = Job(
        # Workers need no tracker, and so no address with its credentials.
        config=dataclasses.replace(config, tracking=Tracking()),
        plan=experiment.plan,
        facts=experiment.facts,
        folder=folder.resolve(),
        device_type=placement.device_type,
        local_workers=placement.local_workers,
        threads=threads_per_worker(placement.local_workers * sweep.at_once, config.equivalence.threads),
        started_at=context.started_at,
        checkpoint=checkpoint.folder.resolve() if checkpoint is not None else None,
        experiment=recorded_experiment(config, experiment.plan),
        pause_after=math.ceil(sweep.until * experiment.plan.optimizer_steps) if sweep.until < 1 else None,
    )
    card = card_of(experiment, sweep.tags, sweep.parent_key, sweep.varied)
    if resumed:
        card = continued(card, folder)
    tracker = build_tracker(config.tracking, card, folder, resumed=resumed)
    training = _Training(experiment, job, train, context.console)
    status, result, failure = FAILED, None, None
    try:
        tracker.start()
        with progress_shown(folder, experiment, context.console, sweep.progress):
            result = training.run()
        status = STOPPED if job.pauses_after(result.optimizer_steps or 0) else FINISHED
    except Preempted:
        status = PREEMPTED
        raise
    except KeyboardInterrupt:
        status = KILLED
        raise
    except Exception as error:
        failure = error
        raise
    finally:
        with signals_ignored():
            closer = RunCloser(training.experiment, folder, context, tracker, training.restarts)
            record = _close(closer, status, result, failure)
    assert record is not None
    report(record, training.experiment, folder, context.console)
    return FinishedRun(folder, record, tracker.how_to_open())


class _Training:
    """Trains, and starts the workers again from the newest checkpoint when one was lost or had too little memory."""

    def __init__(self, experiment: Experiment, job: Job, train: Callable[[Job], RunResult], console: Console) -> None:
        self.experiment, self.restarts = experiment, Restarts()
        self._job, self._train, self._console = job, train, console
        self._lost = 0

    def run(self) -> RunResult:
        """Raises WorkerLost when `launch.max_restarts` is used up, OutOfMemory if micro-batches cannot be smaller."""
        while True:
            try:
                return self._train(self._job)
            except OutOfMemory as error:
                plan = self.experiment.plan
                steps = error.accumulation_steps or plan.accumulation_steps
                if (instead := self._instead_of_smaller_micro_batches(steps)) is not None:
                    raise OutOfMemory(f"{one_line(error)}: use {instead}") from error
                self._start_again(error, least_accumulation=min(2 * steps, plan.replica_batch))
            except WorkerLost as error:
                if self._lost == self.experiment.config.launch.max_restarts:
                    raise
                self._lost += 1
                self._start_again(error)

    def _instead_of_smaller_micro_batches(self, accumulation_steps: int) -> str | None:
        """The remedy if more than `accumulation_steps` of them are impossible; None if they are possible."""
        plan = self.experiment.plan
        if plan.shards is not None:
            return "more equivalence.shards, which are its micro-batches, or equivalence=exact"
        if accumulation_steps == plan.replica_batch:
            return "gradient_checkpointing=true, precision=bf16, sharding=fsdp or a smaller model"
        return None if self._train is train_locally else "a larger accumulation.steps"

    def _start_again(self, error: OutOfMemory | WorkerLost, least_accumulation: int = 1) -> None:
        resumption = restarted(self.experiment, self._job.folder, least_accumulation)
        self.experiment, saved = resumption.experiment, resumption.saved
        plan, most = self.experiment.plan, self.experiment.config.launch.max_restarts
        smaller = f" with micro-batches of {plan.micro_batch}" if isinstance(error, OutOfMemory) else ""
        text = f"{one_line(error)}: starting again{smaller or f' (restart {self._lost} of {most})'}"
        self._console.print(f"[bold yellow]warning:[/] {escape(text)}", soft_wrap=True)
        resumption.rewind(self._console)
        write_json(self._job.folder / "plan.json", plan.as_json())
        write_json(self._job.folder / "certificate.json", self.experiment.certificate.as_json())
        checkpoint = saved.folder.resolve() if saved is not None else None
        began, now = self._job.started_at, time.time()
        kept_until = began if saved is None else max(began, saved.written_at)
        again = f"started again from step {saved.step if saved is not None else 0:,}"
        self.restarts = Restarts(
            (*self.restarts.sentences, f"{one_line(error)}; {again}{smaller}"),
            self.restarts.earlier_s + now - began,
            self.restarts.lost_s + max(now - kept_until, 0.0),
        )
        self._job = dataclasses.replace(self._job, plan=plan, checkpoint=checkpoint, started_at=now)


def _close(closer: RunCloser, status: str, result: RunResult | None, failure: Exception | None) -> RunRecord | None:
    """Record the end of a run in its folder and in the tracking store; None if a failed run's folder takes nothing.

    The store is told even then: it would show the run as running for ever.
    """
    record = None
    try:
        record = closer.close(status, result, failure)
    except Exception as error:
        if status != FINISHED:  # how training ended is the reason that counts
            LOG.warning(one_line(error))
        else:
            status, failure = FAILED, error
            raise
    finally:
        if failure is not None:
            closer.tracker.tag("error", masked(one_line(failure)))
            if isinstance(failure, Diverged):
                closer.tracker.tag(DIVERGED_TAG, "true")
        closer.tracker.finish(status)
    return record


@contextlib.contextmanager
def _lock(folder: Path, used: bool) -> Iterator[None]:
    """Make and lock a run's folder. Raises UserError, and leaves the folder alone, if another run uses it.

    `used`: it holds the run that is resumed.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError:
            raise (still_running(folder) if used else busy_folder(folder)) from None
        if not used:
            refuse_used_folder(folder)
        yield


def _write_plan(experiment: Experiment, folder: Path) -> None:
    plain = without_credentials(to_plain(experiment.config))
    write_json(folder / "plan.json", experiment.plan.as_json())
    write_json(folder / "certificate.json", experiment.certificate.as_json())
    write_json(folder / ENVIRONMENT, environments(folder, experiment.config, experiment.history.began_after))
    # Last: it makes the folder one of a run, which can be resumed.
    write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain)))


def announce(experiment: Experiment, console: Console, brief: str | None = None) -> None:
    """Print what will be run; `brief`: in place of the plan in ten lines, unless `verbose=true`."""
    if banner := experiment.placement.banner():
        console.print(banner)
    for note in experiment.notes:
        print_sentence(console, f"[bold yellow]note:[/] {escape(note)}")
    if experiment.config.verbose:
        console.print(plan_tables(experiment))
        console.print(certificate_table(experiment.certificate))
    elif brief is not None:
        print_sentence(console, brief)
    else:
        console.print(brief_tables(experiment))
