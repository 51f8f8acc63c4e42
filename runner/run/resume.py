"""Continue an interrupted run from its newest checkpoint, in its own folder and its own MLflow run.

The run's `config.yaml` and `plan.json` are the source, not `conf/`. The command can change what executes the run, and
nothing that belongs to the experiment.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from runner.config.arguments import RESUME
from runner.config.compose import compose, parsed, settings
from runner.config.plain import to_plain
from runner.config.schema import SETUP_DIGEST_EXCLUDES, Config, Tracking
from runner.errors import UserError, did_you_mean, require
from runner.folder.files import check_folder, started_ms, strict_json
from runner.folder.lock import is_locked
from runner.folder.metrics_log import cut_metrics, damage_of_metrics
from runner.folder.phase_progress import FILE_NAME as PROGRESS_FILE
from runner.folder.reading import files_below, read_json
from runner.folder.record import FINISHED, status_of
from runner.log import LOG
from runner.measure.fitting import with_fitting_micro_batches
from runner.plan import Plan
from runner.plan.certificate import PROCESSOR, Segment
from runner.plan.describe_sync import sync_name
from runner.plan.experiment import Experiment, check_profile, prepare_resumed
from runner.run.earlier import folder_of_mlflow_run, plan_of_run, saved_settings
from runner.run.environment import FILE_NAME as ENVIRONMENT
from runner.run.environment import earlier_environments
from runner.run.preflight import reading_data
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord
from runner.track.secrets import masked, masked_keys, names_a_secret, without_credentials
from runner.track.store import check_tracking, how_to_sync, store_for
from runner.train.build import CODE_PREFIX, code_of
from runner.train.checkpoint import Saved, newest, remove_drafts, saved_folders, set_aside, sync_digest

LATEST = "latest"
#: Unfinished runs that are listed where none of the given name is found.
_SHOWN = 3

#: What a resumed run may change: how it is executed, logged and saved. Groups, settings, and settings of groups.
_GROUPS = (
    "device",
    "accumulation",
    "precision",
    "sync",
    "sharding",
    "checkpoint",
    "launch",
    "profile",
    "noise",
    "tracking",
)
#: Of these groups, what the run has given to its tracking store at its start.
_GIVEN = ("tracking.experiment", "tracking.run_name")
#: Where things are sent and written, and whose code is run: decided by the command.
_NOT_OF_THE_FOLDER = ("tracking.uri", "cache_dir", "trusted_packages")
_SETTINGS = (
    *("log_every", "verbose", "compile", "gradient_checkpointing", "evaluation.micro_batch"),
    *("nonfinite_steps", "cache_dir", "trusted_packages"),
)


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
        if self.saved is not None and self.saved.digest is None:
            why = "an earlier version saved it, without a digest and without the settings"
            warnings.append(f"{self.saved.folder.name} cannot be checked completely: {why}")
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
        _refuse_other_experiment(saved, config, plan, folder)
    changed = any(_key(override).startswith("accumulation") for override in overrides)
    if saved is not None and not changed:
        plan = plan.on_workers(plan.world_size, _accumulation_steps(plan, saved), plan.k)
    with reading_data() as progress:
        experiment = prepare_resumed(config, plan, changed, progress)
        if changed:
            experiment = with_fitting_micro_batches(experiment, started, progress, LOG.info)
    if saved is not None:
        _check(experiment, folder, saved)
        check_profile(config, plan, saved.step)
        experiment = experiment.resumed_after(_segments(folder), saved.step)
        experiment = experiment.after_changes(_changes(experiment, saved))
    check_tracking(config.tracking)
    return Resumption(experiment, folder, saved, damaged)


def continuation(folder: Path, experiment: Experiment) -> Resumption | None:
    """The unfinished run of this experiment in `folder`, if it has a checkpoint to continue from. Raises UserError."""
    files_below(folder)  # refuses links: the run would write through them
    if status_of(folder) == FINISHED or not saved_folders(folder) or is_locked(folder):
        return None
    saved, damaged = newest(folder)
    if saved is None:
        return None
    _refuse_other_experiment(saved, experiment.config, experiment.plan, folder)
    steps = _accumulation_steps(experiment.plan, saved)
    if steps != experiment.plan.accumulation_steps:
        experiment = experiment.with_accumulation_steps(steps)
    continued = experiment.resumed_after(_segments(folder), saved.step)
    return Resumption(continued.after_changes(_changes(continued, saved)), folder, saved, damaged)


def restarted(experiment: Experiment, folder: Path, least_accumulation: int = 1) -> Resumption:
    """The run in `folder`, which has just lost a worker. Raises UserError if all its checkpoints are damaged.

    `least_accumulation`: micro-batches in a step of each worker, at least.
    """
    saved, damaged = newest(folder)
    if saved is None and damaged:
        raise UserError(f"{folder} has no complete checkpoint to start again from")
    segments, plan = experiment.certificate.segments, experiment.plan
    steps = max(_accumulation_steps(plan, saved), least_accumulation)
    if steps != plan.accumulation_steps:
        experiment = experiment.with_accumulation_steps(steps).resumed_after(segments, 0)
    if saved is not None:
        experiment = experiment.resumed_after(segments, saved.step)
        experiment = experiment.after_changes(_changes(experiment, saved))
    return Resumption(experiment, folder, saved, damaged)


def _accumulation_steps(plan: Plan, saved: Saved | None) -> int:
    """As planned, or as many as the workers of a checkpoint already needed for lack of memory."""
    if saved is None or saved.accumulation_steps is None or saved.workers != plan.world_size:
        return plan.accumulation_steps
    return max(plan.accumulation_steps, saved.accumulation_steps)


def _is_unfinished(folder: Path) -> bool:
    try:
        return status_of(folder) != FINISHED and not is_locked(folder)
    except UserError:  # a damaged one: the others can still be found
        return False


def find_run(identifier: str, outputs: Path) -> Path:
    """The folder of a run, given the folder, `latest`, or its MLflow run id. Raises UserError.

    `outputs`: contains the folders of runs. `latest`: the one that started last of those that have not finished.
    """
    if (Path(identifier) / "config.yaml").exists():
        return Path(identifier)
    runs = [path.parent for path in outputs.glob("*/*/config.yaml")]
    unfinished = [run for run in runs if _is_unfinished(run)]
    if identifier == LATEST:
        if not unfinished:
            raise UserError(f"{RESUME}={LATEST}: there is no unfinished run in {outputs.resolve()}: give its folder")
        return max(unfinished, key=started_ms)
    if (folder := folder_of_mlflow_run(identifier, outputs)) is not None:
        return folder
    named = {run.name: run for run in runs}
    if identifier in named:
        return named[identifier]
    last = [run.name for run in sorted(unfinished, key=started_ms)[-_SHOWN:]]
    raise UserError(f"{RESUME}={identifier} is not a run in {outputs.resolve()}{did_you_mean(identifier, last)}")


def still_running(folder: Path) -> UserError:
    return UserError(f"{RESUME}={folder} is still running: wait for it, or end it first")


def _refuse_ended(folder: Path) -> None:
    if status_of(folder) == FINISHED:
        known = TrackingRecord.read(folder) if (folder / CARD_FILE).exists() else None
        store = known.store if known is not None and not known.delivered else None
        to_send = "" if store is None else f"; {how_to_sync(folder, store)} sends what its tracking store is missing"
        raise UserError(f"{RESUME}={folder} has finished: there is nothing to resume{to_send}")


def _damaged_records(folder: Path, tracking: Tracking) -> dict[str, str]:
    """What is wrong with files without which a run can continue, by name. Raises UserError for one that it needs."""
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


def _segments(folder: Path) -> tuple[Segment, ...]:
    return tuple(Segment.from_json(one) for one in read_json(folder / "certificate.json").get("segments", ()))


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def recorded_experiment(config: Config, plan: Plan) -> dict[str, Any]:
    """What checkpoints say of their experiment, as JSON has it: settings and plan without how they are executed."""
    left_out = {*_GROUPS, *_SETTINGS, *SETUP_DIGEST_EXCLUDES} - {"seed"}
    kept = {name: value for name, value in to_plain(config).items() if name not in left_out}
    kept["evaluation"].pop("micro_batch")
    content: dict[str, Any] = json.loads(strict_json({"settings": kept, "plan": plan.of_experiment}))
    return {part: without_credentials(values) for part, values in content.items()}


def _refuse_other_experiment(saved: Saved, config: Config, plan: Plan, folder: Path) -> None:
    """Raises UserError if settings or plan have changed. Checkpoints of earlier versions have no record of them."""
    before, now = saved.identity.get("experiment") or {}, recorded_experiment(config, plan)
    for part, file in (("settings", "config.yaml"), ("plan", "plan.json")):
        for name, old, new in _differences(without_credentials(before.get(part, {})), now[part]):
            raise UserError(
                f"{folder / file} does not fit {saved.folder.name}: {name} is {new}, and was {old} then; "
                "restore it, or start a new run"
            )


def _differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, old and new value of what differs. What only one has is of another version, except in a recipe."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*before, *now)):
            if (key in before and key in now) or name.startswith("recipe"):
                yield from _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield name, before, now


def may_change(override: str) -> bool:
    """Whether a resumed run may have this override: it changes how the run is executed, and not the experiment."""
    (parsed_override,) = parsed([override])
    key = parsed_override.get_key_element().lstrip("+~")
    if parsed_override.is_delete() or parsed_override.is_add() or parsed_override.is_sweep_override():
        return False
    return key in _SETTINGS or (key.partition(".")[0] in _GROUPS and key not in _GIVEN)


def to_repeat(override: str) -> bool:
    """Whether the command that resumes the run needs this override, too: its folder cannot say so."""
    return _key(override) in _NOT_OF_THE_FOLDER and masked(override) == override


def changes_execution(override: str) -> bool:
    """Whether workers that torchrun starts again need this override: of the others `config.yaml` has the values.

    It also has how many micro-batches there were, or have become for lack of memory, but no secrets.
    """
    key = _key(override)
    return names_a_secret(key.rpartition(".")[2]) or (may_change(override) and not key.startswith("accumulation"))


def _settings(folder: Path, overrides: Sequence[str], config_dirs: Sequence[str]) -> Config:
    """The run's settings with the command's changes. Raises UserError for those that change the experiment."""
    saved, trusted = saved_settings(folder)
    secret = set(masked_keys(saved))
    for override in overrides:
        if not may_change(override) and _key(override) not in secret:
            raise UserError(
                f"{override} is not possible with {RESUME}={folder}: a resumed run is the same experiment, "
                f"and can change only how the run is executed, logged and saved: {', '.join((*_GROUPS, *_SETTINGS))} "
                f"(but not {' and '.join(_GIVEN)}); leave it out, or start a new run"
            )
    if withheld := sorted(secret.difference(map(_key, overrides))):
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


def _check(experiment: Experiment, folder: Path, saved: Saved) -> None:
    """Refuse other data and a number of workers that cannot take over."""
    if experiment.facts.digest != saved.identity["data"]:
        raise UserError(
            f"{RESUME}={folder} is invalid: the data ({masked(experiment.facts.source)}) changed after the run was "
            "started; restore them, or start a new run"
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
    """What else is not as it was when the checkpoint was saved: libraries, processor, runner, modules of the recipe."""
    setup = experiment.setup
    processor = {PROCESSOR: setup.processor} if experiment.config.equivalence.is_identical else {}
    old, new = saved.identity, {**setup.versions, **processor, **code_of(experiment.config)}
    names = [name for name in new if old.get(name, new[name]) != new[name]]
    if any(name.startswith(CODE_PREFIX) for name in old):  # modules can come and go
        names += [name for name in (*new, *old) if name.startswith(CODE_PREFIX) and (name in new) != (name in old)]
    return tuple(name if name.startswith(CODE_PREFIX) else f"{name} {old[name]} → {new[name]}" for name in names)
