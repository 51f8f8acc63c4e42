"""The card of a run, in `tracking.json`: what trackers get besides metrics and files (name, params, tags, data set)."""

from __future__ import annotations

import dataclasses
import functools
import getpass
import json
import os
import subprocess
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.plain import from_plain
from runner.errors import UserError, first_line
from runner.folder.files import write_json
from runner.folder.reading import read_json
from runner.plan.describe_sync import sync_name
from runner.plan.scaling import settings_text
from runner.track.description import NOTE_TAG, OBJECTIVE_TAG, run_description
from runner.track.names import run_name
from runner.track.secrets import masked
from runner.track.store import store_of

if TYPE_CHECKING:  # it imports torch
    from runner.plan.experiment import Experiment

FILE_NAME = "tracking.json"
#: The tag by which a run is found again if the store created it and the response was lost.
KEY_TAG = "runner.key"
#: The tag that is equal for runs which differ only in the seed.
DIGEST_TAG = "setup.digest"
#: The tag of a run that failed because its numbers were not finite.
DIVERGED_TAG = "diverged"
#: The tag of a run that a race has stopped: why.
STOPPED_TAG = "stopped"
#: The tag of an evaluation of a saved model, which is not a training run: the model.
EVALUATED_TAG = "evaluation.model"


@dataclass(frozen=True)
class TrackingRecord:
    """A run as the tracking store shows it, and how much of it has been delivered. The fields are the file's keys.

    `key`: unique. `parent_key`: the key of the parent's card: a sweep's, or an evaluated run's. `dataset_context`: what
    the data set is for, as MLflow calls it. `store`: the tracking URI, credentials masked, or None if
    the run is not tracked. `into_run`: the id of an existing run to log into (MLFLOW_RUN_ID). `started`, `ended`:
    milliseconds since the epoch. `last_tags`: tags set or changed at the end of the run. `run_id`: the store's id, once
    known. `delivered`: whether the store has everything. `undelivered`: other trackers that do not have everything.
    """

    experiment: str
    run_name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    store: str | None
    dataset: Mapping[str, str] | None = None
    dataset_context: str = "training"
    parent_key: str | None = None
    into_run: str | None = None
    log_model: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: int = field(default_factory=lambda: int(time.time() * 1000))
    ended: int | None = None
    status: str | None = None
    last_tags: Mapping[str, str] = field(default_factory=dict)
    run_id: str | None = None
    delivered: bool = False
    undelivered: Sequence[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        write_json(folder / FILE_NAME, dataclasses.asdict(self))

    def update(self, folder: Path, **changes: Any) -> TrackingRecord:
        """A copy with these values changed, written to the run's folder."""
        card = dataclasses.replace(self, **changes)
        card.write(folder)
        return card

    def ended_now(self, status: str, tags: Mapping[str, str] | None = None) -> TrackingRecord:
        """A copy for a run that ends now. `tags`: set or changed at its end."""
        return dataclasses.replace(self, status=status, last_tags=dict(tags or {}), ended=int(time.time() * 1000))

    def mark_ended(self, folder: Path, status: str, tags: Mapping[str, str] | None = None) -> TrackingRecord:
        """Write a copy for a run that ends now to the run's folder."""
        return self.ended_now(status, tags).update(folder)

    def typed_params(self) -> dict[str, bool | float | str]:
        """`params`, with numbers and truth values as such, so that a tracker can sort by them."""
        return {name: _typed(value) for name, value in self.params.items()}

    @staticmethod
    def read(folder: Path) -> TrackingRecord:
        """The card in a folder. Raises UserError if the file is missing or invalid."""
        try:
            return from_plain(TrackingRecord, read_json(folder / FILE_NAME))
        except (UserError, ValueError) as error:
            raise UserError(f"{folder / FILE_NAME} is not a valid {FILE_NAME} ({first_line(error)})") from error


def card_of(
    experiment: Experiment, tags: Mapping[str, str], parent_key: str | None = None, varied: Collection[str] = ()
) -> TrackingRecord:
    """The card of a new run. `tags`: in addition to those of every run; `parent_key`, `varied`: of its sweep."""
    config, tracking = experiment.config, experiment.config.tracking
    store, limit = store_of(tracking), config.max_steps
    has_no_effect = f"max_steps={limit}" if limit is not None and limit >= experiment.plan.whole_steps else None
    typed = [label for label in experiment.inputs.typed if label != has_no_effect]
    return TrackingRecord(
        experiment=tracking.experiment,
        run_name=tracking.run_name
        or run_name(experiment.setup_name, config.recipe, varied, typed, experiment.inputs.varied),
        params={name: _param(value) for name, value in run_params(experiment).items()},
        tags={**run_tags(experiment), **tags},
        store=None if store is None else masked(store),
        dataset=_dataset(experiment),
        parent_key=parent_key,
        into_run=os.environ.get("MLFLOW_RUN_ID") if store is not None else None,
        log_model=tracking.log_model,
    )


def continued(card: TrackingRecord, folder: Path) -> TrackingRecord:
    """The card of a run that continues: the one in its folder, with the tags and the store of the new `card`.

    A store does not let params change; they stay those of the start. Without a card in the folder it is the new one.
    """
    if not (folder / FILE_NAME).exists():
        return card
    open_again: dict[str, Any] = {"status": None, "ended": None, "last_tags": {}, "delivered": False}
    again = dataclasses.replace(TrackingRecord.read(folder), **open_again)
    return dataclasses.replace(again, tags=card.tags, store=card.store, log_model=card.log_model)


def run_params(experiment: Experiment) -> dict[str, Any]:
    """The resolved setup: few, flat values, so that MLflow's comparison page shows the differences."""
    config, plan = experiment.config, experiment.plan
    optimizer = plan.scaled(config.optimizer)
    return {
        "recipe": config.recipe["name"],
        "model": experiment.model_name,
        **data_params(config.recipe),
        "train_samples": experiment.facts.train_samples,
        "device": experiment.placement.label,
        "world_size": plan.world_size,
        "micro_batch": plan.micro_batch,
        "accumulation_steps": plan.accumulation_steps,
        "global_batch": plan.global_batch,
        "sync": sync_name(config.sync),
        "k": plan.k,
        "precision": config.precision.name.name,
        "optimizer": config.optimizer.name.name,
        "lr": plan.lr,
        **({"base_lr": plan.base_lr} if plan.base_lr != plan.lr else {}),  # else one axis would be there twice
        "scaling": plan.auto_rule or config.scaling.rule.name,
        "schedule": config.schedule.name.name,
        "warmup_share": config.schedule.warmup_share,
        "weight_decay": optimizer.weight_decay,
        "betas": None if optimizer.betas is None else settings_text(optimizer.betas),
        "eps": optimizer.eps,
        "clip_norm": config.optimizer.clip_norm,
        "epochs": plan.epochs,
        "optimizer_steps": plan.optimizer_steps,
        "length_sorted": config.batch.length_sorted,
        "equivalence": config.equivalence.mode.name,
        "compile": config.compile,
        "seed": config.seed,
    }


def last_part(path: object) -> str:
    """The name of a file or folder, without the folders above it."""
    return os.path.basename(str(path).rstrip("/"))


def data_params(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The names of the data files, or of the data on the Hub, and the length of a row in tokens."""
    found: dict[str, Any] = {name: recipe[name] for name in ("max_length", "block_size") if name in recipe}
    data = recipe.get("data")
    if isinstance(data, Mapping):
        for split in ("train", "eval"):
            if data.get(split):
                found[f"{split}_data"] = last_part(data[split])
            elif data.get("hub_name"):
                found[f"{split}_data"] = f"{data['hub_name']} {data.get(f'hub_{split}') or ''}".strip()
    return found


def _param(value: Any) -> str:
    """A number as it would be typed: 0.00015, not 0.00015000000000000001."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f"{value:.12g}" if isinstance(value, float) else str(value)


def _typed(param: str) -> bool | float | str:
    try:
        value = json.loads(param)
    except ValueError:
        return param
    return value if isinstance(value, (bool, int, float)) else param


def run_tags(experiment: Experiment) -> dict[str, str]:
    """Tags for filtering runs, and the run's description."""
    placement = experiment.placement
    return {
        **user_tags(),
        NOTE_TAG: run_description(experiment),
        OBJECTIVE_TAG: f"eval/{experiment.config.evaluation.metric}",
        "device": placement.label,
        "device.rehearsed": str(placement.rehearsed).lower(),
        "device.executed_on": placement.device_type,
        "plan.digest": experiment.plan.digest,
        "certificate": experiment.certificate.level,
        "setup": experiment.setup_name,
        DIGEST_TAG: experiment.setup_digest,
        **({"notes": "; ".join(experiment.notes)} if experiment.notes else {}),
    }


def user_tags() -> dict[str, str]:
    """MLflow's own tags for user, program and commit, as far as they are known.

    MLflow's context providers would give the same, but importing MLflow here would delay the first step by seconds.
    """
    tags = {"mlflow.source.name": "python -m runner", "mlflow.source.type": "LOCAL"}
    if commit := git_commit():
        tags["mlflow.source.git.commit"] = commit
    try:
        return {"mlflow.user": getpass.getuser(), **tags}
    except (KeyError, OSError):  # a container's user may have no name
        return tags


@functools.lru_cache(maxsize=1)
def git_commit() -> str | None:
    """The commit of the repository that contains the runner, or None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _dataset(experiment: Experiment) -> dict[str, str]:
    """The training data in the form of MLflow's `Dataset` entity."""
    facts = experiment.facts
    profile: dict[str, int | None] = {"train_samples": facts.train_samples, "eval_samples": facts.eval_samples}
    if facts.groups is not None:
        profile |= {f"train_{facts.groups}": facts.train_groups, f"eval_{facts.groups}": facts.eval_groups}
    return {
        "name": experiment.config.recipe["name"],
        "digest": facts.digest[:16],
        "source": masked(facts.source),
        "profile": json.dumps(profile),
    }
