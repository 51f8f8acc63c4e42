"""Everything that is known about an evaluation before a worker starts. Creates no folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.config.compose import settings
from runner.config.instantiate import build_recipe
from runner.config.schema import Config
from runner.data.cache import Cache
from runner.data.recipe import DataFacts, Recipe
from runner.folder.files import check_folder
from runner.plan.experiment import placement_of
from runner.plan.placement import Placement
from runner.run.preflight import reading_data, refuse_used_folder
from runner.tools.evaluate.target import Target, compose_for, find_target, tracking_for
from runner.track.store import check_tracking


@dataclass(frozen=True)
class Evaluation:
    """What a command evaluates. `file`: the input of a prediction; `folder`: for the result, not made yet."""

    target: Target
    config: Config
    recipe: Recipe
    facts: DataFacts
    placement: Placement
    file: str | None
    folder: Path

    @property
    def notes(self) -> tuple[str, ...]:
        """What the recipe has to say about itself and its data, in sentences."""
        return (*self.recipe.notes, *self.facts.notes)


def prepare(
    given: str, overrides: Sequence[str], config_dirs: Sequence[str], file: str | None, predicts: bool = False
) -> Evaluation:
    """Check everything that can be wrong before workers start. Raises UserError.

    `given`: MODEL_OR_RUN. `predicts`: whether predictions are to be written.
    """
    target = find_target(given)
    cfg = compose_for(target, overrides, config_dirs)
    config = settings(cfg)
    config = dataclasses.replace(config, tracking=tracking_for(target, config.tracking))
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
    with reading_data() as progress:
        recipe.check_model()
        facts = recipe.facts(Cache(config.cache_dir, progress))
    return Evaluation(target, config, recipe, facts, placement, file, folder)
