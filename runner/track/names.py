"""Names that tell runs apart: the setup, the experiment's model and data, and the settings that were typed."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from omegaconf import OmegaConf

from runner.track.secrets import masked, names_a_secret

#: Groups and settings that other parts of a name show, or that do not change what is trained.
_SHOWN_ELSEWHERE = re.compile(
    r"(accumulation|checkpoint|hydra|plan|precision|setup|sweep|sync|tracking)([./@].*)?"
    r"|device(\.kind|\.workers)?|recipe(\.name|\.model\.name|\.data\.train|\.data\.eval)?"
    r"|cache_dir|ledger|log_every|seed|trusted_packages|verbose"
)
#: Groups whose choices need no key: `sgd`, not `optimizer=sgd`.
_CLEAR_CHOICES = ("batch", "equivalence", "experiment", "optimizer", "schedule")
_SHORT_KEYS = {"optimizer.lr": "lr", "batch.global_batch": "b", "batch.micro_batch": "micro"}
#: Groups that decide the parts of a setup's name between device and seed.
_EXECUTION = {"accumulation", "equivalence", "precision", "setup", "sharding", "sync"}
_BETWEEN = " · "
#: Characters of a run's name, and of one value in it.
_NAME_WIDTH, _VALUE_WIDTH = 72, 24


def setting_labels(overrides: Sequence[str], varied: Collection[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The overrides of a run as short labels, such as `lr=5e-05`: those that its sweep varies, and others. No secrets.

    `varied`: the settings that differ between a sweep's jobs. Other groups are named if they differ from the default.
    """
    given = dict(_split(override) for override in overrides)
    shown = [
        key
        for key, value in given.items()
        if not (_SHOWN_ELSEWHERE.fullmatch(key) or names_a_secret(key.split(".")[-1]))
        and (key in varied or value != _default_choices().get(key))
    ]
    labels = {key: _label(key, given[key], shown) for key in sorted(shown, key=lambda key: key.startswith("recipe."))}
    in_sweep = tuple(label for key, label in labels.items() if key in varied)
    return in_sweep, tuple(label for key, label in labels.items() if key not in varied)


def run_name(
    setup: str, recipe: Mapping[str, Any], varied: Collection[str], typed: Sequence[str], labels: Collection[str] = ()
) -> str:
    """`cpu2 · k=4 · s0 · cola · MiniLM · mine.tsv · lr=5e-05`: a setup, then what it trains; `…` if more was typed.

    MLflow's tables and legends cut names: the setup comes first, and of it what the sweep varies. A file that is just
    called `train` says nothing, and the one for evaluation follows from it, unless a sweep varies them. `labels`: the
    parts of the setup's name for other `varied` settings.
    """
    model, data = recipe.get("model"), recipe.get("data")
    parts = [*_varied_first(setup.split(_BETWEEN), varied, labels), str(recipe["name"])]
    if isinstance(model, Mapping) and model.get("name"):
        parts.append(short_value(str(model["name"])))
    if isinstance(data, Mapping):
        for split in ("train", "eval"):
            path = str(data.get(split) or "")
            says_something = split == "train" and PurePath(path).stem.lower() not in ("", "train")
            if says_something or f"recipe.data.{split}" in varied:
                parts.append(short_value(path))
    fitting = len(typed)
    while fitting and len(_BETWEEN.join([*parts, *typed[:fitting]])) > _NAME_WIDTH:
        fitting -= 1
    return _BETWEEN.join([*parts, *typed[:fitting], *(["…"] if fitting < len(typed) else [])])


def _varied_first(setup: Sequence[str], varied: Collection[str], labels: Collection[str]) -> list[str]:
    """The parts of a setup's name (device, execution, `labels` of other settings, seed), what a sweep varies first."""
    groups = {re.split("[./@]", key)[0] for key in varied}

    def is_the_same(number: int) -> bool:
        if setup[number] in labels:
            return False
        groups_of_part = {0: {"device"}, len(setup) - 1: {"seed"}}.get(number, _EXECUTION)
        return not groups & groups_of_part

    return [setup[number] for number in sorted(range(len(setup)), key=is_the_same)]


def short_value(value: str) -> str:
    """A value in few characters: a plain number, a path's last part that is not just `model`."""
    value = masked(re.sub(r"""['"\\]""", "", value))
    try:
        return f"{float(value):.12g}"
    except ValueError:
        pass
    if not value.startswith(("[", "{")):
        *parents, value = [part for part in value.split("/") if part] or [value]
        if value == "model" and parents:
            value = parents[-1]
    return value if len(value) <= _VALUE_WIDTH else f"{value[: _VALUE_WIDTH - 1]}…"


@functools.cache
def _default_choices() -> dict[str, str]:
    """The choice of every group that nothing was typed for."""
    from runner.config.compose import CONFIG_NAME, conf_dir  # imports Hydra, which runner.compare does not need

    entries = OmegaConf.select(OmegaConf.load(conf_dir() / f"{CONFIG_NAME}.yaml"), "defaults")
    groups = [entry for entry in entries if not isinstance(entry, str)]
    return {str(group): str(choice) for entry in groups for group, choice in entry.items()}


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def _label(key: str, value: str, keys: Sequence[str]) -> str:
    if key in _CLEAR_CHOICES or key.startswith("~"):
        return short_value(value) or key
    parts = key.split(".")
    # The last part of the key, unless another setting of the name ends in it. A seed is the run's.
    ambiguous = parts[-1] == "seed" or sum(other.split(".")[-1] == parts[-1] for other in keys) > 1
    return f"{_SHORT_KEYS.get(key) or '.'.join(parts[-2 if ambiguous else -1 :])}={short_value(value)}"
