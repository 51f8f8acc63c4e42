"""The tracking store of a run: its choice, checks before a run starts, errors and pages."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import re
import shlex
import sqlite3
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.config.schema import Tracking
from runner.errors import UserError, first_line, not_installed
from runner.folder.files import check_folder
from runner.track.description import VIEW_KEY, VIEW_TAG
from runner.track.secrets import is_masked, masked

#: A request that every MLflow server answers with JSON: of the interface that runs are sent to, so that it also works
#: behind a proxy that serves nothing else.
_EXPERIMENTS = "/api/2.0/mlflow/experiments/search?max_results=1"
#: Seconds that a tracking server has for its first response. MLflow's own retries would take minutes.
ANSWER_WITHIN_S = 5
#: A database's scheme -> the same with a driver, and the package of the driver.
_DRIVERS = {
    "postgresql": ("postgresql+psycopg2", "psycopg2-binary"),
    "mysql": ("mysql+pymysql", "pymysql"),
    "mssql": ("mssql+pyodbc", "pyodbc"),
}
#: Drivers' names for the seconds that connecting may take.
_TIME_LIMITS = {
    **dict.fromkeys(("psycopg2", "psycopg", "pymysql", "mysqldb"), "connect_timeout"),
    "pyodbc": "timeout",
    "mysqlconnector": "connection_timeout",
    "pymssql": "login_timeout",
}
_SCHEMES = ("", "file", "sqlite", "databricks", *_DRIVERS)
_SQLITE = "sqlite:///"
#: The first bytes of a database file.
_SQLITE_HEADER = b"SQLite format 3\0"


def default_store(root: Path) -> str:
    """The SQLite store under `outputs/` of a folder, as a tracking URI."""
    return f"{_SQLITE}{_default_database(root)}"


def _default_database(root: Path) -> Path:
    return (root / "outputs" / "mlflow.db").absolute()


def store_of(tracking: Tracking) -> str | None:
    """The tracking URI that runs are logged to, credentials included; None for tracking=none."""
    if not tracking.mlflow:
        return None
    return tracking.uri or default_store(Path.cwd())


def store_for(recorded: str | None, folder: Path, named: str | None, setting: str) -> str | None:
    """The tracking URI of a command that continues the run in `folder`; None for the command's default.

    `recorded`: by the run. Anybody may have written it, and credentials could go there with the run: it is used only if
    it is the default store of the current folder, or of the `outputs` folder that the run is in, and if that keeps
    artifacts in its own folder. `named`: by the command or its environment, and used as it is. `setting`: that names a
    store. Raises UserError.
    """
    if named is not None:
        return named
    own = _default_database(Path.cwd())
    parents = {*folder.resolve().parents, *folder.absolute().parents}
    of_run = [_default_database(parent.parent) for parent in parents if parent.name == "outputs"]
    usual = [own, *(database for database in of_run if not database.is_symlink())]
    chosen = own if recorded is None else database_of(recorded)
    if recorded is not None and (chosen is None or "?" in recorded or chosen.absolute() not in usual):
        fix = f"add {setting}={recorded} if you trust it, or choose another store with {setting}"
        here = [database for database in usual if database.exists()]
        if chosen is not None and not chosen.exists() and here:  # the project was moved
            fix = f"that does not exist; add {setting}={_SQLITE}{here[0]}"
        elif is_masked(recorded):
            fix = f"set MLFLOW_TRACKING_URI to it, with the credentials, or choose another store with {setting}"
        raise UserError(f"{folder} was logged to {recorded}, and a folder does not decide where it is sent: {fix}")
    assert chosen is not None
    store = f"{_SQLITE}{chosen.absolute()}"
    if (elsewhere := _artifacts_elsewhere(chosen)) is not None:
        raise UserError(
            f"{store} keeps artifacts outside of its folder, in {masked(elsewhere)}, and it may come with {folder}: "
            f"add {setting}={store} if you trust it, or choose another store"
        )
    return None if recorded is None else store


def _artifacts_elsewhere(database: Path) -> str | None:
    """A place outside of the store's folder to which a SQLite store sends artifacts; None if there is none."""
    query = "SELECT artifact_location FROM experiments UNION SELECT artifact_uri FROM runs"
    try:
        with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as store:
            found = [str(location) for (location,) in store.execute(query) if location]
    except sqlite3.Error:  # there is none, or MLflow says what is wrong with it
        return None
    own = database.parent.resolve() / "mlartifacts"
    for location in found:
        parts = urllib.parse.urlsplit(location)
        path = Path(urllib.parse.unquote(parts.path)).resolve()
        local = parts.scheme in ("", "file") and not parts.netloc
        # MLflow gives its own experiment, which is not used, such a folder below where the store was made.
        if not local or not (path.is_relative_to(own) or path.parts[-2:] == ("mlruns", "0")):
            return location
    return None


