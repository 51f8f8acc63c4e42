"""What a tracking store is told about a run, beside its metrics and files; kept in the run's folder as well."""

from __future__ import annotations

import dataclasses
import getpass
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import UserError, first_line
from runner.folder.files import write_json
from runner.plan.describe_sync import sync_name
from runner.plan.experiment import Experiment
from runner.track.commit import git_commit
from runner.track.secrets import masked

FILE_NAME = "tracking.json"
#: The tag by which a run is found again when the store's answer to making it was lost.
KEY_TAG = "runner.key"


@dataclass(frozen=True)
class RunCard:
    """A run as a tracking store will show it, and how far it has got there.

    `key`: unique. `parent_key`: the key of the sweep's card. `store`: the tracking URI, credentials masked, or None for
    a run that was logged nowhere. `into_run`: the id of a run that was there before (MLFLOW_RUN_ID). `started`,
    `ended`: milliseconds since the epoch. `last_tags`: set or changed by the end of the run. `run_id`: once the store
    has given one. `delivered`: whether the store has everything.
    """

    experiment: str
    run_name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    store: str | None
    dataset: Mapping[str, str] | None = None
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

    def changed(self, folder: Path, **changes: Any) -> RunCard:
        """This card with other values, written to the run's folder."""
        card = dataclasses.replace(self, **changes)
        card.write(folder)
        return card

    def write(self, folder: Path) -> None:
        write_json(folder / FILE_NAME, dataclasses.asdict(self))

    @staticmethod
    def read(folder: Path) -> RunCard:
        """The card in a folder. Raises UserError for a file that is not there or holds no card."""
        try:
            return RunCard(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise UserError(f"{folder / FILE_NAME} cannot be read as a run's card ({first_line(error)})") from error


def ending(status: str, tags: Mapping[str, str]) -> dict[str, Any]:
    """What changes on the card of a run that ends now. `tags`: set or changed by its end."""
    return {"status": status, "last_tags": dict(tags), "ended": int(time.time() * 1000)}


def run_params(experiment: Experiment) -> dict[str, Any]:
    """The resolved setup, few and flat, so that what differs between two runs stands out."""
    config, plan = experiment.config, experiment.plan
    return {
        "recipe": config.recipe["name"],
        "model": _model_name(config.recipe),
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
        "base_lr": plan.base_lr,
        "scaling": config.scaling.rule.name,
        "schedule": config.schedule.name.name,
        "warmup_share": config.schedule.warmup_share,
        "weight_decay": config.optimizer.weight_decay,
        "epochs": plan.epochs,
        "optimizer_steps": plan.optimizer_steps,
        "seed": config.seed,
    }


def _model_name(recipe: Mapping[str, Any]) -> str:
    """What the recipe calls its model: a name or folder, or else the class that builds it."""
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return str(model or recipe["_target_"])
    return str(model.get("name") or model.get("_target_"))


def user_tags() -> dict[str, str]:
    """Who ran this, with what program, of which commit; what can be known of it."""
    tags = {"mlflow.source.name": "python -m runner", "mlflow.source.type": "LOCAL"}
    if commit := git_commit():
        tags["mlflow.source.git.commit"] = commit
    try:
        return {"mlflow.user": getpass.getuser(), **tags}
    except (KeyError, OSError):  # a container's user may have no name
        return tags


def run_tags(experiment: Experiment) -> dict[str, str]:
    """What one filters runs by."""
    placement = experiment.placement
    return {
        **user_tags(),
        "device": placement.label,
        "device.rehearsed": str(placement.rehearsed).lower(),
        "device.executed_on": placement.device_type,
        "plan.digest": experiment.plan.digest,
        "certificate": experiment.certificate.level,
        "setup": experiment.setup_name,
        "setup.digest": experiment.setup_digest,
        **({"notes": "; ".join(experiment.notes)} if experiment.notes else {}),
    }


def dataset_of(experiment: Experiment) -> dict[str, str]:
    """The training data, as MLflow's page of a run names them."""
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
