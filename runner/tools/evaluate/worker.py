"""Workers of an evaluation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from runner.backends import Backend
from runner.backends.moving import to_device
from runner.config.choices import ShardingKind
from runner.config.instantiate import build_recipe
from runner.config.plain import from_plain
from runner.data.recipe import Recipe
from runner.folder.phase_progress import PhaseProgress
from runner.launch.local import WorkerContext
from runner.launch.worker import connect_launched, translate_worker_errors
from runner.train.adapter import with_4_bits
from runner.train.build import prepare_data
from runner.train.compilation import compile_model
from runner.train.job import WorkerJob
from runner.train.precision import Precision
from runner.train.predictor import Predictor
from runner.train.sharding import in_turn, mesh_of, shard

#: In the job's folder: the predictions in sample order, float64.
PREDICTIONS = "predictions.npy"


@dataclass(frozen=True)
class EvaluationJob(WorkerJob):
    """`model`, `file`: as of `Recipe.from_saved`. `keeps_predictions`: whether they are written to the folder."""

    model: str
    file: str | None
    keeps_predictions: bool


def run_launched(job: dict[str, Any], context: WorkerContext) -> dict[str, Any] | None:
    """The entry point of a launched worker. `job`: `EvaluationJob.as_json()`; the result of `evaluate_saved`."""
    typed = from_plain(EvaluationJob, job)
    with translate_worker_errors(context.rank, "a smaller evaluation.micro_batch, or sharding=fsdp"):
        backend = connect_launched(typed, context)
        result = evaluate_saved(typed, backend)
        backend.close()
    return result


def evaluate_saved(job: EvaluationJob, backend: Backend) -> dict[str, Any] | None:
    """Predict with the saved model; on rank 0 the metrics, none without labels, and the seconds. A collective."""
    config = job.config
    base: Recipe = build_recipe(config.recipe, config.trusted_packages)
    recipe = base.from_saved(job.model, job.file)
    if job.keeps_predictions:
        recipe = recipe.for_predictions()
    prepared = prepare_data(recipe, job, backend)
    precision = Precision(config.precision.name, backend.device.type)
    sharding = config.sharding

    def build_model() -> nn.Module:
        model = recipe.build_model(prepared)
        return precision.cast(model if config.adapter.merge else with_4_bits(config.adapter, model))

    if sharding.kind is ShardingKind.none:
        model = to_device(build_model(), backend.device)
    else:
        mesh = mesh_of(backend)
        with in_turn(backend):
            model = shard(sharding, build_model(), backend, mesh).model
    if config.compile:
        compile_model(model)
    started = time.perf_counter()
    predictor = Predictor(config, recipe, model, backend, precision)
    progress = PhaseProgress(job.folder, "evaluating", "batches") if backend.rank == 0 else None
    predictions = predictor.predict(prepared, progress)
    if backend.rank != 0:
        return None
    assert predictions is not None  # nothing stops it
    seconds = time.perf_counter() - started
    if job.keeps_predictions:
        np.save(job.folder / PREDICTIONS, predictions.numpy())
    return {"metrics": {} if job.file is not None else recipe.metrics(predictions, prepared.eval), "seconds": seconds}
