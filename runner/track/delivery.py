"""Sends one run to MLflow: while it trains, after the store was down, or long after the run has ended."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.errors import RunFailed, UserError
from runner.folder.metrics_log import Metric, MetricsReader
from runner.folder.reading import files_below
from runner.folder.record import note_mlflow_run
from runner.track.card import DIGEST_TAG, KEY_TAG, TrackingRecord
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.description import NOTE_TAG, OBJECTIVE_TAG, experiment_tags
from runner.track.mlflow_model import save_mlflow_model
from runner.track.store import database_of, how_to_open, make_database, set_up_mlflow

#: MLflow accepts at most this many metrics in one request.
_BATCH = 1000


class Delivery:
    """Sends a run's card, metrics and files to a store. Every call may fail and may be repeated.

    Exactly once: a run is looked up by its key before it is created, and after a failed request the store is asked
    which metrics it already has. What a run has logged at a step stays: if it was resumed from an earlier step, the
    same training comes to that step again.
    """

    name = "MLflow"

    def __init__(self, card: TrackingRecord, folder: Path, uri: str, *, resumed: bool = False) -> None:
        """`resumed`: an earlier process may have delivered a part."""
        set_up_mlflow()
        self.card = card
        self._card_lock = threading.Lock()  # the run's end is recorded while a request may hang in another thread
        self._folder = folder
        self._uri = uri
        self._reader = MetricsReader(folder)
        self._unsent: list[Metric] = []
        self._reconcile_first = self._may_exist = self._resumed = resumed
        #: Metrics and steps that the store was found to have.
        self._stored: set[tuple[str, int]] = set()
        self._client: Any = None
        #: The reason if the card could not be written last: what the store is told matters more.
        self.card_error: str | None = None
        self.experiment_id: str | None = None
        self.run_id: str | None = None

    def begin(self) -> None:
        """Open a run that trains: one that had ended is RUNNING again."""
        self.open()
        if self._resumed:
            self.mark_running()

    def open(self) -> None:
        """Create or find the run, and log what is on its card. Raises UserError for a deleted experiment."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag
        from mlflow.tracking import MlflowClient

        if (database := database_of(self._uri)) is not None:
            make_database(database)
        self._client = MlflowClient(self._uri)
        run = self._given_run() or self._find_or_create()
        run_id, self.experiment_id = run.info.run_id, run.info.experiment_id
        params = [Param(name, value) for name, value in self.card.params.items()]
        found = {**self._own(self.card.tags, run), **self._parent_tag(), KEY_TAG: self.card.key}
        tags = [RunTag(name, value) for name, value in found.items()]
        self._client.log_batch(run_id, params=params, tags=tags)
        if self.card.dataset is not None:
            dataset = Dataset(source_type="local", **self.card.dataset)
            context = InputTag("mlflow.data.context", self.card.dataset_context)
            self._client.log_inputs(run_id, datasets=[DatasetInput(dataset=dataset, tags=[context])])
        if self.card.run_id != run_id:
            self.update_card(run_id=run_id)
        self.run_id = run_id

    def tag_experiment(self, name: str, value: str) -> None:
        """Set a tag of the run's experiment."""
        self._client.set_experiment_tag(self.experiment_id, name, value)

    def _given_run(self) -> Any:
        """The existing run to log into (MLFLOW_RUN_ID), which another store than the first may not have.

        The card of a folder from somebody else could name any run: it has to be named now, or to have the card's key.
        """
        from mlflow.exceptions import MlflowException

        if self.card.into_run is None:
            return None
        try:
            run = self._client.get_run(self.card.into_run)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" and self._resumed:
                return None
            raise
        named = os.environ.get("MLFLOW_RUN_ID") == self.card.into_run
        return run if named or run.data.tags.get(KEY_TAG) == self.card.key else None

    def _find_or_create(self) -> Any:
        self.experiment_id = self.experiment_id or self._find_or_create_experiment()
        found = self._find(self.card.key) if self._may_exist else None
        if found is not None:
            return found
        name = self._free_name()
        if name != self.card.run_name:
            self.update_card(run_name=name)
        self._may_exist = True
        return self._client.create_run(
            self.experiment_id, start_time=self.card.started, run_name=name, tags={KEY_TAG: self.card.key}
        )

    def _free_name(self) -> str:
        """The run's name, with a part of the setup's digest if another setup of the experiment has this name."""
        name, digest = self.card.run_name, self.card.tags.get(DIGEST_TAG)
        if digest is None or set(name) & set("'\\"):  # MLflow's filters cannot escape these
            return name
        same_name = f"attributes.run_name = '{name}' and tags.`{DIGEST_TAG}` != '{digest}'"
        taken = self._client.search_runs([self.experiment_id], filter_string=same_name, max_results=1)
        return f"{name} · {digest[:4]}" if taken else name

    def _find_or_create_experiment(self) -> str:
        name = self.card.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            database = database_of(self._uri)
            experiment_id: str = self._client.create_experiment(
                name,
                # Next to a SQLite store; MLflow would put them below the current folder.
                artifact_location=None if database is None else (database.absolute().parent / "mlartifacts").as_uri(),
                tags=experiment_tags(name, self.card.tags.get(OBJECTIVE_TAG)),
            )
            return experiment_id
        if experiment.lifecycle_stage == "deleted":
            raise UserError(f"the experiment '{name}' was deleted: restore it in MLflow, or set tracking.experiment=…")
        return str(experiment.experiment_id)

    def _find(self, key: str) -> Any:
        runs = self._client.search_runs([self.experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{key}'")
        return runs[0] if runs else None

    def _own(self, tags: Mapping[str, str], run: Any) -> dict[str, str]:
        """`tags` without the description if somebody has edited it in MLflow, or `runner.compare` has replaced it."""
        ours = (None, self.card.tags.get(NOTE_TAG), self.card.last_tags.get(NOTE_TAG))
        edited = run.data.tags.get(NOTE_TAG) not in ours
        return {name: value for name, value in tags.items() if not (edited and name == NOTE_TAG)}

    def _parent_tag(self) -> dict[str, str]:
        # Looked up by key: ids differ between stores.
        parent = self._find(self.card.parent_key) if self.card.parent_key is not None else None
        return {} if parent is None else {"mlflow.parentRunId": parent.info.run_id}

    def send_metrics(self) -> None:
        """Send the metrics that were logged since the last call."""
        from mlflow.entities import Metric as MlflowMetric

        new = self._reader.read()
        if self._reader.cut:  # a worker was lost, and the run continues from an earlier step
            self._unsent, self._stored, self._reconcile_first = [], set(), True
        self._unsent += new
        if not self._unsent:
            return
        if self._reconcile_first:
            self._stored |= self._ask()
        self._unsent = [m for m in self._unsent if (stored_key(m.key), m.step) not in self._stored]
        while self._unsent:
            part = self._unsent[:_BATCH]
            self._reconcile_first = True  # until the store has confirmed this request
            metrics = [MlflowMetric(stored_key(m.key), m.value, m.timestamp, m.step) for m in part]
            self._client.log_batch(self.run_id, metrics=metrics)
            self._unsent = self._unsent[len(part) :]
        self._reconcile_first = False

    def _ask(self) -> set[tuple[str, int]]:
        """Metric and step of every value that the store has of this run, without what MLFLOW_RUN_ID had before."""
        keys = self._client.get_run(self.run_id).data.metrics
        history = (metric for key in keys for metric in self._client.get_metric_history(self.run_id, key))
        since = self.card.started if self.run_id == self.card.into_run else 0
        return {(metric.key, metric.step) for metric in history if metric.timestamp >= since}

    def reopen(self) -> None:
        """Set a run that has ended back to RUNNING."""
        if self.card.status is not None:
            self.update_card(status=None, ended=None, delivered=False)
            self.mark_running(self.card.run_name)

    def mark_running(self, name: str | None = None) -> None:
        """Set the status in the store to RUNNING: of a run that has ended, and continues.

        `name`: None to keep the one it has, which may be a user's.
        """
        self._client.update_run(self.run_id, status="RUNNING", name=name)

    def mark_ended(self, status: str, tags: Mapping[str, str]) -> None:
        """Record the run's status on its card; `close` sends it. No request is made: the store may be down."""
        self._change_card(lambda card: card.ended_now(status, tags))

    def update_card(self, **changes: Any) -> None:
        self._change_card(lambda card: dataclasses.replace(card, **changes))

    def _change_card(self, change: Callable[[TrackingRecord], TrackingRecord]) -> None:
        with self._card_lock:
            self.card = change(self.card)
            try:
                self.card.write(self._folder)
                self.card_error = None
            except RunFailed as error:
                self.card_error = str(error)

    def require_card(self) -> None:
        """Raises RunFailed if the card in the folder does not say what has been delivered."""
        if self.card_error is not None:
            raise RunFailed(self.card_error)

    def close(self) -> None:
        """Send the files, the tags set at the end of the run, and its status."""
        for path in sorted(self._folder.glob("*")):  # none if the folder is gone
            regular = path.is_file() and not path.is_symlink()  # a link may lead to any file of this machine
            if regular and path.name != CARD_FILE and not path.name.startswith("."):
                self._client.log_artifact(self.run_id, str(path))
        for name, value in self._own(self.card.last_tags, self._client.get_run(self.run_id)).items():
            self._client.set_tag(self.run_id, name, value)
        # MLflow knows no PREEMPTED and no STOPPED. The description and summary.json say it.
        status = "KILLED" if self.card.status in ("PREEMPTED", "STOPPED") else self.card.status
        self._client.set_terminated(self.run_id, status=status, end_time=self.card.ended)
        model = self._folder / "model"
        if self.card.log_model and model.is_dir() and not model.is_symlink():  # last: it may take long
            files_below(model)  # refuses links
            with tempfile.TemporaryDirectory(prefix=".mlflow-", dir=self._folder) as draft:
                as_mlflow_model = Path(draft) / "model"
                saved = save_mlflow_model(model, as_mlflow_model, self._folder / "config.yaml")
                self._client.log_artifacts(self.run_id, str(as_mlflow_model if saved else model), "model")
        self.update_card(delivered=True)

    def how_to_open(self) -> Sequence[str]:
        """Lines that say how to open the run in MLflow."""
        return how_to_open(self._uri, f"experiments/{self.experiment_id}/runs/{self.run_id}") if self.run_id else []


def stored_key(key: str) -> str:
    """MLflow's name of a metric: `train/comm/bytes` for `comm/bytes`.

    MLflow sorts charts by the part before the last slash; quality, loss and throughput should be the first.
    """
    return key if key.startswith(("eval/", "train/")) else f"train/{key}"


def deliver(folder: Path, uri: str, status: str | None = None) -> TrackingRecord:
    """Send what the store does not have of the run in `folder`, and close the run if it has ended; the updated card.

    `status`: how the run ended if its process was killed and could not record it.
    """
    delivery = Delivery(TrackingRecord.read(folder), folder, uri, resumed=True)
    delivery.open()
    note_mlflow_run(folder, delivery.run_id)
    delivery.send_metrics()
    if delivery.card.status is None and status is not None:
        delivery.mark_ended(status, {})
    if delivery.card.status is not None:
        delivery.close()
    delivery.require_card()
    return delivery.card
