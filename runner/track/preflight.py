"""Whether the tracking store can be reached, asked before a run starts."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from runner.config.choices import TrackerName
from runner.config.schema import Tracking
from runner.errors import UserError
from runner.track.secrets import masked
from runner.track.store import default_store

#: Seconds that a tracking server has for its first answer. MLflow's own retries would take minutes.
ANSWER_WITHIN_S = 5.0


def check_tracking(tracking: Tracking) -> None:
    """Refuse a tracking server that does not answer. Raises UserError."""
    if tracking.kind is TrackerName.none:
        return
    if tracking.uri:
        _check_uri(tracking.uri)


def check_given_run(tracking: Tracking) -> None:
    """Refuse an MLFLOW_RUN_ID that nothing can be logged to. Raises UserError."""
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if run_id and tracking.kind is not TrackerName.none:
        _check_run(run_id, tracking.uri or default_store(Path.cwd()))


def _check_run(run_id: str, uri: str) -> None:
    # The one check that needs MLflow, and the seconds of its import.
    from mlflow.entities import LifecycleStage
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    no_run = UserError(f"MLFLOW_RUN_ID={run_id} is no run of {masked(uri)}: correct it, or unset it")
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise no_run  # asking would make the store
    try:
        found = MlflowClient(uri).get_run(run_id)
    except MlflowException as error:
        raise no_run from error
    if found.info.lifecycle_stage != LifecycleStage.ACTIVE:
        raise UserError(f"MLFLOW_RUN_ID={run_id} was deleted in {masked(uri)}: restore it there, or unset it")


def _check_uri(uri: str) -> None:
    shown = f"tracking.uri={masked(uri)}"
    try:
        scheme = urllib.parse.urlsplit(uri).scheme.partition("+")[0]  # without the database's driver
    except ValueError as error:
        raise UserError(f"{shown} is no address: {error}") from error
    if re.fullmatch(r"[\w.-]+:\d+", uri):
        raise UserError(f"{shown} looks like a server without its scheme: write http://{uri}")
    if scheme in ("http", "https"):
        _check_server(uri, shown)
    elif scheme not in ("", "file", "sqlite", "postgresql", "mysql", "mssql", "databricks"):
        raise UserError(f"{shown} has the scheme '{scheme}', which MLflow does not know: use http, https or sqlite")
    elif scheme == "sqlite":
        _check_sqlite(uri, shown)


def _check_server(uri: str, shown: str) -> None:
    # Any answer will do, one that asks for credentials too: MLflow brings those itself.
    parts = urllib.parse.urlsplit(uri)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/") + "/health")
    try:
        with urllib.request.urlopen(address.geturl(), timeout=ANSWER_WITHIN_S):
            pass
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"{shown} does not answer ({reason}): start the server, correct the address, or use tracking=none"
        ) from error


def _check_sqlite(uri: str, shown: str) -> None:
    path = uri.removeprefix("sqlite:///")
    folder = os.path.dirname(os.path.abspath(path)) or "."
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or os.path.isdir(path):
        raise UserError(
            f"{shown} cannot be a database file: {folder if os.path.isfile(folder) else path} is in the way"
        )
