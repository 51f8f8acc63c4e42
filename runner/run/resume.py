"""Continue an interrupted run from its newest checkpoint, in its own folder and its own MLflow run.

The run's `config.yaml` and `plan.json` are the source, not `conf/`. The command can change what executes the run, and
nothing that belongs to the experiment.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from runner.config.arguments import RESUME, key_of
from runner.config.compose import compose, settings
from runner.config.schema import Config, Tracking
from runner.errors import UserError, require
from runner.folder.files import check_folder
from runner.folder.lock import is_locked
from runner.folder.metrics_log import cut_metrics, damage_of_metrics
from runner.folder.phase_progress import FILE_NAME as PROGRESS_FILE
from runner.folder.reading import files_below
from runner.folder.record import FINISHED, status_of
from runner.log import LOG
from runner.measure.fitting import with_fitting_micro_batches
from runner.plan import Plan
from runner.plan.checks import check_profile
from runner.plan.describe_sync import sync_name
from runner.plan.experiment import Experiment, prepare_resumed
from runner.plan.history import PROCESSOR
from runner.run.earlier import certificate_of_run, find_run, plan_of_run, saved_settings
from runner.run.environment import FILE_NAME as ENVIRONMENT
from runner.run.environment import earlier_environments
from runner.run.preflight import reading_data
from runner.run.same_experiment import (
    GIVEN,
    GROUPS,
    SETTINGS,
    first_difference,
    may_change,
    recorded_experiment,
)
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord
from runner.track.secrets import masked, masked_keys
from runner.track.store import check_tracking, how_to_sync, store_for
from runner.train.checkpoint import Saved, newest, remove_drafts, set_aside, sync_digest
from runner.train.identity import CODE_PREFIX, code_of


@dataclass(frozen=True)
class Resumption:
    """A run that can be continued. `saved`: None if it had saved nothing, so that it starts from step 0.

    `damaged`: newer checkpoints that cannot be used, and why.
    """

    experiment: Experiment
    folder: Path
    saved: Saved | None
    damaged: dict[Path, str]

    def rewind(self, console: Console) -> None:
        """Set the folder, which is locked, back to the checkpoint. Each change can be made again after a crash."""
        _refuse_ended(self.folder)  # now that no other process can end it
        warnings = []
        for name, problem in _damaged_records(self.folder, self.experiment.config.tracking).items():
            (self.folder / name).rename(self.folder / f"damaged-{name}")
            warnings.append(f"{problem}: the run begins another")
        for folder, problem in self.damaged.items():
            set_aside(folder)
            warnings.append(f"{folder.name} is damaged ({problem}) and is left out")
        for warning in warnings:
            console.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
        if self.saved is None:
            console.print(f"Resuming {escape(str(self.folder))}, which had saved no checkpoint, from step 0.")
        else:
            workers = f"{self.saved.workers} worker{'s' * (self.saved.workers != 1)}"
            step = f"{self.saved.step:,}"
            console.print(f"Resuming {escape(str(self.folder))} after step {step}, which {workers} had saved.")
        for name in ("summary.json", "ledger.json", PROGRESS_FILE):  # of the end that it had
            (self.folder / name).unlink(missing_ok=True)
        remove_drafts(self.folder)
        if (damage := damage_of_metrics(self.folder)) is not None:
            console.print(f"[bold yellow]warning:[/] {damage}", soft_wrap=True)
        cut_metrics(self.folder, self.saved.step if self.saved is not None else 0)


def prepare_resume(identifier: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> Resumption:
    """Find the run and check that it can continue, without changing anything. Raises UserError."""
    started, folder = time.monotonic(), find_run(identifier, Path("outputs"))
    files_below(folder)  # refuses links: the run would write through them
    if is_locked(folder):
        raise still_running(folder)
    _refuse_ended(folder)
    saved, damaged = newest(folder)
    if saved is None and damaged:
        why = "; ".join(f"{path.name} is damaged: {problem}" for path, problem in damaged.items())
        raise UserError(f"{RESUME}={folder} has no complete checkpoint ({why}): start a new run")
    config = _settings(folder, overrides, config_dirs)
    check_folder("cache_dir", config.cache_dir)
    plan = plan_of_run(folder)
    if saved is not None:
        _refuse_other_experiment(saved, config, plan)  # before the data are read
    changed = any(key_of(override).startswith("accumulation") for override in overrides)
    if not changed:
        plan = plan.on_workers(plan.world_size, _accumulation_steps(plan, saved), plan.k)
    with reading_data() as progress:
        experiment = prepare_resumed(config, plan, changed, progress)
        if changed:
            experiment = with_fitting_micro_batches(experiment, started, progress, LOG.info)
    if saved is not None:
        check_profile(config, plan, saved.step)
    check_tracking(config.tracking)
    return _resumption(experiment, folder, saved, damaged)


def continuation(folder: Path, experiment: Experiment) -> Resumption | None:
    """The unfinished run of this experiment in `folder`, if it has a checkpoint to continue from. Raises UserError."""
    files_below(folder)  # refuses links: the run would write through them
    if status_of(folder) == FINISHED or is_locked(folder):
        return None
    saved, damaged = newest(folder)
    return None if saved is None else _resumption(_with_less_memory(experiment, saved), folder, saved, damaged)


def restarted(experiment: Experiment, folder: Path, least_accumulation: int = 1) -> Resumption:
    """The run in `folder`, which has just lost a worker. Raises UserError if all its checkpoints are damaged.

    `least_accumulation`: micro-batches in a step of each worker, at least.
    """
    saved, damaged = newest(folder)
    if saved is None and damaged:
        raise UserError(f"{folder} has no complete checkpoint to start again from")
    smaller = _with_less_memory(experiment, saved, least_accumulation)
    if saved is None and smaller is not experiment:
        smaller = smaller.resumed_after(experiment.certificate.segments, 0)
    return _resumption(smaller, folder, saved, damaged)


def _resumption(experiment: Experiment, folder: Path, saved: Saved | None, damaged: dict[Path, str]) -> Resumption:
    """`experiment` as it continues after the checkpoint. Raises UserError if the checkpoint does not fit."""
    if saved is not None:
        _refuse_other_experiment(saved, experiment.config, experiment.plan)
        _refuse_other_data_or_workers(saved, experiment)
        earlier = certificate_of_run(folder).segments
        experiment = experiment.resumed_after(earlier, saved.step, _changes(experiment, saved))
    return Resumption(experiment, folder, saved, damaged)


def _with_less_memory(experiment: Experiment, saved: Saved | None, least: int = 1) -> Experiment:
    """With the micro-batches that the workers of a checkpoint needed; at least `least` of them in a step."""
    steps = max(_accumulation_steps(experiment.plan, saved), least)
    return experiment if steps == experiment.plan.accumulation_steps else experiment.with_accumulation_steps(steps)


def _accumulation_steps(plan: Plan, saved: Saved | None) -> int:
    """The planned number, or as many as the workers of a checkpoint already needed for lack of memory."""
    if saved is None or saved.workers != plan.world_size:
        return plan.accumulation_steps
    return max(plan.accumulation_steps, saved.accumulation_steps)


def still_running(folder: Path) -> UserError:
    return UserError(f"{RESUME}={folder} is still running: wait for it, or end it first")


def _refuse_ended(folder: Path) -> None:
    if status_of(folder) == FINISHED:
        known = TrackingRecord.read(folder) if (folder / CARD_FILE).exists() else None
        store = known.store if known is not None and not known.delivered else None
        to_send = "" if store is None else f"; {how_to_sync(folder, store)} sends what its tracking store is missing"
        raise UserError(f"{RESUME}={folder} has finished: there is nothing to resume{to_send}")


def _damaged_records(folder: Path, tracking: Tracking) -> dict[str, str]:
    """Damage of files without which a run can continue, by name. Raises UserError for one that it needs."""
    damaged = {}
    for name, read in ((ENVIRONMENT, earlier_environments), (CARD_FILE, TrackingRecord.read)):
        try:
            if (folder / name).exists():
                read(folder)
        except UserError as error:
            if name == CARD_FILE and tracking.mlflow:
                rule = f"restore it, or add tracking=none; without {name} the run is logged as a new one"
                raise UserError(f"{RESUME}={folder}: {error}: {rule}") from error
            damaged[name] = str(error)
    return damaged


def _settings(folder: Path, overrides: Sequence[str], config_dirs: Sequence[str]) -> Config:
    """The run's settings with the command's changes. Raises UserError for those that change the experiment."""
    saved, trusted = saved_settings(folder)
    secret = set(masked_keys(saved))
    for override in overrides:
        if not may_change(override) and key_of(override) not in secret:
            raise UserError(
                f"{override} is not possible with {RESUME}={folder}: a resumed run is the same experiment, "
                f"and can change only how the run is executed, logged and saved: {', '.join((*GROUPS, *SETTINGS))} "
                f"(but not {' and '.join(GIVEN)}); leave it out, or start a new run"
            )
    if withheld := sorted(secret.difference(map(key_of, overrides))):
        raise UserError(f"{RESUME}={folder} was saved without the value of {withheld[0]}: add {withheld[0]}=VALUE")
    config = settings(compose(overrides, config_dirs, saved))
    if missing := sorted(set(trusted) - set(config.trusted_packages)):
        raise UserError(
            f"trusted_packages does not have {', '.join(missing)}, which the run had: add "
            f"trusted_packages=[{','.join(trusted)}] to the command if you trust that code"
        )
    if config.equivalence.is_identical:
        before = (saved["device"].get("length_buckets"), saved["evaluation"]["micro_batch"])
        names = ("device.length_buckets", "evaluation.micro_batch")
        now = (config.device.length_buckets, config.evaluation.micro_batch)
        for name, old, new in zip(names, before, now, strict=True):
            require(new == old, name, new, f"the run has {old}, and other bits with another value")
    _damaged_records(folder, config.tracking)
    if not config.tracking.mlflow:
        return config
    recorded = TrackingRecord.read(folder).store if (folder / CARD_FILE).exists() else None
    uri = store_for(recorded, folder, config.tracking.uri, "tracking.uri")
    return dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, uri=uri))


def _refuse_other_experiment(saved: Saved, config: Config, plan: Plan) -> None:
    """Raises UserError if settings or plan have changed."""
    found = first_difference(saved.identity["experiment"], recorded_experiment(config, plan))
    if found is not None:
        file = saved.folder.parents[1] / {"settings": "config.yaml", "plan": "plan.json"}[found[0]]
        raise UserError(f"{file} does not fit {saved.folder.name}: {found[1]}; restore it, or start a new run")


def _refuse_other_data_or_workers(saved: Saved, experiment: Experiment) -> None:
    """Refuse other data, and workers that cannot take over. Raises UserError."""
    if experiment.facts.digest != saved.identity["data"]:
        raise UserError(
            f"{RESUME}={saved.folder.parents[1]} is invalid: the data ({masked(experiment.facts.source)}) changed "
            "after the run was started; restore them, or start a new run"
        )
    workers = experiment.plan.world_size
    why = "had different weights when they were saved (sync.overlap, sync.fragments or sync.policy=gradients)"
    if workers != saved.workers and not saved.for_any_workers:
        raise UserError(
            f"device.workers={workers} is invalid: the run's {saved.workers} workers {why}; use {saved.workers}"
        )
    config = experiment.config
    if sync_digest(config.sync, config.sharding) != saved.identity["sync"] and not saved.for_any_workers:
        raise UserError(f"sync={sync_name(config.sync)} is invalid: the run's workers {why}; leave it out")


def _changes(experiment: Experiment, saved: Saved) -> tuple[str, ...]:
    """Other changes since the checkpoint was saved: libraries, processor, runner, modules of the recipe."""
    setup = experiment.setup
    processor = {PROCESSOR: setup.processor} if experiment.config.equivalence.is_identical else {}
    old, new = saved.identity, {**setup.versions, **processor, **code_of(experiment.config)}
    names = [name for name in new if old.get(name, new[name]) != new[name]]
    if any(name.startswith(CODE_PREFIX) for name in old):  # modules can come and go
        names += [name for name in (*new, *old) if name.startswith(CODE_PREFIX) and (name in new) != (name in old)]
    return tuple(name if name.startswith(CODE_PREFIX) else f"{name} {old[name]} → {new[name]}" for name in names)
