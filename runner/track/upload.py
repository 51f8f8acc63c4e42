"""Bringing runs to a tracking store after they have ended: the same delivery that a running job has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import UserError
from runner.folder.files import write_json
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import RunCard
from runner.track.delivery import Delivery


@dataclass(frozen=True)
class Delivered:
    """`closed`: whether the run has ended, and the store knows it."""

    folder: Path
    run_id: str
    closed: bool


def runs_below(folder: Path) -> list[Path]:
    """The folders of runs in a folder, itself among them; a sweep's own stands before its jobs'. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give a run's folder, a sweep's, or one that holds them")
    found = sorted((path.parent for path in folder.rglob(CARD_FILE)), key=lambda path: (len(path.parts), path))
    if not found:
        raise UserError(f"{folder} holds no run: no folder in it has a {CARD_FILE}")
    return found


def store_and_runs(folder: Path, given: str | None) -> tuple[str, list[Path]]:
    """The store that the runs below a folder were logged to, and these runs; all of them if a store is given.

    What was logged to no store, as under `tracking=none`, was not meant to be in one. Raises UserError.
    """
    runs = runs_below(folder)
    if given:
        return given, runs
    stores, unreadable = _stores(runs)
    if not stores:
        raise unreadable[0]
    logged = {run: store for run, store in stores.items() if store is not None}
    where = "say where to with --tracking-uri or MLFLOW_TRACKING_URI"
    if not logged:
        raise UserError(f"{folder} was logged to no store: {where}")
    if len(set(logged.values())) > 1:
        raise UserError(f"{folder} holds runs of several stores: {where}")
    store = next(iter(logged.values()))
    path = Path(store.removeprefix("sqlite:///").partition("?")[0])
    if store.startswith("sqlite:///") and not path.exists():
        raise UserError(f"{folder} was logged to {store}, which is not there: {where}")
    if "***@" in store or "=***" in store:
        raise UserError(f"{folder} does not say the credentials of its store, {store}: {where}")
    return store, [run for run in runs if run in logged or run not in stores]


def _stores(runs: Sequence[Path]) -> tuple[dict[Path, str | None], list[UserError]]:
    """Where runs were logged to, and what is wrong with the cards that do not say it."""
    stores: dict[Path, str | None] = {}
    unreadable = []
    for run in runs:
        try:
            stores[run] = RunCard.read(run).store
        except UserError as error:
            unreadable.append(error)
    return stores, unreadable


def _note_run_id(folder: Path, run_id: str | None) -> None:
    """Say in `summary.json` where the run is, if it was not known when that was written."""
    path = folder / "summary.json"
    if path.exists() and "mlflow_run_id" in (summary := json.loads(path.read_text())) and not summary["mlflow_run_id"]:
        write_json(path, {**summary, "mlflow_run_id": run_id})


def deliver(folder: Path, uri: str, status: str | None = None) -> Delivered:
    """Bring what is missing of a run, and close it if it has ended.

    `status`: how a run ended that could not say so itself, because its process was killed.
    """
    card = RunCard.read(folder)
    delivery = Delivery(card, folder, uri, resumed=True)
    delivery.open()
    _note_run_id(folder, delivery.run_id)
    delivery.ship()
    if card.status is None and status is not None:
        delivery.settle(status, {})
    if delivery.card.status is not None:
        delivery.close()
    assert delivery.run_id is not None
    return Delivered(folder, delivery.run_id, delivery.card.status is not None)
