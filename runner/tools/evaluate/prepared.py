"""Everything that is known about an evaluation before a worker starts: the model, its settings, data and workers."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.config.compose import compose, hydra_quoted, parsed, settings
from runner.config.instantiate import build_recipe
from runner.config.schema import Config, Tracking
from runner.data.cache import Cache
from runner.data.recipe import DataFacts, Recipe
from runner.errors import UserError
from runner.folder.files import check_folder
from runner.plan.checks import check_adapter
from runner.plan.experiment import placement_of
from runner.plan.placement import Placement
from runner.run.earlier import folder_of_mlflow_run, saved_model, saved_settings
from runner.run.preflight import reading_data, refuse_used_folder
from runner.tools.compare.from_mlflow import RUN_ID
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord
from runner.track.store import check_tracking, store_for

#: The settings that an evaluation has. The others are those of a training run.
_USED = (
    *("recipe", "device", "precision", "sharding", "compile", "evaluation.micro_batch", "tracking", "cache_dir"),
    *("trusted_packages", "hydra"),
)


@dataclass(frozen=True)
class Target:
    """A saved model. `model`: its folder or its name on the Hub; `run`: the folder of the run that saved it, if any."""

    model: str
    run: Path | None = None

    @property
    def card(self) -> TrackingRecord | None:
        """The card of the run, which it logged to a tracking store."""
        return TrackingRecord.read(self.run) if self.run is not None and (self.run / CARD_FILE).exists() else None

    def weights_digest(self) -> str | None:
        """A hash over the files with weights; None for a model on the Hub."""
        files = sorted(path for path in Path(self.model).glob("*") if path.suffix in (".safetensors", ".bin"))
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while part := file.read(2**24):
                    digest.update(part)
        return digest.hexdigest()[:16] if files else None


@dataclass(frozen=True)
class Evaluation:
    """Model, data and workers of a command. `file`: input of a prediction; `folder`: for the result, not made yet."""

    target: Target
    config: Config
    recipe: Recipe
    facts: DataFacts
    placement: Placement
    file: str | None
    folder: Path

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences of the recipe about itself and its data."""
        return (*self.recipe.notes, *self.facts.notes)


def prepare(
    given: str, overrides: Sequence[str], config_dirs: Sequence[str], file: str | None, predicts: bool = False
) -> Evaluation:
    """Check everything that can be wrong before workers start. Raises UserError.

    `given`: MODEL_OR_RUN. `predicts`: whether predictions are to be written.
    """
    target = _find_target(given)
    cfg = _compose(target, overrides, config_dirs)
    config = settings(cfg)
    config = dataclasses.replace(config, tracking=_tracking(target, config.tracking))
    folder = Path(cfg.hydra.run.dir)
    check_folder("cache_dir", config.cache_dir)
    check_folder("hydra.run.dir", str(folder))
    refuse_used_folder(folder)
    check_tracking(config.tracking)
    base: Recipe = build_recipe(config.recipe, config.trusted_packages)
    recipe = base.from_saved(target.model, file)
    if predicts:
        recipe = recipe.for_predictions()
    placement = placement_of(config)
    if not config.adapter.merge:
        check_adapter(config, placement.device_type)
    with reading_data() as progress:
        recipe.check_model()
        facts = recipe.facts(Cache(config.cache_dir, progress))
    return Evaluation(target, config, recipe, facts, placement, file, folder)


def _find_target(given: str) -> Target:
    """The model that MODEL_OR_RUN names. Raises UserError."""
    path = Path(given).expanduser()
    if path.is_dir():
        if (path / "config.yaml").is_file():
            return Target(str(saved_model(path)), path)
        if (path / "sweep.json").is_file():
            raise UserError(f"{given} is the folder of a sweep: give that of one of its jobs")
        if any((path / name).is_file() for name in ("config.json", "adapter_config.json", "model.safetensors")):
            return Target(str(path))
        raise UserError(
            f"{given} is neither the folder of a run (with a config.yaml) nor of a model (with a config.json): "
            "give one of these"
        )
    if path.exists():
        raise UserError(f"{given} is a file: give the folder of a run or of a model")
    if not RUN_ID.fullmatch(given):
        return Target(given)
    run = folder_of_mlflow_run(given, Path("outputs"))
    if run is None:
        raise UserError(
            f"{given} is not the MLflow run id of a run below {Path('outputs').absolute()}: give its folder"
        )
    return Target(str(saved_model(run)), run)


def _compose(target: Target, overrides: Sequence[str], config_dirs: Sequence[str]) -> DictConfig:
    """The configuration of an evaluation: the settings of the run, and `overrides`. Raises UserError."""
    given = parsed(overrides)
    for one in given:
        key = one.key_or_group
        if not any(key == used or key.startswith((f"{used}.", f"{used}/")) for used in _USED):
            raise UserError(f"{one.input_line} has no effect on a saved model: remove it")
        if key == "recipe.model" or key.startswith("recipe.model."):
            raise UserError(f"{one.input_line} has no effect: {target.model} is the model; remove it")
        if one.is_sweep_override():
            raise UserError(f"{one.input_line} has several values: give one")
    chooses_recipe = any(one.key_or_group == "recipe" for one in given)
    if target.run is None and not chooses_recipe:
        what = "is a model's folder" if Path(target.model).is_dir() else "does not exist here"
        rule = "add recipe=… and its data, as for any model of a folder or the Hub, or give a run's folder"
        raise UserError(f"{target.model} {what}: {rule}")
    parent = Path("outputs") if target.run is None else target.run
    new = parent / "evaluations" / "${now:%Y-%m-%d_%H-%M-%S}-${suffix:}"
    folder = f"hydra.run.dir={hydra_quoted(str(new))}"
    saved: dict[str, Any] | None = None
    if target.run is not None:
        saved, _ = saved_settings(target.run)
        saved["tracking"] |= {"run_name": None, "log_model": False}
        # Nothing is trained: no setting of the training may be at odds with one that is given now.
        saved["sync"] = {"policy": "periodic", "k": 1}
        if any(re.match("(?i)(sharding=|sharding.kind=|compile=)(?!none|false)", one.input_line) for one in given):
            saved["equivalence"] = {"mode": "standard"}
        if chooses_recipe:
            del saved["recipe"]
    return compose([folder, *overrides], config_dirs, saved)


def _tracking(target: Target, tracking: Tracking) -> Tracking:
    """`tracking`, with the store that the run was logged to, if it is one of the user's own. Raises UserError."""
    if target.run is None or target.card is None or not tracking.mlflow:
        return tracking
    return dataclasses.replace(tracking, uri=store_for(target.card.store, target.run, tracking.uri, "tracking.uri"))