def how_to_sync(folder: Path, store: str | None) -> str:
    """The command that sends what the `store` of the run in `folder` is missing."""
    return f"python -m runner.track sync {shlex.quote(str(folder))}{_uri_option(store)}"


def _uri_option(store: str | None) -> str:
    """The option of a command on this store; empty if it is the command's default, or has credentials to be kept."""
    if store in (None, store_of(Tracking(mlflow=True))) or is_masked(masked(store)):
        return ""
    return f" --tracking-uri {shlex.quote(store)}"


def database_of(uri: str) -> Path | None:
    """The file of a SQLite store, None for any other store."""
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]) if uri.startswith(_SQLITE) else None


def check_tracking(tracking: Tracking) -> None:
    """Refuse an invalid tracking URI, a server or a file that is no MLflow store, and a tracker that is not installed.

    Raises UserError.
    """
    check_installed(tracking.local)
    uri = store_of(tracking)
    if uri is None:
        return
    shown = f"tracking.uri={masked(uri)}"
    try:
        scheme = urllib.parse.urlsplit(uri).scheme.partition("+")[0]  # without the database's driver
    except ValueError as error:
        raise UserError(f"{shown} is not a valid URI: {error}") from error
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        raise UserError(f"{shown} has no scheme: write http://{uri}")
    if scheme in ("http", "https"):
        _check_server(uri, shown)
    elif scheme not in _SCHEMES:
        raise UserError(f"{shown} has the scheme '{scheme}', which MLflow does not support: use http, https or sqlite")
    elif (path := database_of(uri)) is not None:
        _check_database(path, shown)
    elif scheme == "sqlite":
        raise UserError(
            f"{shown} names no file: write sqlite:///outputs/mlflow.db, or sqlite:////… for an absolute path"
        )
    elif scheme in _DRIVERS:
        _check_database_server(uri, scheme, shown)
    elif scheme in ("", "file"):
        check_folder("tracking.uri", uri.removeprefix("file:").removeprefix("//"))


def _check_database_server(uri: str, scheme: str, shown: str) -> None:
    """Check that the driver is installed, and that the database can be opened: MLflow would try for minutes.

    Raises UserError.
    """
    from sqlalchemy import create_engine, make_url  # such stores only
    from sqlalchemy.exc import SQLAlchemyError  # as above
    from sqlalchemy.pool import NullPool  # as above

    form, package = _DRIVERS[scheme]
    try:
        limit = _TIME_LIMITS.get(make_url(uri).get_driver_name())
        connect_args = {} if limit is None else {limit: ANSWER_WITHIN_S}
        engine = create_engine(uri, poolclass=NullPool, connect_args=connect_args)
    except (ImportError, SQLAlchemyError) as error:
        fix = f"pip install {package}, and begin the address with {form}://"
        raise UserError(f"{shown} has no usable driver ({masked(first_line(error))}): {fix}") from error
    try:
        engine.connect().close()
    except Exception as error:  # drivers raise more than SQLAlchemy's errors
        fix = "start the database, correct the address, user or password, or use tracking=none"
        raise UserError(f"{shown} cannot be opened ({error_summary(error)}): {fix}") from error


def check_installed(packages: Sequence[str]) -> None:
    """Raises UserError for a package that is not installed."""
    for package in packages:
        if not _is_installed(package):
            raise not_installed(f"tracking={package}", package)


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # W&B makes a folder of its own name, which is no package


def _check_database(path: Path, shown: str) -> None:
    if not path.exists():
        check_folder("tracking.uri", path)
        return
    try:
        with path.open("r+b") as file:  # nothing is written, but it fails if nothing could be
            start = file.read(len(_SQLITE_HEADER))
    except OSError as error:
        raise UserError(f"{shown} cannot be used ({error.strerror}): choose another file") from error
    if start not in (b"", _SQLITE_HEADER):
        raise UserError(f"{shown} is not an SQLite database: choose another file")


