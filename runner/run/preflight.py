"""Everything that a user can have got wrong, found before a folder is made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from runner.errors import UserError
from runner.track.secrets import masked, names_a_secret

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.config.hydra_options import HydraOptions
    from runner.sweep.command import SweepRequest


def preflight(options: HydraOptions) -> None:
    """Find everything that a user can have got wrong about a run before a folder is made. Raises UserError."""
    from runner.config.compose import compose, settings
    from runner.plan.experiment import prepare
    from runner.track.store import check_given_run, check_tracking

    cfg = compose(options.overrides, options.config_dirs)
    refuse_sweeper_params(cfg, "add -m")
    config = settings(cfg)
    _check_folder("cache_dir", config.cache_dir)
    with reading_data():
        prepare(config)
    _check_folder("hydra.run.dir", cfg.hydra.run.dir)
    refuse_used_folder(Path(cfg.hydra.run.dir))
    check_tracking(config.tracking)
    check_given_run(config.tracking)


def refuse_used_folder(folder: Path) -> None:
    """Refuse a run's folder in which another has begun. Raises UserError."""
    if (folder / "config.yaml").exists():
        raise used_folder(folder)


def used_folder(folder: Path) -> UserError:
    return UserError(f"hydra.run.dir={folder} holds a run already: choose another folder")


def refuse_sweeper_params(cfg: DictConfig, mend: str) -> None:
    if cfg.hydra.sweeper.params:
        raise UserError(f"hydra.sweeper.params is set (by sweep=…?), so this is a sweep of several jobs: {mend}")


def reading_data() -> Status:
    """Seen in a terminal, where large data may have to be tokenised before their rows can be counted."""
    return Console(stderr=True).status("reading the data")


def sweep_preflight(options: HydraOptions, started_at: float) -> SweepRequest:
    """The same about a sweep; which jobs it has, and where. Raises UserError.

    Only the composition is checked, over every value that is swept: a combination that cannot be run is a failed job
    among others.
    """
    from runner.config.compose import compose, parsed, settings, sweep_points, with_sweeper_params
    from runner.sweep.command import SweepRequest
    from runner.sweep.grid import grid_of, sweeper_overrides
    from runner.sweep.resume import KEY, find_sweep
    from runner.sweep.sweep import FILE_NAME as SWEEP_FILE
    from runner.track.store import check_tracking

    for override, meant in zip(options.overrides, parsed(options.overrides), strict=True):
        _refuse_written_secret(override, meant.value())
    first = compose(next(sweep_points(options.overrides)), options.config_dirs)
    overrides = with_sweeper_params(options.overrides, first.hydra)
    points = [compose(point, options.config_dirs) for point in sweep_points(overrides)]
    _check_folder("hydra.sweep.dir", points[0].hydra.sweep.dir)
    first_settings = settings(points[0])
    tracking = first_settings.tracking
    for override in sweeper_overrides(points[0].hydra, first_settings.evaluation.goal, options.overrides):
        options.add(override)
    check_tracking(tracking)
    if "MLFLOW_RUN_ID" in os.environ:
        raise UserError("MLFLOW_RUN_ID is set, and the jobs of a sweep cannot all be that run: unset it")
    folder = Path(points[0].hydra.sweep.dir)
    if options.resumed:
        folder = find_sweep(options.resumed, folder.parent)
    elif (folder / SWEEP_FILE).exists():
        raise UserError(f"hydra.sweep.dir={folder} holds a sweep already: go on with {KEY}={folder}, or choose another")
    return SweepRequest(
        command=tuple(options.overrides),
        grid=grid_of(parsed(overrides), points[0].hydra),
        hydra=points[0].hydra,
        tracking=tracking,
        evaluation=first_settings.evaluation,
        folder=folder,
        started_at=started_at,
    )


def _refuse_written_secret(override: str, value: object) -> None:
    """Of a sweep every override is written down: by Hydra, in `sweep.json`, and in the tracking store."""
    written = "and a sweep's overrides are written to files"
    if masked(override) != override:
        raise UserError(f"{masked(override)} holds credentials, {written}: put the address into MLFLOW_TRACKING_URI")
    key = override.partition("=")[0]
    for name in _written_secrets(key, value):
        raise UserError(f"{name}=*** names a credential, {written}: take it from outside, '${{oc.env:NAME}}'")


def _written_secrets(key: str, value: object) -> Iterator[str]:
    """The settings in `key=value` that name a secret and hold it, and no reference to where it is."""
    from hydra.core.override_parser.types import ChoiceSweep, QuotedString

    if isinstance(value, QuotedString):
        value = value.text
    if isinstance(value, ChoiceSweep):
        value = value.list
    secret = names_a_secret(key.rpartition(".")[2])
    if isinstance(value, Mapping):
        for name, item in value.items():  # all of a mapping that names a secret is one, whatever its keys
            yield from _written_secrets(key if secret else f"{key}.{name}", item)
    elif isinstance(value, list):
        for item in value:
            yield from _written_secrets(key, item)
    elif secret and value not in ("", None) and not str(value).startswith("${"):
        yield key


def _check_folder(setting: str, folder: str) -> None:
    """Refuse a folder that cannot be made, without making it."""
    existing = Path(folder).expanduser().absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    shown = f"{setting}={folder} cannot be made"
    if not existing.is_dir():
        raise UserError(f"{shown}: {existing} is a file; choose another folder")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{shown}: {existing} cannot be written to; choose another folder")
