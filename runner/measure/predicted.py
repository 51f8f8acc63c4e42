"""What runs will need, according to measurements, which are looked up or made, or to data sheets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runner.backends.memory import available_memory
from runner.config.choices import AccumulationMode, BatchMode, DeviceKind, SyncPolicyName, SyncSchedule
from runner.config.schema import Accumulation, Device, Hardware, Sync
from runner.cost.hardware import USUAL_EFFICIENCY, Model, answer, estimate, model_of_size, prediction_of
from runner.cost.prediction import Measurement, Prediction, predict
from runner.cost.work import Shapes, Work, evaluation_work, mean_work, planned_work
from runner.data.cache import Cache, Progress
from runner.data.layout import layout
from runner.data.recipe import Prepared
from runner.errors import Unavailable, UserError, require
from runner.launch.local import WorkerContext, launch
from runner.measure.measuring import measure
from runner.measure.store import load, measurement_path, save
from runner.plan import Plan
from runner.plan.experiment import Experiment, prepare_for_plan
from runner.plan.sync_steps import sync_steps

#: The largest micro-batch has this many times the rows of the smallest one that is measured.
_FEWER_ROWS = 4
#: Rows of the largest micro-batch that is measured first, on a device of which nothing is known.
FIRST_ROWS = 32


def unsupported_reason(experiment: Experiment) -> str | None:
    """Why nothing can be predicted for this setup, in words; None if it can."""
    config, placement, several = experiment.config, experiment.placement, experiment.plan.world_size > 1
    if config.hardware.name is not None:
        return None if placement.rehearsed else f"{placement.label} is here: leave out hardware={config.hardware.name}"
    reasons = (
        (bool(experiment.inputs.absent), "data or model are not on this machine"),
        (placement.rehearsed, f"{placement.label} is not on this machine"),
        (placement.local_workers != experiment.plan.world_size, "workers run on several machines"),
        (placement.device_type == "xla", "steps on a TPU have no phases that can be timed"),
        (config.equivalence.is_identical, "shards under equivalence=identical are not measured"),
        (
            several and config.sync.schedule is SyncSchedule.post_local,
            "sync.schedule=post_local has two kinds of steps",
        ),
        (several and config.sync.fragments != 1, "sync.fragments above 1 are not measured yet"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def predicted(experiment: Experiment, at_once: int = 1, before: float | None = None) -> Prediction | None:
    """What a run will need, if its setup has been measured and can be predicted.

    `at_once`: jobs that share this machine. `before`: in seconds since the epoch; later measurements are not used.
    """
    if unsupported_reason(experiment) is not None:
        return None
    if experiment.config.hardware.name is not None:
        return _predict_elsewhere(experiment)
    measurement = load(experiment, at_once)
    if measurement is None or (before is not None and measurement.measured_at > before):
        return None
    return _predict(experiment, measurement, *_shapes(experiment))


def _predict_elsewhere(experiment: Experiment) -> Prediction:
    """What a device that is not here will need: from its data sheet, the model's size and its efficiency if measured.

    Raises UserError.
    """
    config, plan, hardware = experiment.config, experiment.plan, experiment.config.hardware
    precision = config.precision.name.name
    rule = f"hardware={hardware.name} has no published peak for it: use {', '.join(hardware.tflops)}"
    require(precision in hardware.tflops, "precision", precision, rule)
    model, work = _model(experiment), _work_elsewhere(experiment)
    synchronous = config.sync.always_synchronous
    k = 1.0 if synchronous else plan.optimizer_steps / max(len(_due(experiment)), 1)
    peak = hardware.tflops[precision] * 1e12
    found = prediction_of(estimate(work, model, hardware, peak, synchronous), work, model, hardware, k)
    if plan.world_size == 1:
        return found
    return dataclasses.replace(found, answer=answer(estimate(work, model, hardware, peak, True), hardware, plan))


def _model(experiment: Experiment) -> Model:
    """The model as measured on one worker of this machine, or of the size that is given."""
    given = experiment.config.plan.parameters
    if given is not None:
        return model_of_size(given, experiment.config.adapter)
    measurement = load(one_worker_here(experiment))
    if measurement is None or measurement.flops_per_token is None or not measurement.parameters:
        one = "runner.plan device=cpu measure=true, with the same recipe and precision, measures it here"
        raise UserError(f"hardware needs the size of the model: give plan.parameters=N, its weights; or {one}")
    efficiency = measurement.efficiency or USUAL_EFFICIENCY
    return Model(measurement.parameters, measurement.flops_per_token, efficiency, measurement.frozen_bytes)


def one_worker_here(experiment: Experiment) -> Experiment:
    """The same model on one worker of this machine's CPU, to be measured in place of a device that is not here."""
    config = experiment.config
    alone = dataclasses.replace(
        config,
        device=Device(DeviceKind.cpu, workers=1),
        sync=Sync(SyncPolicyName.periodic, k=1),
        accumulation=Accumulation(AccumulationMode.fixed, steps=1),
        hardware=Hardware(),
    )
    whole = prepare_for_plan(alone)
    if config.batch.mode is BatchMode.per_device:
        return whole
    # A batch of many devices may be more than this machine can hold.
    rows = whole.plan.replica_batch
    return whole.with_accumulation_steps(
        next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= FIRST_ROWS)
    )


