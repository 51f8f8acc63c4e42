"""Find runs in MLflow, and read them from the folders that the runner logged with them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.compare.from_folders import FILES, read_folders
from runner.compare.runs import Found, Refused
from runner.errors import UserError, did_you_mean, first_line
from runner.track.secrets import masked
from runner.track.store import default_store

RUN_ID = re.compile(r"[0-9a-f]{32}")
_PARENT, _SWEEP, _JOBS = "mlflow.parentRunId", "sweep.id", "sweep.jobs"
_PAGE = 1000


def store_uri(option: str | None) -> str:
    """The address of the store: the option, the environment's, else the one under `outputs/` of the current folder."""
    return option or os.environ.get("MLFLOW_TRACKING_URI") or default_store(Path.cwd())


def check_store(uri: str, shown: str) -> None:
    """Refuse a store that cannot be asked, without making one. `shown`: option and value. Raises UserError."""
    from runner.config.choices import TrackerName
    from runner.config.schema import Tracking
    from runner.track.store import check_tracking

    try:
        check_tracking(Tracking(TrackerName.mlflow, uri))
    except UserError as error:
        # That check knows the address as a setting of a run.
        message = str(error).replace(f"tracking.uri={masked(uri)}", shown)
        raise UserError(message.replace("or use tracking=none", "or give the runs' folders")) from error
    if uri.startswith("sqlite:///"):
        _check_sqlite(Path(uri.removeprefix("sqlite:///")), shown)
    elif "://" not in uri or uri.startswith("file:"):
        path = Path(uri.removeprefix("file://").removeprefix("file:"))
        if not path.is_dir():
            raise UserError(f"{shown}: there is no folder {path}; correct the address, or give the runs' folders")


def _check_sqlite(path: Path, shown: str) -> None:
    mend = "correct the address with --tracking-uri, or give the runs' folders"
    if not path.is_file():
        raise UserError(f"{shown}: there is no such store; {mend}")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.Error as error:
        raise UserError(f"{shown}: {path} is no SQLite database ({error}); {mend}") from error
    if "experiments" not in tables:
        raise UserError(f"{shown}: {path} is no store of MLflow's (it has no experiments); {mend}")


def store_is_there(uri: str) -> bool:
    """Whether a store can be asked without making it; for callers that can do without one."""
    try:
        check_store(uri, masked(uri))
    except UserError:
        return False
    return True


class Store:
    """An MLflow store that has been checked. Raises UserError where it will not answer."""

    def __init__(self, uri: str) -> None:
        # A store in trouble must not hold the command up, and progress bars belong to nobody here.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        from mlflow.tracking import MlflowClient

        self.uri = uri
        with self._asking():
            self._client = MlflowClient(uri)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # MLflow's own, its database's, its driver's: they have nothing in common
            raise UserError(f"the store {masked(self.uri)} does not answer: {masked(first_line(error))}") from error

    def experiment(self, name: str) -> list[Any]:
        """Every run of an experiment."""
        with self._asking():
            found = self._client.get_experiment_by_name(name)
            if found is None:
                names = [one.name for one in self._client.search_experiments()]
                raise UserError(f"--experiment={name} is none in {masked(self.uri)}{did_you_mean(name, names)}")
            return self._search("", [found.experiment_id])

    def sweep(self, identity: str) -> list[Any]:
        """Every run that carries this sweep's id."""
        if "'" in identity and '"' in identity:
            raise UserError(f"--sweep={identity} cannot be a sweep's id: it has quotation marks of both kinds")
        quote = '"' if "'" in identity else "'"
        with self._asking():
            return self._search(f"tags.`{_SWEEP}` = {quote}{identity}{quote}")

    def run_or_children(self, run_id: str) -> list[Any]:
        """The run with this id, or its children if it has any."""
        with self._asking():
            own = self._search(f"attributes.run_id = '{run_id}'")
            if not own:
                raise UserError(f"{run_id} is no run of {masked(self.uri)}: check the id, or --tracking-uri")
            return self._search(f"tags.`{_PARENT}` = '{run_id}'") or own

    def parents(self, run_ids: Sequence[str]) -> list[str | None]:
        """The parent of each of these runs that the store knows."""
        listed = ", ".join(f"'{run_id}'" for run_id in run_ids if RUN_ID.fullmatch(run_id))
        if not listed:
            return []
        with self._asking():
            return [run.data.tags.get(_PARENT) for run in self._search(f"attributes.run_id IN ({listed})")]

    def _search(self, query: str, experiments: Sequence[str] | None = None) -> list[Any]:
        if experiments is None:
            experiments = [one.experiment_id for one in self._pages(self._client.search_experiments)]
        return self._pages(self._client.search_runs, experiments, query, order_by=["attributes.start_time ASC"])

    @staticmethod
    def _pages(search: Any, *arguments: Any, **options: Any) -> list[Any]:
        page = search(*arguments, max_results=_PAGE, **options)
        found = list(page)
        while page.token:
            page = search(*arguments, max_results=_PAGE, page_token=page.token, **options)
            found += page
        return found

    def read(self, runs: Sequence[Any], metric: str | None) -> Found:
        """Those of `runs` that finished, read from their files. Raises UserError."""
        parents = {run.data.tags.get(_PARENT) for run in runs}
        folders: list[tuple[str, Path]] = []
        refused: list[Refused] = []
        starts = {run.info.run_id: run.info.start_time for run in runs}
        with tempfile.TemporaryDirectory(prefix="runner-compare-") as folder:
            for run in {run.info.run_id: run for run in runs}.values():
                source = run.info.run_id
                if _JOBS in run.data.tags or source in parents:
                    refused.append(Refused(_named(run), "the parent of a sweep"))
                elif run.info.status != "FINISHED":
                    refused.append(Refused(_named(run), run.info.status))
                else:
                    folders.append((source, self._download(source, Path(folder) / source)))
            found = read_folders(folders, metric)
        ordered = [dataclasses.replace(r, mlflow_run_id=r.source, order=f"{starts[r.source]:020d}") for r in found.runs]
        return Found(ordered, [*refused, *found.refused])

    def _download(self, run_id: str, folder: Path) -> Path:
        """The run's small files in a folder of its own."""
        folder.mkdir()
        with self._asking():
            there = {artifact.path for artifact in self._client.list_artifacts(run_id)}
            for name in FILES:
                if name in there:
                    self._client.download_artifacts(run_id, name, str(folder))
        return folder

    def log(self, run_id: str, folder: Path, description: str) -> None:
        """Log a comparison's files to a run, under `compare`, and what it says as the run's description."""
        with self._asking():
            self._client.log_artifacts(run_id, str(folder), "compare")
            self._client.set_tag(run_id, "mlflow.note.content", description)


def _named(run: Any) -> str:
    return f"{run.info.run_name or 'run'} ({run.info.run_id[:8]})"
