"""From what the user names to runs: folders, ids, an experiment, a sweep, a CSV file; and back to a sweep's parent."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.compare.runs import Found
from runner.errors import UserError
from runner.track.secrets import masked

if TYPE_CHECKING:
    from runner.compare.from_mlflow import Store


def find_runs(options: argparse.Namespace) -> Found:
    """The runs that the options name. Raises UserError."""
    if options.csv is not None:
        from runner.compare.from_csv import read_csv

        return read_csv(options.csv)
    if options.sweep is not None:
        folder = Path("outputs") / "sweeps" / options.sweep
        if folder.is_dir():
            return _from_arguments([str(folder)], options)
    if options.runs:
        return _from_arguments(options.runs, options)
    store = open_store(options.tracking_uri)
    if options.experiment is not None:
        runs, what = store.experiment(options.experiment), f"--experiment={options.experiment}"
    else:
        runs, what = store.sweep(options.sweep), f"--sweep={options.sweep}"
    if not runs:
        raise UserError(f"{what} has no runs in {masked(store.uri)}: check the name, or --tracking-uri")
    return store.read(runs, options.metric)


def open_store(option: str | None) -> Store:
    """The MLflow store, after a check that it is there. Raises UserError."""
    from runner.compare.from_mlflow import Store, check_store, store_uri

    uri = store_uri(option)
    name = "--tracking-uri" if option or "MLFLOW_TRACKING_URI" not in os.environ else "MLFLOW_TRACKING_URI"
    check_store(uri, f"{name}={masked(uri)}")
    return Store(uri)


def _from_arguments(arguments: Sequence[str], options: argparse.Namespace) -> Found:
    """Runs by folder and by MLflow id, in any mixture."""
    from runner.compare.from_folders import read_folders, run_folders
    from runner.compare.from_mlflow import RUN_ID

    folders: list[tuple[str, Path]] = []
    ids: list[str] = []
    for argument in dict.fromkeys(arguments):
        if Path(argument).exists():
            folders += [(os.path.relpath(path), path) for path in run_folders(Path(argument))]
        elif RUN_ID.fullmatch(argument):
            ids.append(argument)
        else:
            raise UserError(f"{argument} is neither a folder nor an MLflow run id (32 hexadecimal digits): check it")
    found = read_folders(list(dict.fromkeys(folders)), options.metric) if folders else Found([])
    if not ids:
        return found
    store = open_store(options.tracking_uri)
    logged = store.read([run for one in ids for run in store.run_or_children(one)], options.metric)
    return _merged(found, logged)


def _merged(found: Found, logged: Found) -> Found:
    """Both, each run once: a folder may be given beside the run's own id."""
    ids = {run.mlflow_run_id for run in found.runs}
    runs = [*found.runs, *(run for run in logged.runs if run.mlflow_run_id not in ids)]
    return Found(runs, [*found.refused, *logged.refused])


def with_parent(found: Found, tracking_uri: str | None) -> tuple[Found, Store | None]:
    """The runs' common parent in MLflow, if they are all children of one, and the store that knows it.

    A store that is not there is no reason to refuse a comparison of folders: then there is no parent.
    """
    ids = [run.mlflow_run_id for run in found.runs if run.mlflow_run_id]
    if len(ids) < len(found.runs) or not ids:
        return found, None
    from runner.compare.from_mlflow import Store, store_is_there, store_uri

    uri = store_uri(tracking_uri)
    if not store_is_there(uri):
        return found, None
    store = Store(uri)
    parents = store.parents(ids)
    if len(parents) < len(ids) or len(set(parents)) != 1 or parents[0] is None:
        return found, None
    return dataclasses.replace(found, parent=parents[0]), store
