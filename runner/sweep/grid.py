"""Which jobs a command asks for, before Hydra makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override

from runner.backends.machine import available_cores
from runner.config.choices import Goal
from runner.errors import UserError
from runner.sweep.sweep import job_name


@dataclass(frozen=True)
class Grid:
    """`jobs`: their names, None where an optimizing sweeper draws them. `total`: how many, None if it does not say.

    `varied`: settings that differ between them.
    """

    jobs: tuple[str, ...] | None
    total: int | None
    varied: tuple[str, ...]


def grid_of(overrides: Sequence[Override], hydra: Any) -> Grid:
    """The jobs of parsed overrides, `hydra.sweeper.params` among them, under the node `hydra` of the configuration.

    Raises UserError for a range that only an optimizing sweeper can draw from.
    """
    swept = dict.fromkeys(o.get_key_element().lstrip("+") for o in overrides if o.is_sweep_override())
    if not str(hydra.sweeper["_target_"]).endswith(".BasicSweeper"):
        return Grid(None, hydra.sweeper.get("n_trials"), tuple(swept))
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line} is a range to draw from, which Hydra's basic sweeper does not do: give values "
                f"({override.get_key_element()}=…,…), or an optimizing sweeper (hydra/sweeper=optuna)"
            )
    (batch,) = BasicSweeper.split_arguments(list(overrides), None)
    own = ([override for override in job if not override.lstrip("+~").startswith("hydra")] for job in batch)
    jobs = tuple(dict.fromkeys(map(job_name, own)))
    return Grid(jobs, len(jobs), tuple(swept))


def sweeper_overrides(hydra: Any, goal: Goal, given: Sequence[str]) -> list[str]:
    """What an optimizing sweeper has to be told: which way the metric is better, and that a failed job is no end.

    `given`: the command's overrides, which are left as they are. Raises UserError if they look for the worst.
    """
    direction = _direction(hydra, goal, given)
    failures = "hydra.sweeper.max_failure_rate"
    tolerant = "max_failure_rate" in hydra.sweeper and not any(one.startswith(f"{failures}=") for one in given)
    return [*([direction] if direction else []), *([f"{failures}=1.0"] if tolerant else [])]


def _direction(hydra: Any, goal: Goal, given: Sequence[str]) -> str | None:
    wanted = {Goal.max: "maximize", Goal.min: "minimize"}[goal]
    direction = hydra.sweeper.get("direction")
    if not isinstance(direction, str) and getattr(direction, "name", None) is None:
        return None  # no optimizing sweeper, or one with several objectives
    key = "hydra.sweeper.direction"
    if (direction if isinstance(direction, str) else direction.name) == wanted:
        return None
    if any(override.startswith(f"{key}=") for override in given):
        raise UserError(f"{key}={direction} looks for the worst, since evaluation.goal={goal.name}: leave it out")
    return f"{key}={wanted}"


def at_once(hydra: Any, jobs: int | None) -> int:
    """How many jobs run side by side on this machine, as far as the launcher's settings say. Raises UserError."""
    launcher = str(hydra.launcher["_target_"])
    limit = jobs or available_cores()
    if "joblib" in launcher:
        wanted = int(hydra.launcher.n_jobs)
        if not wanted:
            raise UserError("hydra.launcher.n_jobs=0 cannot be: it is the number of jobs at once, -1 for one per core")
        return max(1, min(limit, wanted if wanted > 0 else available_cores() + 1 + wanted))
    if launcher.endswith("submitit_launcher.LocalLauncher"):
        return limit  # it starts them all
    return 1


def in_process(hydra: Any) -> bool:
    """Whether the launcher runs jobs in the process of the command."""
    return str(hydra.launcher["_target_"]).endswith(".BasicLauncher")