def _check_server(uri: str, shown: str) -> None:
    parts = urllib.parse.urlsplit(uri)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path="", query="", fragment="").geturl()
    fix = "start the server, correct the address, or use tracking=none"
    try:
        request = address + parts.path.rstrip("/") + _EXPERIMENTS
        with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S) as response:
            kind = response.headers.get_content_type()
            login = urllib.parse.urlsplit(response.url).hostname != parts.hostname
        if kind != "application/json" and not login:
            raise UserError(f"{shown} is not an MLflow server (it answers with {kind}): {fix}")
    except urllib.error.HTTPError as error:
        # MLflow sends credentials itself: a server that asks for them, or sends to a login page, may well be one.
        if error.code not in (401, 403):
            raise UserError(
                f"{shown} is not an MLflow server (it answers {error.code} {error.reason}): {fix}"
            ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return  # MLflow may have settings for it, such as MLFLOW_TRACKING_SERVER_CERT_PATH
        raise UserError(f"{shown} does not answer ({reason}): {fix}") from error


def make_database(path: Path) -> None:
    """Make MLflow's tables in a new SQLite file, all or none: a process killed meanwhile would leave half of them."""
    from mlflow.tracking import MlflowClient

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")  # MLflow makes no database twice in a process
    try:
        MlflowClient(f"{_SQLITE}{draft.absolute()}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def set_up_mlflow() -> None:
    """Set what MLflow reads when it is imported, or with each request."""
    # MLflow would repeat a request whose response was lost without asking whether it was processed, and so create a
    # second run; retries are decided here.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # Neither messages about the creation of a new store, nor a traceback for each error, which is also raised.
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def check_given_run(tracking: Tracking) -> None:
    """Refuse an MLFLOW_RUN_ID that is not an active run of the store. Raises UserError."""
    run_id, uri = os.environ.get("MLFLOW_RUN_ID"), store_of(tracking)
    if not run_id or uri is None:
        return
    set_up_mlflow()
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


def error_summary(error: Exception | None) -> str:
    """The first line of a store's error, without credentials and without the page of a server that is no MLflow.

    Without SQLAlchemy's remark about when it found out, too, which can precede the error.
    """
    line = first_line(error) if error is not None else "no answer"
    if line.startswith("(raised as a result of "):
        line = str(error).strip().partition("\n")[2].partition("\n")[0]
    return masked(re.split(r"\W*(?:Response body\W*)?<[!a-z]", line)[0])[:200] or "an HTML page"


def how_to_open(uri: str, page: str) -> Sequence[str]:
    """Lines that say how to open a page of a store: on a server, or with `runner.track ui` on this machine."""
    page = _with_training_menus(page)
    if uri.startswith(("http://", "https://")):
        return [f"  MLflow: {masked(uri).rstrip('/')}/{page}"]
    by_environment = is_masked(masked(uri)) and uri != os.environ.get("MLFLOW_TRACKING_URI")
    where = f", with MLFLOW_TRACKING_URI set to {masked(uri)}" if by_environment else _uri_option(uri)
    return [f"  MLflow: {python_command()} -m runner.track ui{where}", f"  then open http://127.0.0.1:5000/{page}"]


def python_command() -> str:
    """This process's Python as a word of a shell's command, which works in its current folder."""
    relative = os.path.relpath(sys.executable)
    return shlex.quote(min(relative if os.sep in relative else sys.executable, sys.executable, key=len))


def experiment_page(experiment: Any) -> str:
    """The address of an experiment's table of runs, with our columns if it has them. `experiment`: MLflow's entity."""
    view = f"?viewStateShareKey={VIEW_KEY}" if VIEW_TAG in experiment.tags else ""
    return _with_training_menus(f"experiments/{experiment.experiment_id}/runs{view}")


def _with_training_menus(page: str) -> str:
    """The address of a page. Without `workflowType`, MLflow shows its menus for agents."""
    return f"#/{page}{'&' if '?' in page else '?'}workflowType=machine_learning"


#: The address of the list of experiments.
EXPERIMENTS_PAGE = _with_training_menus("experiments")
