"""The runs that faults are injected into, and what must hold when one of them has ended."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.processes import Processes
from runner.folder.record import FINISHED, RunRecord, status_of
from runner.train.checkpoint import FOLDER

#: 42 optimizer steps an epoch, the last of which is smaller.
TINY = (
    "recipe=acceptability",
    "recipe.data.train_samples=1000",
    "recipe.data.eval_samples=30",
    "recipe.model.hidden_size=16",
    "recipe.model.feed_forward_size=16",
    "recipe.model.layers=1",
    "recipe.model.heads=2",
    "batch.global_batch=24",
    "log_every=5",
)
#: Saved after the last step, too.
_SHORT, _LONG = ("checkpoint.every_steps=12", "epochs=12"), ("checkpoint.every_steps=12", "epochs=16")
_RESTARTS = 1000  # no limit
#: Largest difference of weights under `equivalence=exact`, relative to the largest weight.
_EXACT = 1e-12


@dataclass(frozen=True)
class Variant:
    """A setup. `workers`: those it may be started and resumed on. `equal`: what must be as in the reference besides
    the samples of each step: the `bits` of weights, metrics and losses, the `weights` up to rounding, or `nothing`."""

    name: str
    overrides: Sequence[str]
    workers: Sequence[int]
    equal: str = "bits"
    torchrun: bool = False

    def start(self, workers: int, folder: Path, uri: str) -> list[str]:
        """The command that starts a run in `folder`, tracked in the store `uri`."""
        restarts = f"launch.max_restarts={_RESTARTS}"
        return self.command(workers, *self.overrides, restarts, f"hydra.run.dir={folder}", f"tracking.uri={uri}")

    def command(self, workers: int, *overrides: str) -> list[str]:
        run = ["-m", "runner", "device=cpu", f"device.workers={workers}", *overrides]
        if not self.torchrun:
            return run
        options = ("--standalone", f"--nproc-per-node={workers}", f"--max-restarts={_RESTARTS}")
        return ["-m", "torch.distributed.run", *options, *run]


_EXACTLY = ("equivalence=exact", "precision=fp64", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("k=1, 2 workers", (*TINY, *_LONG), (2,)),
        Variant("k=1, exact, 1-4 workers", (*TINY, *_SHORT, *_EXACTLY), (2, 1, 3, 4), equal="weights"),
        Variant("k=4, 2 workers", (*TINY, *_LONG, "sync.k=4"), (2,)),
        Variant("k=4, overlap, 2 workers", (*TINY, *_LONG, "sync.k=4", "sync.overlap=true"), (2,)),
        Variant("k=4, outer, 2 workers", (*TINY, *_LONG, "sync=outer", "sync.k=4"), (2,)),
        Variant("k=4, 1-4 workers", (*TINY, *_SHORT, "sync.k=4"), (2, 1, 3, 4), equal="nothing"),
        Variant("torchrun, k=1, 2 workers", (*TINY, *_LONG), (2,), torchrun=True),
    )
}


@dataclass(frozen=True)
class Place:
    """Where a campaign runs: its folder for runs, and the tracking store and cache in it."""

    work: Path

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.work / 'mlflow.db'}"

    @property
    def environment(self) -> dict[str, str]:
        return {"RUNNER_CACHE": str(self.work / "cache")}


@dataclass(frozen=True)
class Outcome:
    """What two runs are compared in. `losses`: by optimizer step."""

    ledger: Any
    weights: Mapping[str, np.ndarray]
    losses: Mapping[int, float]
    metrics: Mapping[str, float]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def outcome_of(folder: Path) -> Outcome:
    from safetensors.numpy import load_file

    losses = {line["step"]: line["value"] for line in logged(folder) if line["key"] == "train/loss"}
    weights = {name: value for path in folder.glob("model/*.safetensors") for name, value in load_file(path).items()}
    record = RunRecord.read(folder)
    assert record is not None
    return Outcome(read_json(folder / "ledger.json"), weights, losses, record.result.eval)


def logged(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of `metrics.jsonl`."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def phase(folder: Path) -> str:
    """What the run in this folder is doing."""
    if not (folder / "config.yaml").exists():
        return "before its folder"
    if (folder / "model").exists():
        return "end"
    if list((folder / FOLDER).glob(".step-*")):
        return "saving"
    if list((folder / FOLDER).glob("step-*")):
        return "saved before"
    return "not saved yet"


def reference(variant: Variant, place: Place) -> Path:
    """The folder of an uninterrupted run on the first number of workers, which is made if it is not there."""
    folder = place.work / "references" / re.sub("[^a-z0-9]+", "-", variant.name)
    if status_of(folder) != FINISHED:
        shutil.rmtree(folder, ignore_errors=True)
        alone = dataclasses.replace(variant, torchrun=False)
        with Processes(folder.with_suffix(".log"), place.environment) as processes:
            code = processes.start(alone.start(variant.workers[0], folder, place.uri)).wait()
        if code:
            raise SystemExit(f"the uninterrupted run ended with exit code {code}: see {folder.with_suffix('.log')}")
    return folder


def problems_of(folder: Path, expected: Path, equal: str) -> Iterator[str]:
    """What is not as required of a run that has ended. `expected`: the folder of the uninterrupted one."""
    if status_of(folder) != FINISHED:
        yield f"status {status_of(folder)}"
        return
    ours, theirs = outcome_of(folder), outcome_of(expected)
    if ours.ledger != theirs.ledger:
        yield "another ledger"
    if equal == "bits" and not _same_bits(ours, theirs):
        yield "other bits"
    if equal == "weights" and _difference(ours.weights, theirs.weights) > _EXACT:
        yield "other weights"
    if len({(line["key"], line["step"]) for line in logged(folder)}) != len(logged(folder)):
        yield "metrics.jsonl: a metric twice"
    if ours.losses.keys() != theirs.losses.keys():
        yield "metrics.jsonl: a step is missing"
    if list((folder / FOLDER).glob(".*")):
        yield "left: an unfinished checkpoint"


def delivery_problems(folder: Path, uri: str) -> Iterator[str]:
    """What is not as required of a finished run in the tracking store."""
    from mlflow.tracking import MlflowClient

    from runner.track.card import KEY_TAG, TrackingRecord
    from runner.track.delivery import stored_key

    client, card = MlflowClient(uri), TrackingRecord.read(folder)
    experiment = client.get_experiment_by_name(card.experiment)
    runs = client.search_runs([experiment.experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{card.key}'")
    if [run.info.status for run in runs] != ["FINISHED"]:
        yield f"MLflow: {', '.join(run.info.status for run in runs) or 'no run'}"
        return
    (run,) = runs
    history = (metric for key in run.data.metrics for metric in client.get_metric_history(run.info.run_id, key))
    stored = collections.Counter((metric.key, metric.step) for metric in history)
    if set(stored.values()) - {1}:
        yield "MLflow: a metric twice"
    if {(stored_key(line["key"]), line["step"]) for line in logged(folder)} - set(stored):
        yield "MLflow: a metric is missing"


def _same_bits(ours: Outcome, theirs: Outcome) -> bool:
    same_weights = ours.weights.keys() == theirs.weights.keys() and all(
        value.tobytes() == theirs.weights[name].tobytes() for name, value in ours.weights.items()
    )
    return same_weights and ours.losses == theirs.losses and ours.metrics == theirs.metrics


def _difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    largest = max(float(np.abs(value).max()) for value in theirs.values())
    return max(float(np.abs(value - theirs[name]).max()) for name, value in ours.items()) / largest
