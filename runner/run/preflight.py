"""Checks of a run's settings, data, model and tracking store, before a folder is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from runner.config.arguments import HydraOptions
from runner.config.compose import compose, settings
from runner.data.cache import Progress
from runner.errors import Terminal, UserError, require
from runner.folder.files import check_folder
from runner.log import LOG
from runner.measure.fitting import with_fitting_micro_batches
from runner.plan.experiment import Experiment, prepare, prepare_for_plan
from runner.run.progress import progress_bar
from runner.track.names import setting_labels
from runner.track.store import check_given_run, check_tracking

#: Bytes of the files that a run writes before its first step, generously.
_FILES_SIZE = 2**16


def prepare_run(options: HydraOptions) -> tuple[Experiment, Path]:
    """The experiment that a command asks for, and the folder for it, which is not made yet. Raises UserError."""
    started, cfg = time.monotonic(), compose(options.overrides, options.config_dirs)
    refuse_sweeper_params(cfg, "add -m")
    callbacks = cfg.hydra.callbacks
    require(
        not callbacks, "hydra.callbacks", callbacks, "only a sweep calls Hydra's callbacks; add -m, or leave it out"
    )
    config = settings(cfg)
    require(not config.decide.race, "decide.race", "true", "it is for a sweep, whose setups race: add -m")
    varied, typed = setting_labels(options.overrides)
    with reading_data() as progress:
        experiment = prepare(config, progress, varied, typed)
        experiment = with_fitting_micro_batches(experiment, started, progress, LOG.info)
    folder = Path(cfg.hydra.run.dir)
    check_folder("hydra.run.dir", str(folder), size=_FILES_SIZE)
    refuse_used_folder(folder)
    check_tracking(config.tracking)
    check_given_run(config.tracking)
    return experiment, folder


def prepare_run_for_plan(options: HydraOptions, progress: Progress) -> Experiment:
    """Prepare an experiment without a folder, also if the data or the model are absent. Raises UserError."""
    cfg = compose(options.overrides, options.config_dirs)
    refuse_sweeper_params(cfg, "plan one of its jobs, such as batch=per_device sync.k=4")
    return prepare_for_plan(settings(cfg), progress)


def refuse_used_folder(folder: Path) -> None:
    """Refuse a folder that holds a run. Raises UserError."""
    if (folder / "config.yaml").exists():
        raise UserError(f"hydra.run.dir={folder} already holds a run: choose another folder")


def busy_folder(folder: Path) -> UserError:
    return UserError(f"hydra.run.dir={folder} is used by a run that has not ended: end it, or choose another folder")


def refuse_sweeper_params(cfg: DictConfig, fix: str) -> None:
    """Refuse what only a sweep can run, such as `sweep=kbatch` without -m. Raises UserError."""
    if cfg.hydra.sweeper.params:
        raise UserError(f"hydra.sweeper.params is set (by sweep=…?), which makes this a sweep of several jobs: {fix}")


@contextlib.contextmanager
def reading_data() -> Iterator[Progress]:
    """Shown on a terminal: a large data set may have to be prepared before its rows can be counted."""
    with progress_bar(Terminal(stderr=True)) as bar:
        task = bar.add_task("reading the data", total=None, numbers="")

        def preparing(done: int, total: int) -> None:
            numbers = f"{done:,}/{total:,} samples"
            bar.update(task, description="preparing the data", completed=done, total=total, numbers=numbers)

        yield preparing
