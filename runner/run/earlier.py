"""Earlier runs: the folder of one, and what it says: its settings, its plan, and how it ended."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from runner.config.arguments import RESUME
from runner.config.plain import from_plain
from runner.config.schema import REMOVED_SYNC_SETTINGS
from runner.errors import UserError, did_you_mean, first_line
from runner.folder.files import started_ms
from runner.folder.lock import is_locked
from runner.folder.reading import files_below, folders_with, literal, read_json, read_settings
from runner.folder.record import FINISHED, KILLED, status_of
from runner.plan import Plan
from runner.plan.certificate import Certificate
from runner.plan.plan import digest_of_numbers
from runner.track.card import FILE_NAME as CARD_FILE

#: In place of a run: the one that started last of those that have not finished.
LATEST = "latest"
#: Unfinished runs that are listed where none of the given name is found.
_SHOWN = 3


def find_run(identifier: str, outputs: Path) -> Path:
    """The folder of a run, given the folder, `latest`, or its MLflow run id. Raises UserError.

    `outputs`: contains the folders of runs. `latest`: the one that started last of those that have not finished.
    """
    if (Path(identifier) / "config.yaml").exists():
        return Path(identifier)
    runs = [path.parent for path in outputs.glob("*/*/config.yaml")]
    unfinished = [run for run in runs if _is_unfinished(run)]
    if identifier == LATEST:
        if not unfinished:
            raise UserError(f"{RESUME}={LATEST}: there is no unfinished run in {outputs.resolve()}: give its folder")
        return max(unfinished, key=started_ms)
    if (folder := folder_of_mlflow_run(identifier, outputs)) is not None:
        return folder
    named = {run.name: run for run in runs}
    if identifier in named:
        return named[identifier]
    last = [run.name for run in sorted(unfinished, key=started_ms)[-_SHOWN:]]
    raise UserError(f"{RESUME}={identifier} is not a run in {outputs.resolve()}{did_you_mean(identifier, last)}")


def _is_unfinished(folder: Path) -> bool:
    try:
        return status_of(folder) != FINISHED and not is_locked(folder)
    except UserError:  # a damaged one: the others can still be found
        return False


def folder_of_mlflow_run(run_id: str, outputs: Path) -> Path | None:
    """The folder below `outputs` of the run with this id in MLflow."""
    for folder in sorted(folders_with(CARD_FILE, outputs)):
        with contextlib.suppress(UserError):  # a damaged one: the others can still be found
            if read_json(folder / CARD_FILE).get("run_id") == run_id:
                return folder
    return None


def saved_model(folder: Path) -> Path:
    """The folder of the model that a run has saved. Raises UserError if it has none, or a link in its folder."""
    files_below(folder)  # refuses links: what they lead to would be read, or written
    status, running = status_of(folder), is_locked(folder)
    if status != FINISHED or running:
        state = "is still running" if running else f"has ended as {status or KILLED}"
        raise UserError(f"{folder} {state}, so it has no saved model: give a run that has finished")
    model = folder / "model"
    if not model.is_dir():
        raise UserError(f"{folder} has no saved model: its folder model/ is missing; train it again")
    return model


def plan_of_run(folder: Path, refuse_changed: bool = True) -> Plan:
    """The plan in a run's folder. Raises UserError.

    `refuse_changed`: also for one that does not have its own digest, because it was changed.
    """
    file = folder / "plan.json"
    content = read_json(file)
    if content.pop("digest", None) != digest_of_numbers(content) and refuse_changed:
        raise UserError(f"{file} was changed after the run had written it: restore it, or start a new run")
    try:
        return from_plain(Plan, content)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} does not hold the plan of a run ({first_line(error)}): restore it") from error


def certificate_of_run(folder: Path) -> Certificate:
    """The certificate in a run's folder. Raises UserError."""
    file = folder / "certificate.json"
    content = read_json(file)
    try:
        return from_plain(Certificate, {**content, "properties": [*content["equal"], *content["different"]]})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} does not hold the certificate of a run ({first_line(error)}): restore it") from error


def saved_settings(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings in a run's folder as plain data, and the packages that it trusted. Raises UserError.

    A folder may come from somebody else, and says what the experiment is. Whose code is trusted, where the run is
    logged and where the cache is belongs to the command. No text among the settings is an interpolation.
    """
    file = folder / "config.yaml"
    settings = literal(read_settings(file))
    try:
        if unknown := {"hydra", "defaults"}.intersection(settings):
            raise ValueError(f"it sets {unknown.pop()}")
        trusted, settings["trusted_packages"] = list(settings["trusted_packages"]), []
        settings.pop("cache_dir", None)
        settings["tracking"]["uri"] = None
        removed = REMOVED_SYNC_SETTINGS.items()
        settings["sync"] = dict(item for item in settings["sync"].items() if item not in removed)
        settings["device"]["file"] = None  # its content is among the settings
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} does not hold the settings of a run ({first_line(error)}): restore it") from error
    return settings, trusted
