"""A run in MLflow: opened, fed and closed by a thread of the parent."""

from __future__ import annotations

import functools
import getpass
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from runner.experiment import Experiment
from runner.schema import Tracking
from runner.tracking.metrics_log import Metric, MetricsReader
from runner.tracking.secrets import masked
from runner.tracking.store import default_store

# A server that goes away must not hold up a run: MLflow's own defaults retry for minutes. Set before its import.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
# Making a new store is no news.
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")

#: Seconds between two shipments, and for the last one when a store has stopped answering.
_SHIP_EVERY, _LAST_SHIPMENT_S = 1.0, 30.0
#: Seconds that a run which is over already waits for its store to open.
_OPEN_WITHIN_S = 20.0
#: MLflow takes at most this many metrics in one request.
_BATCH = 1000


class MlflowTracker:
    """Ships `metrics.jsonl`; whatever the store does, the file stays complete and the run goes on."""

    def __init__(self, tracking: Tracking, experiment: Experiment, folder: Path) -> None:
        self._tracking = tracking
        self._experiment = experiment
        self._folder = folder
        self._root = Path.cwd()
        self._uri = tracking.uri or default_store(self._root)
        self._reader = MetricsReader(folder)
        self._unsent: list[Metric] = []
        self._client: Any = None
        self._run: Any = None
        self._last_tags: dict[str, str] = {}
        self._experiment_id: str | None = None
        self._ending = threading.Event()
        self._started = int(time.time() * 1000)
        self._thread = threading.Thread(target=self._serve, name="mlflow", daemon=True)
        self._trouble: Exception | None = None
        self._patience = _LAST_SHIPMENT_S
        self._end: Callable[[], None] | None = None
        self.run_id: str | None = None
        self._opened = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.wait(0 if self.run_id is None and self._trouble is None else _SHIP_EVERY):
            self._attempt(self._ship)
        deadline = time.monotonic() + self._patience
        assert self._end is not None
        while not self._attempt(self._ship) or not self._attempt(self._end):
            if time.monotonic() > deadline:
                return
            time.sleep(_SHIP_EVERY)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do `action`; a store in trouble is remembered and tried again, never fatal."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - database, network, disk: none of it may end a training
            if self._trouble is None and not self._ending.is_set():
                self._say(f"MLflow takes nothing ({_short(error)}); the run goes on and metrics wait in metrics.jsonl")
            self._trouble = error
            return False
        self._trouble = None
        return True

    def _say(self, text: str) -> None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="yellow", markup=False)

    def _ship(self) -> None:
        from mlflow.entities import Metric as MlflowMetric

        if self.run_id is None:
            self._open()
        self._unsent += self._reader.read()
        while self._unsent:
            part = self._unsent[:_BATCH]
            metrics = [MlflowMetric(m.key, m.value, m.timestamp, m.step) for m in part]
            self._client.log_batch(self.run_id, metrics=metrics)
            self._unsent = self._unsent[len(part) :]

    def _open(self) -> None:
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        if not self._tracking.uri:
            (self._root / "outputs").mkdir(exist_ok=True)
        self._client = MlflowClient(self._uri)
        # Kept as soon as it is there: if what follows fails and is tried again, that must not make a second run.
        self._run = run = self._run or self._existing_run() or self._new_run()
        self._experiment_id = run.info.experiment_id
        params = [Param(name, str(value)) for name, value in run_params(self._experiment).items()]
        tags = [RunTag(name, str(value)) for name, value in run_tags(self._experiment).items()]
        self._client.log_batch(run.info.run_id, params=params, tags=tags)
        self._client.log_inputs(run.info.run_id, datasets=[self._dataset()])
        self.run_id = run.info.run_id
        self._opened.set()

    def _existing_run(self) -> Any:
        run_id = os.environ.get("MLFLOW_RUN_ID")
        return self._client.get_run(run_id) if run_id else None

    def _new_run(self) -> Any:
        experiment = self._client.get_experiment_by_name(self._tracking.experiment)
        if experiment is None:
            artifacts = None if self._tracking.uri else (self._root / "outputs" / "mlartifacts").absolute().as_uri()
            experiment_id = self._client.create_experiment(
                self._tracking.experiment,
                artifact_location=artifacts,
                tags={"mlflow.experimentKind": "custom_model_development"},  # MLflow's page shows training, not agents
            )
        else:
            experiment_id = experiment.experiment_id
        return self._client.create_run(
            experiment_id,
            start_time=self._started,
            run_name=self._tracking.run_name or self._experiment.setup_name,
        )

    def _dataset(self) -> Any:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        facts = self._experiment.facts
        dataset = Dataset(
            name=self._experiment.config.recipe["name"],
            digest=facts.digest[:16],
            source_type="local",
            source=masked(facts.source),
            profile=f'{{"train_samples": {facts.train_samples}, "eval_samples": {facts.eval_samples}}}',
        )
        return DatasetInput(dataset=dataset, tags=[InputTag("mlflow.data.context", "training")])

    def wait_until_open(self) -> str | None:
        deadline = time.monotonic() + _OPEN_WITHIN_S
        while self._trouble is None and time.monotonic() < deadline:
            if self._opened.wait(0.05):
                break
        return self.run_id

    def tag(self, name: str, value: str) -> None:
        self._last_tags[name] = value

    def finish(self, status: str) -> None:
        self._patience = _LAST_SHIPMENT_S if status == "FINISHED" else _LAST_SHIPMENT_S / 6
        self._end = functools.partial(self._close, status)
        self._ending.set()
        # A model that was asked for is waited for, however large; everything else has a limit.
        self._thread.join(None if self._tracking.log_model else 2 * self._patience)
        if self._trouble is not None or self._thread.is_alive():
            self._say(f"MLflow has not taken everything ({_short(self._trouble)}); metrics.jsonl is complete")

    def _close(self, status: str) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.is_file():
                self._client.log_artifact(self.run_id, str(path))
        for name, value in self._last_tags.items():
            self._client.set_tag(self.run_id, name, value)
        self._client.set_terminated(self.run_id, status=status)
        if (
            self._tracking.log_model and (self._folder / "model").is_dir()
        ):  # last: it may take long, and the run is over
            self._client.log_artifacts(self.run_id, str(self._folder / "model"), "model")

    def how_to_open(self) -> Sequence[str]:
        if self.run_id is None:
            return []
        page = f"#/experiments/{self._experiment_id}/runs/{self.run_id}"
        if self._uri.startswith(("http://", "https://")):
            return [f"  MLflow: {masked(self._uri).rstrip('/')}/{page}"]
        program = f"{Path(sys.executable).parent / 'mlflow'}"
        return [
            f"  MLflow: {program} ui --host 127.0.0.1 --port 5000 --backend-store-uri '{masked(self._uri)}'",
            f"  then open http://127.0.0.1:5000/{page}",
        ]


