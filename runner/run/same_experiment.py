"""The settings of a run that belong to its experiment and stay when it is resumed, and those that may change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.config.arguments import key_of
from runner.config.compose import parsed
from runner.config.plain import to_plain
from runner.config.schema import SETUP_DIGEST_EXCLUDES, Config
from runner.folder.files import strict_json
from runner.plan import Plan
from runner.track.secrets import masked, names_a_secret, without_credentials

#: Names that a resumed run may change: how it is executed, logged and saved. Groups, settings, and settings of groups.
GROUPS = (
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
#: Settings of these groups that the run has given to its tracking store at its start.
GIVEN = ("tracking.experiment", "tracking.run_name")
#: Where things are sent and written, and whose code is run: decided by the command.
_NOT_OF_THE_FOLDER = ("tracking.uri", "cache_dir", "trusted_packages")
SETTINGS = (
    *("log_every", "verbose", "compile", "gradient_checkpointing", "evaluation.micro_batch"),
    *("nonfinite_steps", "cache_dir", "trusted_packages"),
)


def recorded_experiment(config: Config, plan: Plan) -> dict[str, Any]:
    """The experiment as checkpoints record it, in JSON: settings and plan without how they are executed."""
    left_out = {*GROUPS, *SETTINGS, *SETUP_DIGEST_EXCLUDES} - {"seed"}
    kept = {name: value for name, value in to_plain(config).items() if name not in left_out}
    kept["evaluation"].pop("micro_batch")
    content: dict[str, Any] = json.loads(strict_json({"settings": kept, "plan": plan.of_experiment}))
    return {part: without_credentials(values) for part, values in content.items()}


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str] | None:
    """The part, `settings` or `plan`, and the sentence for what differs first between two records of an experiment."""
    for part in ("settings", "plan"):
        for name, old, new in _differences(without_credentials(before.get(part, {})), now[part]):
            return part, f"{name} is {new}, and was {old} then"
    return None


def _differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, old and new value of what differs. What only one has is of another version, except in a recipe."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*before, *now)):
            if (key in before and key in now) or name.startswith("recipe"):
                yield from _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield name, before, now


def may_change(override: str) -> bool:
    """True if a resumed run may have this override: it changes how the run is executed, and not the experiment."""
    (parsed_override,) = parsed([override])
    key = parsed_override.get_key_element().lstrip("+~")
    if parsed_override.is_delete() or parsed_override.is_add() or parsed_override.is_sweep_override():
        return False
    return key in SETTINGS or (key.partition(".")[0] in GROUPS and key not in GIVEN)


def to_repeat(override: str) -> bool:
    """True if the command that resumes the run needs this override, too: its folder cannot say so."""
    return key_of(override) in _NOT_OF_THE_FOLDER and masked(override) == override


def changes_execution(override: str) -> bool:
    """True if workers that torchrun starts again need this override: `config.yaml` has the others.

    It also has how many micro-batches there were, or have become for lack of memory, but no secrets.
    """
    key = key_of(override)
    return names_a_secret(key.rpartition(".")[2]) or (may_change(override) and not key.startswith("accumulation"))


def overrides_to_start_again(overrides: Sequence[str], workers: int) -> list[str]:
    """The overrides with which torchrun's `workers` continue the run that it has started with `overrides`."""
    return [*(one.lstrip("+") for one in filter(changes_execution, overrides)), f"device.workers={workers}"]
