"""What the folder of an earlier run says: its settings, how it ended, and which MLflow run it is."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import yaml

from runner.errors import UserError, first_line
from runner.track.card import FILE_NAME as CARD_FILE


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): restore it, or start a new run") from error
    return content


def summary_of_run(folder: Path) -> dict[str, Any]:
    """The content of `summary.json`; empty if the run has not ended, or was killed. Raises UserError."""
    path = folder / "summary.json"
    return read_json(path) if path.exists() else {}


def folder_of_mlflow_run(run_id: str, outputs: Path) -> Path | None:
    """The folder below `outputs` of the run with this id in MLflow."""
    for card in sorted(outputs.rglob(CARD_FILE)):
        with contextlib.suppress(UserError):  # a damaged one: the others can still be found
            if read_json(card).get("run_id") == run_id:
                return card.parent
    return None


def saved_settings(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings in a run's folder as plain data, and the packages that it trusted. Raises UserError.

    A folder may come from somebody else, and only the user can trust its code: the settings trust no package. Neither
    have they a tracking URI, which is written without its credentials.
    """
    file = folder / "config.yaml"
    try:
        settings: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        trusted, settings["trusted_packages"] = list(settings["trusted_packages"]), []
        tracking = settings["tracking"]
        tracking["uri"] = None
        if "kind" in tracking:  # of a run from before there were several trackers
            tracking["mlflow"] = tracking.pop("kind") == "mlflow"
        settings["device"]["file"] = None  # its content is among the settings
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise UserError(f"{file} does not hold the settings of a run ({first_line(error)}): restore it") from error
    return settings, trusted
