"""Settings and prepared experiments for tests, composed once per set of choices."""

from __future__ import annotations

from functools import cache
from typing import Any

from omegaconf import OmegaConf

from runner.config.compose import compose, conf_dir, settings
from runner.config.plain import from_plain, to_plain
from runner.config.schema import Config
from runner.plan.experiment import Experiment, prepare

GROUPS = {path.name for path in conf_dir().iterdir() if path.is_dir()}


@cache
def _composed(choices: tuple[str, ...]) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(settings(compose(choices)))
    return plain


def configured(overrides: str = "") -> Config:
    """The settings of a command line. Composing takes a tenth of a second, so single settings are merged afterwards.

    One worker on the CPU unless a device is given.
    """
    given = overrides.split()
    choices = [override for override in given if override.partition("=")[0] in GROUPS]
    if not any(choice.startswith("device=") for choice in choices):
        choices.append("device=cpu")
    single = OmegaConf.from_dotlist([override for override in given if override not in choices])
    plain = OmegaConf.merge(OmegaConf.create(_composed(tuple(choices))), single)
    return from_plain(Config, OmegaConf.to_container(plain))


def prepared(overrides: str = "") -> Experiment:
    """The same prepared, with 960 training samples of the built-in recipe."""
    small = "" if "recipe=" in overrides else "recipe.data.train_samples=960 recipe.data.eval_samples=96"
    return prepare(configured(f"{small} {overrides}"))
