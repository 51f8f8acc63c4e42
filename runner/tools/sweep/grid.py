"""Which jobs a command asks for, before Hydra creates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override

from runner.backends.machine import available_cores
from runner.config.choices import Goal
from runner.config.schema import Config
from runner.errors import UserError, require
from runner.tools.sweep.slots import Needed, smallest_job
from runner.tools.sweep.sweep import job_name

#: Submitit's launcher for this machine.
_LOCAL = "submitit_launcher.LocalLauncher"


@dataclass(frozen=True)
class Grid:
    """`overrides`: of each job, by its name; None if an optimizing sweeper chooses the jobs.

    `total`: the number of jobs, None if unknown. `varied`: the settings that differ between jobs.
    """

    overrides: Mapping[str, Sequence[str]] | None
    total: int | None
    varied: tuple[str, ...]

    @property
    def jobs(self) -> tuple[str, ...] | None:
        """The names of the jobs."""
        return None if self.overrides is None else tuple(self.overrides)


def grid_of(overrides: Sequence[Override], hydra: Any) -> Grid:
    """The jobs of a command. `overrides`: with those of `hydra.sweeper.params`; `hydra`: Hydra's configuration node.

    Raises UserError for an interval, unless the sweeper is an optimizing one.
    """
    varied = dict.fromkeys(o.get_key_element().lstrip("+") for o in overrides if o.is_sweep_override())
    if not str(hydra.sweeper["_target_"]).endswith(".BasicSweeper"):
        return Grid(None, hydra.sweeper.get("n_trials"), tuple(varied))
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            key = override.get_key_element()
            raise UserError(
                f"{override.input_line} is an interval, which Hydra's basic sweeper does not support: list values "
                f"({key}=…,…), or choose an optimizing sweeper (hydra/sweeper=optuna)"
            )
    (batch,) = BasicSweeper.split_arguments(list(overrides), None)
    jobs = {job_name(without_hydra(job)): job for job in batch}
    return Grid(jobs, len(jobs), tuple(varied))


def without_hydra(overrides: Sequence[str]) -> list[str]:
    """The overrides of a job's own settings."""
    return [override for override in overrides if not override.lstrip("+~").startswith("hydra")]


def sweeper_overrides(hydra: Any, goal: Goal, given: Sequence[str]) -> list[str]:
    """Settings that an optimizing sweeper needs: the direction of the metric, and to continue after failed jobs.

    `given`: the command's overrides, which are respected. Raises UserError for the wrong direction.
    """
    found = []
    direction = hydra.sweeper.get("direction")
    name = direction if isinstance(direction, str) else getattr(direction, "name", None)  # None for several objectives
    wanted = {Goal.max: "maximize", Goal.min: "minimize"}[goal]
    if name is not None and name != wanted:
        key = "hydra.sweeper.direction"
        typed = any(override.startswith(f"{key}=") for override in given)
        require(not typed, key, name, f"evaluation.goal={goal.name} needs {wanted}; leave it out")
        found.append(f"{key}={wanted}")
    key = "hydra.sweeper.max_failure_rate"
    if "max_failure_rate" in hydra.sweeper and not any(override.startswith(f"{key}=") for override in given):
        found.append(f"{key}=1.0")
    return found


@dataclass(frozen=True)
class Launcher:
    """Where a sweep's jobs run: `at_once` of them in parallel.

    `here`: on this machine, and not, as Slurm does, where data and devices may differ. `in_process`: in the command's
    process. `smallest_job`: what it needs, if the jobs divide this machine between them. `overrides`: for Hydra, of the
    launcher's settings.
    """

    at_once: int
    here: bool
    in_process: bool
    smallest_job: Needed | None = None
    overrides: tuple[str, ...] = ()


def launcher_of(hydra: Any, jobs: int | None, configs: Sequence[Config]) -> Launcher:
    """What the settings say about the launcher, and for joblib's how many jobs fit this machine.

    `hydra`: Hydra's configuration node; `jobs`: their number, if known; `configs`: of jobs, with every value that is
    swept. Raises UserError.
    """
    target = str(hydra.launcher["_target_"])
    # A sweeper may hand over its jobs a few at a time: Optuna's and the others have different names for that.
    of_sweeper = [hydra.sweeper.get(name) for name in ("n_jobs", "max_batch_size")]
    limit = min([jobs or available_cores(), *filter(None, of_sweeper)])
    if "joblib" in target:
        key, n_jobs, smallest = "hydra.launcher.n_jobs", int(hydra.launcher.n_jobs), smallest_job(configs)
        require(n_jobs != 0, key, n_jobs, "use the number of parallel jobs, or -1 for as many as fit this machine")
        rule = f"a job needs {smallest.count} of this machine's {smallest}: use at most {smallest.jobs}"
        require(n_jobs <= smallest.jobs, key, n_jobs, rule)
        at_once = max(1, min(limit, n_jobs if n_jobs > 0 else smallest.jobs + 1 + n_jobs))
        overrides = [f"{key}={at_once}"]
        if hydra.launcher.get("batch_size") == "auto":  # gives one process several jobs after some that were skipped
            overrides.append("hydra.launcher.batch_size=1")
        return Launcher(at_once, True, in_process=at_once == 1, smallest_job=smallest, overrides=tuple(overrides))
    if target.endswith(_LOCAL):  # it starts all jobs
        return Launcher(limit, here=True, in_process=False)
    in_process = target.endswith(".BasicLauncher")
    return Launcher(1, here=in_process, in_process=in_process)