def _work_elsewhere(experiment: Experiment) -> Work:
    if experiment.config.plan.tokens is not None:
        return mean_work(experiment.plan, experiment.config.plan.tokens)
    try:
        train, _ = _shapes(experiment)
    except Unavailable as error:
        raise UserError(f"{error}; hardware needs only the mean tokens of a sample, plan.tokens=N") from error
    return _work(experiment, train)


@dataclass
class Measuring:
    """Measures setups, each kind of workers once. `prepared_s`: that a command takes to prepare an experiment."""

    prepared_s: float
    progress: Progress
    _until_launched_s: float | None = None
    _rows: dict[str, tuple[int, int]] = field(default_factory=dict)

    def announce(self, experiments: Sequence[Experiment]) -> None:
        """Note which micro-batches the setups have, so that one measurement covers all that it serves."""
        for one in experiments:
            experiment = one if one.config.hardware.name is None else one_worker_here(one)
            path, many = str(measurement_path(experiment)), experiment.plan.micro_batch
            few = max(1, many // _FEWER_ROWS)
            before = self._rows.get(path, (few, many))
            self._rows[path] = (min(few, before[0]), max(many, before[1]))

    def predicted(self, experiment: Experiment) -> Prediction:
        """What a run will need; measured now, unless a measurement of micro-batches of about this size is stored.

        A device that is not here is predicted from a measurement of the model on one worker of this machine.
        """
        if experiment.config.hardware.name is not None:
            self.predicted(one_worker_here(experiment))
            return _predict_elsewhere(experiment)
        shapes = _shapes(experiment, self.progress)
        measurement, rows = load(experiment), self._rows[str(measurement_path(experiment))]
        if measurement is not None:
            rows = (min(rows[0], measurement.rows[0]), max(rows[1], measurement.rows[1]))
        if measurement is None or rows != tuple(measurement.rows):
            until_launched = self._until_launched()
            measurement = measure(experiment, rows, shapes, time.time() - until_launched)
            save(experiment, measurement)
        return _predict(experiment, measurement, *shapes)

    def _until_launched(self) -> float:
        """Seconds from the start of a run's command until its workers are forked."""
        if self._until_launched_s is None:
            started = time.monotonic()
            launch(_nothing, None, 1)
            # A run prepares its experiment while the forkserver imports.
            self._until_launched_s = max(self.prepared_s, time.monotonic() - started)
        return self._until_launched_s


def _nothing(job: Any, context: WorkerContext) -> None:
    """A worker that only shows that workers can be started."""


def _shapes(experiment: Experiment, progress: Progress | None = None) -> tuple[Shapes, Shapes]:
    """The rows of training and evaluation. `progress`: called while data are prepared."""
    config, recipe = experiment.config, experiment.recipe
    prepared = Prepared.load(recipe.prepare(Cache(config.cache_dir, progress), experiment.facts))
    buckets, padding = config.device.length_buckets, config.recipe.get("padding")

    def of(lengths: np.ndarray) -> Shapes:
        if padding == "max_length":
            longest = int(config.recipe["max_length"])
            return Shapes(lengths, lambda _: longest, padded=True)
        return Shapes(lengths, layout(lengths, 1, buckets, compiles=False).length, recipe.computes_padding)

    return of(np.asarray(prepared.train.column("length"))), of(np.asarray(prepared.eval.column("length")))


def _due(experiment: Experiment) -> list[int]:
    """The last step of each local phase that the plan fixes."""
    return sorted(sync_steps(experiment.plan, experiment.config.sync, experiment.config.schedule).due)


def _work(experiment: Experiment, train: Shapes) -> Work:
    config, plan = experiment.config, experiment.plan
    alone = plan.world_size == 1 or config.sync.always_synchronous
    due = None if alone else _due(experiment)
    return planned_work(plan, config.seed, config.batch.length_sorted, train, due)


def _predict(experiment: Experiment, measurement: Measurement, train: Shapes, evaluation: Shapes) -> Prediction:
    config, plan, placement = experiment.config, experiment.plan, experiment.placement
    return predict(
        _work(experiment, train),
        measurement,
        evaluation_work(evaluation, config.evaluation.micro_batch, plan.world_size),
        len(evaluation.lengths),
        _evaluations(plan, config.evaluation.every_steps),
        available_memory(placement.device_type, placement.local_workers),
    )


def _evaluations(plan: Plan, every_steps: int | None) -> int:
    """How often a run evaluates: after every `every_steps` steps, or each epoch, and at the end."""
    return (plan.optimizer_steps - 1) // (every_steps or plan.steps_per_epoch) + 1
