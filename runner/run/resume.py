"""Continue an interrupted run from its newest checkpoint, in its own folder and its own MLflow run.

The run's `config.yaml` and `plan.json` are the source, not `conf/`. The command can change what executes the run, and
nothing that belongs to the experiment.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from runner.config.arguments import RESUME, HydraOptions
from runner.config.choices import TrackerName
from runner.config.compose import compose, parsed, settings
from runner.config.plain import from_plain
from runner.config.schema import Config, Tracking
from runner.errors import UserError, did_you_mean
from runner.folder.files import check_folder, started_ms
from runner.folder.lock import is_locked
from runner.folder.metrics_log import cut_metrics
from runner.plan import Plan
from runner.plan.certificate import Segment
from runner.plan.experiment import Experiment, prepare_resumed
from runner.run.earlier import folder_of_mlflow_run, read_json, saved_settings, summary_of_run
from runner.run.preflight import reading_data
from runner.run.summary import FINISHED
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import RunCard
from runner.track.secrets import masked
from runner.track.store import check_tracking
from runner.train.checkpoint import Saved, newest, remove_drafts, saved_folders

LATEST = "latest"

#: What a resumed run may change: how it is executed, logged and saved. Groups, settings, and settings of groups.
_GROUPS = ("device", "accumulation", "precision", "checkpoint", "tracking")
_SETTINGS = (
    *("log_every", "verbose", "compile", "gradient_checkpointing", "evaluation.micro_batch"),
    *("nonfinite_steps", "cache_dir", "trusted_packages"),
)


@dataclass(frozen=True)
class Resumption:
    """A run that can be continued. `damaged`: newer checkpoints that cannot be used, and why."""

    experiment: Experiment
    folder: Path
    saved: Saved
    damaged: dict[Path, str]

    def rewind(self, console: Console) -> None:
        """Set the folder, which is locked, back to the checkpoint. Each change can be made again after a crash."""
        _refuse_ended(self.folder)  # now that no other process can end it
        for folder, problem in self.damaged.items():
            warning = f"{folder.name} is damaged ({problem}) and is left out"
            console.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
        workers = f"{self.saved.workers} worker{'s' * (self.saved.workers != 1)}"
        console.print(f"Resuming {escape(str(self.folder))} after step {self.saved.step:,}, which {workers} had saved.")
        for name in ("summary.json", "ledger.json"):  # of the end that it had
            (self.folder / name).unlink(missing_ok=True)
        remove_drafts(self.folder)
        cut_metrics(self.folder, self.saved.step)


def prepare_resume(identifier: str, options: HydraOptions, console: Console) -> Resumption:
    """Find the run and check that it can continue, without changing anything. Raises UserError."""
    folder = find_run(identifier, Path("outputs"))
    if is_locked(folder):
        raise still_running(folder)
    _refuse_ended(folder)
    saved, damaged = newest(folder)
    if saved is None:
        why = "; ".join(f"{path.name} is damaged: {problem}" for path, problem in damaged.items())
        raise UserError(f"{RESUME}={folder} has no complete checkpoint{f' ({why})' if why else ''}: start a new run")
    config = _settings(folder, options)
    check_folder("cache_dir", config.cache_dir)
    plan = from_plain(Plan, read_json(folder / "plan.json"))
    changed = any(_key(override).startswith("accumulation") for override in options.overrides)
    with reading_data() as progress:
        experiment = prepare_resumed(config, plan, _segments(folder), saved.step, changed, progress)
    _check(experiment, folder, saved, console)
    check_tracking(config.tracking)
    return Resumption(experiment, folder, saved, damaged)


def continuation(folder: Path, experiment: Experiment) -> Resumption | None:
    """The unfinished run of exactly this experiment in `folder`, if it has a checkpoint to continue from."""
    if summary_of_run(folder).get("status") == FINISHED or not saved_folders(folder) or is_locked(folder):
        return None
    card, saved_with = RunCard.read(folder), (experiment.setup_digest, str(experiment.config.seed))
    saved, damaged = newest(folder)
    if saved is None or (card.tags.get("setup.digest"), card.params.get("seed")) != saved_with:
        return None
    return Resumption(experiment.continuing(_segments(folder), saved.step), folder, saved, damaged)


def find_run(identifier: str, outputs: Path) -> Path:
    """The folder of a run, given the folder, `latest`, or its MLflow run id. Raises UserError.

    `outputs`: contains the folders of runs. `latest`: the one that started last of those that have not finished.
    """
    if (Path(identifier) / "config.yaml").exists():
        return Path(identifier)
    runs = [path.parent for path in outputs.glob("*/*/config.yaml")]
    if identifier == LATEST:
        unfinished = [
            run
            for run in runs
            if saved_folders(run) and summary_of_run(run).get("status") != FINISHED and not is_locked(run)
        ]
        if not unfinished:
            raise UserError(f"{RESUME}={LATEST}: no unfinished run in {outputs.resolve()} has a checkpoint")
        return max(unfinished, key=started_ms)
    if (folder := folder_of_mlflow_run(identifier, outputs)) is not None:
        return folder
    named = {run.name: run for run in runs}
    if identifier in named:
        return named[identifier]
    raise UserError(f"{RESUME}={identifier} is not a run in {outputs.resolve()}{did_you_mean(identifier, named)}")


def still_running(folder: Path) -> UserError:
    return UserError(f"{RESUME}={folder} is still running: wait for it, or end it first")


def _refuse_ended(folder: Path) -> None:
    if summary_of_run(folder).get("status") == FINISHED:
        raise UserError(f"{RESUME}={folder} has finished: there is nothing to resume")


def _segments(folder: Path) -> tuple[Segment, ...]:
    return tuple(Segment.from_json(one) for one in read_json(folder / "certificate.json").get("segments", ()))


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _settings(folder: Path, options: HydraOptions) -> Config:
    """The run's settings with the command's changes. Raises UserError for those that change the experiment."""
    saved, trusted = saved_settings(folder)
    for override in parsed(options.overrides):
        key = override.get_key_element().lstrip("+~")
        plain = not (override.is_delete() or override.is_add() or override.is_sweep_override())
        if not plain or not (key in _SETTINGS or key.partition(".")[0] in _GROUPS):
            raise UserError(
                f"{override.input_line} is not possible with {RESUME}={folder}: a resumed run is the same experiment, "
                f"and can change only {', '.join((*_GROUPS, *_SETTINGS))}; leave it out, or start a new run"
            )
    config = settings(compose(options.overrides, options.config_dirs, saved))
    if missing := sorted(set(trusted) - set(config.trusted_packages)):
        raise UserError(
            f"trusted_packages does not have {', '.join(missing)}, which the run had: add "
            f"trusted_packages=[{','.join(trusted)}] to the command if you trust that code"
        )
    if any(_key(override) == "tracking.uri" for override in options.overrides):
        return config
    return dataclasses.replace(config, tracking=_tracking(config.tracking, folder))


def _tracking(tracking: Tracking, folder: Path) -> Tracking:
    """The store that has the run, wherever the command is given. Raises UserError: credentials are not in files."""
    if tracking.kind is TrackerName.none or not (folder / CARD_FILE).exists():
        return tracking
    store, environment = RunCard.read(folder).store, os.environ.get("MLFLOW_TRACKING_URI")
    if store is None or (environment is not None and store == masked(environment)):
        return tracking
    if "***" in store:
        raise UserError(f"tracking.uri={store} was given with credentials: put the address into MLFLOW_TRACKING_URI")
    return dataclasses.replace(tracking, uri=store)


def _check(experiment: Experiment, folder: Path, saved: Saved, console: Console) -> None:
    """Refuse other data and a number of workers that cannot take over; say which libraries have changed."""
    if experiment.facts.digest != saved.identity["data"]:
        raise UserError(
            f"{RESUME}={folder} is invalid: the data ({masked(experiment.facts.source)}) changed after the run was "
            "started; restore them, or start a new run"
        )
    workers = experiment.plan.world_size
    if workers != saved.workers and not saved.for_any_workers:
        raise UserError(
            f"device.workers={workers} is invalid: the run's {saved.workers} workers had different weights when they "
            f"were saved (sync.overlap or sync.policy=gradients); use {saved.workers}"
        )
    changes = [
        f"{name} {saved.identity[name]} → {version}"
        for name, version in experiment.setup.versions.items()
        if saved.identity.get(name, version) != version
    ]
    if changes:
        console.print(f"[bold yellow]note:[/] since the run was saved: {escape(', '.join(changes))}", soft_wrap=True)
