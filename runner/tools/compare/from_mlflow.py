"""Find runs in MLflow, and read them from the files that the runner logged with them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.errors import UserError, did_you_mean
from runner.tools.compare.from_folders import FILES, read_folders
from runner.tools.compare.runs import FoundRuns, SkippedRun
from runner.track.card import DIVERGED_TAG, EVALUATED_TAG, STOPPED_TAG
from runner.track.secrets import masked
from runner.track.store import database_of, default_store, error_summary

RUN_ID = re.compile(r"[0-9a-f]{32}")
_PARENT, _SWEEP, _JOBS = "mlflow.parentRunId", "sweep.id", "sweep.jobs"
#: The most that MLflow returns at once.
_PAGE = 50_000


def store_uri(option: str | None) -> str:
    """The store's address: the option, else the environment variable, else the store in `outputs/`."""
    return option or os.environ.get("MLFLOW_TRACKING_URI") or default_store(Path.cwd())


def store_exists(uri: str) -> bool:
    """Return whether a local store is there: MLflow would create it. True for a server."""
    if (database := database_of(uri)) is not None:
        return database.is_file()
    if uri.startswith("databricks") or ("://" in uri and not uri.startswith("file:")):
        return True
    return Path(uri.removeprefix("file:").removeprefix("//")).is_dir()


def _is_evaluation(run: Any) -> bool:
    return EVALUATED_TAG in run.data.tags


class ExistingStore:
    """An MLflow store to read from. Raises UserError if it does not exist or does not answer.

    `mlflow.search_runs` is not used: it needs `mlflow.set_tracking_uri`, which changes the whole process and its
    environment, and a comparison also runs at the end of a sweep.

    `option`: the store's address, if given; `folder`: where the runs were looked for before, for the error message.
    """

    def __init__(self, option: str | None, folder: Path | None = None) -> None:
        self.uri = store_uri(option)
        if not store_exists(self.uri):
            name = "--tracking-uri" if option else "MLFLOW_TRACKING_URI"
            if self.uri == default_store(Path.cwd()):  # nobody named it
                missing = f"has neither {folder} nor" if folder else "has no"
                raise UserError(
                    f"there are no such runs below this folder, which {missing} outputs/mlflow.db: change to the "
                    "folder in which the runs were started, or give --tracking-uri or the runs' folders"
                )
            fix = "correct the address with --tracking-uri, or give the runs' folders"
            raise UserError(f"{name}={masked(self.uri)} does not exist: {fix}")
        # A server that does not answer must not block the command, and progress bars would break the tables.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        from mlflow.tracking import MlflowClient

        with self._asking():
            self._client = MlflowClient(self.uri)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # from MLflow, its database or its driver: they have no common base class
            message = f"--tracking-uri={masked(self.uri)} does not answer ({error_summary(error)})"
            raise UserError(f"{message}: correct the address, or give the runs' folders") from error

    def experiment(self, name: str) -> list[Any]:
        """All runs of an experiment."""
        with self._asking():
            found = self._client.get_experiment_by_name(name)
            if found is None:
                names = [one.name for one in self._client.search_experiments()]
                raise UserError(f"--experiment={name} does not exist in {masked(self.uri)}{did_you_mean(name, names)}")
            return self._search("", [found.experiment_id])

    def sweep(self, sweep_id: str) -> list[Any]:
        """All runs with the id of this sweep."""
        with self._asking():
            return self._search(f"tags.`{_SWEEP}` = '{sweep_id}'")

    def run_or_children(self, run_id: str) -> list[Any]:
        """The children of the run with this id if it has any, else the run itself."""
        with self._asking():
            own = self._search(f"attributes.run_id = '{run_id}'")
            if not own:
                raise UserError(f"there is no run {run_id} in {masked(self.uri)}: check the id, or --tracking-uri")
            children = self._search(f"tags.`{_PARENT}` = '{run_id}'")
            return [run for run in children if not _is_evaluation(run)] or own

    def common_parent(self, run_ids: Sequence[str]) -> str | None:
        """The run that all these runs are children of, if there is one."""
        listed = ", ".join(f"'{run_id}'" for run_id in run_ids)
        with self._asking():
            runs = self._search(f"attributes.run_id IN ({listed})")
        parents = {run.data.tags.get(_PARENT) for run in runs}
        return parents.pop() if len(runs) == len(set(run_ids)) and len(parents) == 1 else None

    def _search(self, query: str, experiments: Sequence[str] | None = None) -> list[Any]:
        if experiments is None:
            experiments = [one.experiment_id for one in self._client.search_experiments(max_results=_PAGE)]
        return list(self._client.search_runs(experiments, query, max_results=_PAGE))

    def read(self, runs: Sequence[Any], metric: str | None) -> FoundRuns:
        """Those of `runs` that are finished, read from their artifacts. Raises UserError."""
        by_id = {run.info.run_id: run for run in runs}
        parents = {run.data.tags.get(_PARENT) for run in runs if not _is_evaluation(run)}
        folders: list[tuple[str, Path]] = []
        skipped: list[SkippedRun] = []
        with tempfile.TemporaryDirectory(prefix="runner-compare-") as temporary:
            for run_id, run in sorted(by_id.items(), key=lambda item: item[1].info.start_time):
                name = f"{run.info.run_name or 'run'} ({run_id[:8]})"
                if _JOBS in run.data.tags or run_id in parents:
                    skipped.append(SkippedRun(name, "the parent of a sweep"))
                elif _is_evaluation(run):
                    skipped.append(SkippedRun(name, "an evaluation of a saved model"))
                elif run.info.status != "FINISHED" and DIVERGED_TAG not in run.data.tags:
                    why = run.data.tags.get(STOPPED_TAG) or run.data.tags.get("error")
                    skipped.append(SkippedRun(name, f"{run.info.status} ({why})" if why else run.info.status))
                else:
                    folders.append((run_id, self._download(run_id, Path(temporary) / run_id)))
            found = read_folders(folders, metric)
        ordered = [
            dataclasses.replace(run, mlflow_run_id=run.source, order=f"{by_id[run.source].info.start_time:020d}")
            for run in found.runs
        ]
        return FoundRuns(ordered, [*skipped, *found.skipped])

    def _download(self, run_id: str, folder: Path) -> Path:
        folder.mkdir()
        with self._asking():
            available = {artifact.path for artifact in self._client.list_artifacts(run_id)}
            for name in FILES:
                if name in available:
                    self._client.download_artifacts(run_id, name, str(folder))
        return folder

    def log(self, run_id: str, folder: Path, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """Log a comparison to a run: its files, under `compare`, and what the list of runs and the run's page show."""
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        with self._asking():
            self._client.log_artifacts(run_id, str(folder), "compare")
            logged = [Metric(name, value, now, 0) for name, value in metrics.items()]
            self._client.log_batch(run_id, metrics=logged, tags=[RunTag(name, value) for name, value in tags.items()])