def _short(error: Exception | None) -> str:
    return masked(str(error).strip().splitlines()[0])[:200] if error and str(error).strip() else "no answer"


def run_params(experiment: Experiment) -> dict[str, Any]:
    """The resolved setup, few and flat, so that what differs between two runs stands out."""
    config, plan = experiment.config, experiment.plan
    return {
        "recipe": config.recipe["name"],
        "model": _model_name(config.recipe),
        "device": experiment.placement.label,
        "world_size": plan.world_size,
        "micro_batch": plan.micro_batch,
        "accumulation_steps": plan.accumulation_steps,
        "global_batch": plan.global_batch,
        "sync": config.sync.policy.name,
        "k": plan.k,
        "precision": config.precision.name.name,
        "optimizer": config.optimizer.name.name,
        "lr": plan.lr,
        "base_lr": plan.base_lr,
        "scaling": config.scaling.rule.name,
        "schedule": config.schedule.name.name,
        "warmup_share": config.schedule.warmup_share,
        "weight_decay": config.optimizer.weight_decay,
        "epochs": plan.epochs,
        "optimizer_steps": plan.optimizer_steps,
        "seed": config.seed,
    }


def _model_name(recipe: Mapping[str, Any]) -> str:
    """What the recipe calls its model: a name or folder, or else the class that builds it."""
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return str(model or recipe["_target_"])
    return str(model.get("name") or model.get("_target_"))


def _user() -> dict[str, str]:
    try:
        return {"mlflow.user": getpass.getuser()}
    except (KeyError, OSError):  # a container's user may have no name
        return {}


def run_tags(experiment: Experiment) -> dict[str, Any]:
    """What one filters runs by."""
    placement = experiment.placement
    tags = {
        **_user(),
        "mlflow.source.name": "python -m runner",
        "mlflow.source.type": "LOCAL",
        "device": placement.label,
        "device.rehearsed": str(placement.rehearsed).lower(),
        "device.executed_on": placement.device_type,
        "plan.digest": experiment.plan.digest,
        "certificate": experiment.certificate.level,
        "setup": experiment.setup_name,
    }
    commit = git_commit()
    return {**tags, "mlflow.source.git.commit": commit} if commit else tags


@functools.lru_cache(maxsize=1)
def git_commit() -> str | None:
    """The commit of the repository that the runner itself lies in, or None if it was installed from elsewhere."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
