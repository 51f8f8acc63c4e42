"""What is wrong with a sweep's settings or tracking store, found before a folder is made."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from omegaconf import DictConfig

from runner.config.arguments import RESUME_SWEEP, HydraOptions
from runner.config.compose import compose, group_points, parsed, settings, sweep_points, with_sweeper_params
from runner.config.schema import Config
from runner.data.cache import Progress
from runner.errors import UserError, require
from runner.folder.files import check_folder
from runner.log import LOG
from runner.measure.fitting import with_fitting_micro_batches
from runner.measure.predicted import predicted
from runner.plan.experiment import Experiment, prepare
from runner.run.preflight import reading_data
from runner.tools.compare.verdict import has_default_margin
from runner.tools.sweep.command import SweepRequest
from runner.tools.sweep.grid import Grid, Launcher, grid_of, launcher_of, sweeper_overrides, without_hydra
from runner.tools.sweep.resume import find_sweep
from runner.tools.sweep.sweep import FILE_NAME as SWEEP_FILE
from runner.tools.sweep.sweep import Overrides, setup_of
from runner.track.secrets import masked, names_a_secret
from runner.track.store import check_tracking


def prepare_sweep(options: HydraOptions, started_at: float) -> SweepRequest:
    """Which jobs a sweep has, and its folder. Adds what an optimizing sweeper needs to `options`. Raises UserError.

    Every value that is swept is checked, and every job of a grid: as far as a run's preflight can if the jobs run on
    this machine, else the settings only. An optimizing sweeper's jobs are checked when they start.
    """
    started = time.monotonic()
    for override, meant in zip(options.overrides, parsed(options.overrides), strict=True):
        _refuse_written_secret(override, meant.value())

    @functools.cache  # many of these points are jobs, too
    def composed(*point: str) -> DictConfig:
        return compose(point, options.config_dirs)

    first = composed(*next(sweep_points(options.overrides)))
    overrides = with_sweeper_params(options.overrides, first.hydra)
    points = [composed(*point) for point in sweep_points(overrides)]
    configs = [settings(point) for point in points]
    hydra, config = points[0].hydra, configs[0]
    folder = Path(hydra.sweep.dir)
    check_folder("hydra.sweep.dir", str(folder))
    options.overrides += sweeper_overrides(hydra, config.evaluation.goal, options.overrides)
    check_tracking(config.tracking)
    if "MLFLOW_RUN_ID" in os.environ:
        raise UserError("MLFLOW_RUN_ID is set, but the jobs of a sweep cannot share one MLflow run: unset it")
    if options.resumed:
        folder = find_sweep(options.resumed, folder.parent)
    elif (folder / SWEEP_FILE).exists():
        raise UserError(
            f"hydra.sweep.dir={folder} already holds a sweep: resume it with {RESUME_SWEEP}={folder}, or choose another"
        )
    grid = grid_of(parsed(overrides), hydra)
    if several := [name for name in grid.varied if name.startswith("decide.")]:
        raise UserError(f"{several[0]} has several values, but it is for the whole sweep: give one")
    if options.adds_seeds:
        grid = _with_seeds(grid, config)
    if config.decide.race:
        _check_race(grid, configs, options.adds_seeds)
    if grid.overrides is None:
        for point in group_points(overrides):  # the sweeper can choose any
            composed(*point)
    with reading_data() as progress:
        seeds = config.decide.min_seeds if options.adds_seeds else 1
        launcher = launcher_of(hydra, None if grid.total is None else grid.total * seeds, configs)
        experiments = _checked_jobs(grid, composed, launcher, started, progress)
    _check_baseline(config.decide.baseline, experiments)
    setups = _setups(grid) if options.adds_seeds else ()
    if setups:
        grid = Grid(None, None, grid.varied)  # the sweeper chooses the seeds
    return SweepRequest(
        command=tuple(options.overrides),
        grid=grid,
        launcher=launcher,
        tracking=config.tracking,
        evaluation=config.evaluation,
        recipe=", ".join(dict.fromkeys(str(one.recipe["name"]) for one in configs)),
        folder=folder,
        started_at=started_at,
        decide=config.decide if options.adds_seeds or config.decide.race else None,
        setups=setups,
        predicted_s=None if options.resumed else _predicted(experiments, launcher.at_once),
    )


def _check_baseline(name: str | None, experiments: Sequence[Experiment]) -> None:
    """Refuse the name of a setup that none of the jobs has; what a sweep varies besides may follow in it."""
    names = sorted({one.setup_name.rpartition(" · s")[0] for one in experiments})
    known = name is None or not names or any(name == one or name.startswith(f"{one} · ") for one in names)
    require(known, "decide.baseline", name, f"the setups are {', '.join(names)}")


def _with_seeds(grid: Grid, config: Config) -> Grid:
    """The jobs of a sweep that adds seeds, with one of them, which varies. Raises UserError if it cannot decide."""
    if grid.overrides is None:
        raise UserError("seed=auto needs setups that the command lists: leave out hydra/sweeper, or give seeds")
    if len(grid.overrides) < 2:
        raise UserError("seed=auto compares setups: vary something else, such as device=cpu,cpu2")
    metric, margin = config.evaluation.metric, config.decide.margin
    if margin is None and not has_default_margin(metric):
        raise UserError(f"decide.margin=null is invalid: {metric} has no default margin, give one in its unit")
    narrow = margin is None or margin < 100 or not has_default_margin(metric)
    require(narrow, "decide.margin", margin, f"everything would be equivalent in {metric}, a percentage")
    return dataclasses.replace(grid, varied=(*grid.varied, "seed"))


def _check_race(grid: Grid, configs: Sequence[Config], adds_seeds: bool) -> None:
    """Refuse a race without competitors, or of setups that a sweeper chooses. Raises UserError."""
    if adds_seeds:
        raise UserError("decide.race=true and seed=auto are given together: race first, then add seeds to what is left")
    if grid.overrides is None:
        raise UserError(
            "decide.race=true needs setups that the command lists, not those of an optimizing sweeper: leave out "
            "hydra/sweeper, or decide.race"
        )
    if len(set(_setups(grid))) < 2:
        raise UserError("decide.race=true races setups: vary more than the seed, such as optimizer.lr=1e-4,3e-4")
    if len({(one.evaluation.metric, one.evaluation.goal, one.recipe["name"]) for one in configs}) > 1:
        raise UserError("decide.race=true ranks setups by one metric: use one recipe and one evaluation.metric")


def _setups(grid: Grid) -> tuple[Overrides, ...]:
    """The overrides of each setup, from jobs with one seed."""
    jobs = (grid.overrides or {}).values()
    return tuple(setup_of(without_hydra(job)) for job in jobs)


def _predicted(experiments: Sequence[Experiment], parallel: int) -> float | None:
    """Seconds of all jobs, `parallel` at a time; None if one of them has no prediction."""
    seconds = 0.0
    for experiment in experiments:
        prediction = predicted(experiment, parallel)
        if prediction is None:
            return None
        seconds += prediction.total.value
    return seconds / parallel if experiments else None


def _checked_jobs(
    grid: Grid, composed: Callable[..., DictConfig], launcher: Launcher, started: float, progress: Progress
) -> Sequence[Experiment]:
    """The experiments of a grid's jobs, any seed for those that differ in the seed only; none if they run elsewhere.

    `composed`: the configuration for some overrides. `started`: when the command began, on the monotonic clock. Raises
    UserError if one cannot run.
    """
    checked: list[tuple[Config, Experiment]] = []
    experiments: list[Experiment] = []
    for job in (grid.overrides or {}).values():
        try:
            config = settings(composed(*job))
            any_seed = dataclasses.replace(config, seed=0)
            if not launcher.here:
                continue
            known = next((experiment for other, experiment in checked if other == any_seed), None)
            if known is None:
                # Here, a measurement is not disturbed by other jobs.
                known = with_fitting_micro_batches(
                    prepare(config, progress), started, progress, LOG.info, jobs_at_once=launcher.at_once
                )
                checked.append((any_seed, known))
            experiments.append(known)
        except UserError as error:
            varied = ", ".join(value for value in job if value.lstrip("+").partition("=")[0] in grid.varied)
            raise UserError(f"{error} (job {varied}; no job was started)" if varied else str(error)) from error
    return experiments


def _refuse_written_secret(override: str, value: object) -> None:
    """Refuse a credential in an override: Hydra, `sweep.json` and the tracking store write a sweep's overrides down."""
    written = "and a sweep's overrides are written to files"
    if masked(override) != override:
        raise UserError(f"{masked(override)} holds credentials, {written}: put the address into MLFLOW_TRACKING_URI")
    for name in _written_secrets(override.partition("=")[0], value):
        raise UserError(f"{name}=*** is a credential, {written}: read it from the environment, '${{oc.env:NAME}}'")


def _written_secrets(key: str, value: object) -> Iterator[str]:
    """The settings in `key=value` whose name says that they hold a secret, unless the value is a reference to it."""
    if isinstance(value, QuotedString):
        value = value.text
    if isinstance(value, ChoiceSweep):
        value = value.list
    secret = names_a_secret(key.rpartition(".")[2])
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _written_secrets(key if secret else f"{key}.{name}", item)
    elif isinstance(value, list):
        for item in value:
            yield from _written_secrets(key, item)
    elif secret and value not in ("", None) and not str(value).startswith("${"):
        yield key
