"""One run's way into MLflow: the same calls while it trains, when the store was away, and long after."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.folder.metrics_log import Metric, MetricsReader
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import KEY_TAG, RunCard, ending
from runner.track.store import experiment_in

# MLflow would repeat a request whose answer was lost without asking whether it was taken, and make a second run; what
# is to be repeated is decided here. Set before its import.
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# Making a new store is no news.
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")

#: MLflow takes at most this many metrics in one request.
_BATCH = 1000


class Delivery:
    """Brings a run's card, metrics and files into a store. Every call may fail and be made again.

    What the store has taken without being able to say so is not sent a second time: a run is looked for by its key
    before one is made, and after a failure the metrics that arrived are asked for.
    """

    def __init__(self, card: RunCard, folder: Path, uri: str, *, resumed: bool = False) -> None:
        """`resumed`: an earlier process may have delivered some of it."""
        self.card = card
        self._card_lock = threading.Lock()  # how a run ended is noted while a request may hang in another thread
        self._folder = folder
        self._uri = uri
        self._reader = MetricsReader(folder)
        self._unsent: list[Metric] = []
        self._in_doubt = self._may_exist = resumed
        self._client: Any = None
        self.experiment_id: str | None = None
        self.run_id: str | None = None

    def open(self) -> None:
        """Make the run, or find it, and tell the store what is on its card."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag
        from mlflow.tracking import MlflowClient

        if self._uri.startswith("sqlite:///"):
            Path(self._uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(self._uri)
        run = self._run()
        run_id, self.experiment_id = run.info.run_id, run.info.experiment_id
        params = [Param(name, value) for name, value in self.card.params.items()]
        tags = [RunTag(name, value) for name, value in {**self.card.tags, **self._parent()}.items()]
        self._client.log_batch(run_id, params=params, tags=tags)
        if self.card.dataset is not None:
            dataset = Dataset(source_type="local", **self.card.dataset)
            training = InputTag("mlflow.data.context", "training")
            self._client.log_inputs(run_id, datasets=[DatasetInput(dataset=dataset, tags=[training])])
        if self.card.run_id != run_id:
            self._note(run_id=run_id)
        self.run_id = run_id

    def _run(self) -> Any:
        if self.card.into_run is not None:
            return self._client.get_run(self.card.into_run)
        experiment_id = self.experiment_id or experiment_in(self._client, self.card.experiment, self._uri)
        self.experiment_id = experiment_id
        found = self._with_key(self.card.key) if self._may_exist else None
        self._may_exist = True
        return found or self._client.create_run(
            experiment_id, start_time=self.card.started, run_name=self.card.run_name, tags={KEY_TAG: self.card.key}
        )

    def _with_key(self, key: str) -> Any:
        runs = self._client.search_runs([self.experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{key}'")
        return runs[0] if runs else None

    def _parent(self) -> dict[str, str]:
        # By its key: a store to which a sweep is brought later has ids of its own.
        parent = self._with_key(self.card.parent_key) if self.card.parent_key is not None else None
        return {} if parent is None else {"mlflow.parentRunId": parent.info.run_id}

    def ship(self) -> None:
        """Send the metrics that have been logged since the last call."""
        from mlflow.entities import Metric as MlflowMetric

        self._unsent += self._reader.read()
        if self._unsent and self._in_doubt:
            taken = self._taken({metric.key for metric in self._unsent})
            self._unsent = [m for m in self._unsent if (m.key, m.step, m.timestamp) not in taken]
        while self._unsent:
            part = self._unsent[:_BATCH]
            self._in_doubt = True  # until the store has said that it took them
            metrics = [MlflowMetric(m.key, m.value, m.timestamp, m.step) for m in part]
            self._client.log_batch(self.run_id, metrics=metrics)
            self._unsent = self._unsent[len(part) :]
        self._in_doubt = False

    def _taken(self, keys: set[str]) -> set[tuple[str, int, int]]:
        """Which values of these metrics the store has."""
        history = (metric for key in keys for metric in self._client.get_metric_history(self.run_id, key))
        return {(metric.key, metric.step, metric.timestamp) for metric in history}

    def reopen(self) -> None:
        """Let a run that has ended go on."""
        if self.card.status is not None:
            self._note(status=None, ended=None, delivered=False)
            self._client.update_run(self.run_id, status="RUNNING", name=self.card.run_name)

    def settle(self, status: str, tags: Mapping[str, str]) -> None:
        """Note how the run ended, on its card first: the store may be away."""
        self._note(**ending(status, tags))

    def _note(self, **changes: Any) -> None:
        with self._card_lock:
            self.card = self.card.changed(self._folder, **changes)

    def close(self) -> None:
        """Bring the files, the tags that the end of the run has changed, and its status."""
        for path in sorted(self._folder.iterdir()):
            if path.is_file() and path.name != CARD_FILE and not path.name.startswith("."):
                self._client.log_artifact(self.run_id, str(path))
        for name, value in self.card.last_tags.items():
            self._client.set_tag(self.run_id, name, value)
        self._client.set_terminated(self.run_id, status=self.card.status, end_time=self.card.ended)
        model = self._folder / "model"
        if self.card.log_model and model.is_dir():  # last: it may take long, and the run is over
            self._client.log_artifacts(self.run_id, str(model), "model")
        self._note(delivered=True)
