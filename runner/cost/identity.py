"""The settings that the time of a step depends on, wherever its workers run and however they synchronise."""

from __future__ import annotations

from typing import Any

from runner.config.instantiate import NOT_TRAINED_WITH
from runner.config.plain import to_plain
from runner.plan.baseline import RunSetup


def step_settings(setup: RunSetup) -> dict[str, Any]:
    """What is computed in a step, and by which versions; not the learning rate, the data or the length of the run."""
    config = setup.config
    return {
        "recipe": {name: value for name, value in config.recipe.items() if name not in NOT_TRAINED_WITH},
        "versions": dict(setup.versions),
        "precision": to_plain(config.precision),
        "optimizer": {name: value for name, value in to_plain(config.optimizer).items() if name != "lr"},
        "model": [config.compile, config.gradient_checkpointing, *map(to_plain, (config.equivalence, config.adapter))],
        "sharding": to_plain(config.sharding),
    }
