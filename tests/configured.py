"""Settings and prepared experiments for tests, composed once per set of choices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from omegaconf import DictConfig, OmegaConf

from runner.config.compose import compose, conf_dir, settings
from runner.config.schema import Config
from runner.plan.experiment import Experiment, prepare

GROUPS = {path.name for path in conf_dir().iterdir() if path.is_dir()}


@cache
def _composed(choices: tuple[str, ...]) -> DictConfig:
    composed = compose(choices)
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    OmegaConf.set_struct(composed, True)
    return composed


def configured(overrides: str | Sequence[str] = "") -> Config:
    """The settings of a command line. Composing takes a tenth of a second, so single settings are merged afterwards.

    One worker on the CPU unless a device is given. What is typed as `+…` or `~…` is composed.
    """
    given = overrides.split() if isinstance(overrides, str) else overrides
    choices = [override for override in given if override.partition("=")[0] in GROUPS or override[0] in "+~"]
    if not any(choice.startswith("device=") for choice in choices):
        choices.append("device=cpu")
    single = OmegaConf.from_dotlist([override for override in given if override not in choices])
    merged = OmegaConf.merge(_composed(tuple(choices)), single)
    assert isinstance(merged, DictConfig)
    return settings(merged)


def prepared(overrides: str = "") -> Experiment:
    """The same prepared, with 960 training samples of the built-in recipe."""
    small = "" if "recipe=" in overrides else "recipe.data.train_samples=960 recipe.data.eval_samples=96"
    return prepare(configured(f"{small} {overrides}"))
