"""Which tracking store a run is logged to, and whether it can be reached: checked before a run starts."""

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

#: Seconds that a tracking server has for its first response. MLflow's own retries would take minutes.
ANSWER_WITHIN_S = 5.0
_SCHEMES = ("", "file", "sqlite", "postgresql", "mysql", "mssql", "databricks")
_SQLITE = "sqlite:///"


def default_store(root: Path) -> str:
    """The SQLite store under `outputs/` of a folder, as a tracking URI."""
    return f"{_SQLITE}{(root / 'outputs' / 'mlflow.db').absolute()}"


def store_of(tracking: Tracking) -> str | None:
    """The tracking URI that runs are logged to, credentials included; None for tracking=none."""
    if tracking.kind is TrackerName.none:
        return None
    return tracking.uri or default_store(Path.cwd())


def database_of(uri: str) -> Path | None:
    """The file of a SQLite store, None for any other store."""
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]) if uri.startswith(_SQLITE) else None


def check_tracking(tracking: Tracking) -> None:
    """Refuse an invalid tracking URI, and a server that does not answer. Raises UserError."""
    uri = tracking.uri
    if tracking.kind is TrackerName.none or not uri:
        return
    shown = f"tracking.uri={masked(uri)}"
    try:
        scheme = urllib.parse.urlsplit(uri).scheme.partition("+")[0]  # without the database's driver
    except ValueError as error:
        raise UserError(f"{shown} is not a valid URI: {error}") from error
    if re.fullmatch(r"[\w.-]+:\d+", uri):
        raise UserError(f"{shown} has no scheme: write http://{uri}")
    if scheme in ("http", "https"):
        _check_server(uri, shown)
    elif scheme not in _SCHEMES:
        raise UserError(f"{shown} has the scheme '{scheme}', which MLflow does not support: use http, https or sqlite")
    elif (path := database_of(uri)) is not None:
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not existing.is_dir():
            blocking = path if path.is_dir() else existing
            raise UserError(f"{shown} cannot be a database file: {blocking} is in the way; choose another path")


def _check_server(uri: str, shown: str) -> None:
    # Any response will do, also one that asks for credentials: MLflow sends those itself.
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


def check_given_run(tracking: Tracking) -> None:
    """Refuse an MLFLOW_RUN_ID that is not an active run of the store. Raises UserError."""
    run_id, uri = os.environ.get("MLFLOW_RUN_ID"), store_of(tracking)
    if not run_id or uri is None:
        return
    from mlflow.entities import LifecycleStage
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    missing = UserError(f"MLFLOW_RUN_ID={run_id} is not a run of {masked(uri)}: correct it, or unset it")
    path = database_of(uri)
    if path is not None and not path.exists():
        raise missing  # a query would create the store
    try:
        found = MlflowClient(uri).get_run(run_id)
    except MlflowException as error:
        raise missing from error
    if found.info.lifecycle_stage != LifecycleStage.ACTIVE:
        raise UserError(f"MLFLOW_RUN_ID={run_id} was deleted in {masked(uri)}: restore it there, or unset it")
