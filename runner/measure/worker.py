"""What the workers of a measurement do: the real training loop on given rows, timed."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from runner.backends import Backend
from runner.backends.memory import is_out_of_memory
from runner.config.plain import from_plain
from runner.data.recipe import Prepared
from runner.data.table import Table
from runner.errors import OutOfMemory, first_line
from runner.kernels.embedding import GradientKeepingEmbedding
from runner.launch.local import WorkerContext
from runner.launch.worker import connect_launched
from runner.plan import Plan
from runner.plan.order import DataOrder
from runner.plan.steps import Step
from runner.train.build import build_loop
from runner.train.flops import measure_utilisation
from runner.train.job import Job
from runner.train.loop import Loop
from runner.train.sharding import local

#: Seconds that evaluating all data may take, to time computing the metrics.
_WHOLE_EVALUATION_S = 20.0


@dataclass(frozen=True)
class MeasuringJob(Job):
    """`groups`: optimizer steps that are timed together; a step has the rows of each micro-batch of every worker.

    `evaluations`: rows of the evaluation table that are predicted together.
    """

    groups: list[list[list[list[int]]]] = field(default_factory=list)
    evaluations: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """What the workers have measured. `groups`: seconds of an optimizer step by phase, the mean over workers.

    `memory`: bytes of the worker that needed most, after each group; `gradient_memory`: of the gradients that exist
    from the second micro-batch of a step on; `evaluation_memory`: that evaluation and its libraries have added.
    `evaluations`: seconds; `whole_evaluation`: of all data, None if that would take too long. `metrics_s`: of computing
    metrics, twice. `first_step_s`: from the start of the command to the end of the first step. `parameters`: that are
    trained. `frozen_bytes`: of the others, on all workers together if they are sharded.
    """

    groups: list[dict[str, float]]
    memory: list[int]
    gradient_memory: int
    evaluation_memory: int
    evaluations: list[float]
    whole_evaluation: float | None
    metrics_s: list[float]
    first_step_s: float
    ending_s: float
    flops_per_token: float | None
    peak_flops_per_s: float | None
    parameters: int
    frozen_bytes: int


class GivenSteps(DataOrder):
    """The steps of a measurement: every worker trains on the same rows."""

    def __init__(self, plan: Plan, seed: int, rank: int, steps: Sequence[Sequence[Sequence[int]]]) -> None:
        super().__init__(plan, seed, rank, None)
        self._given = [[np.array(rows, dtype=np.int64) for rows in step] for step in steps]
        of_all = [np.tile(np.concatenate(step), plan.world_size) for step in self._given]
        self.all_rows, self._bounds = np.concatenate(of_all), np.cumsum([0, *map(len, of_all)]).tolist()

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        return self.all_rows[start:stop]

    @property
    def steps_per_epoch(self) -> int:
        return len(self._given)

    def step(self, t: int) -> Step:
        return Step(t, *self._bounds[t : t + 2])

    def micro_batches(self, epoch: int, step: Step) -> list[np.ndarray]:
        return list(self._given[step.t])

    def most_micro_batches(self, step: Step) -> int:
        return len(self._given[step.t])

    @property
    def can_cut_smaller(self) -> bool:
        return False

    def advance(self) -> None:
        self.t += 1


class _Part(Table):
    """Some rows of a table."""

    def __init__(self, table: Table, rows: Sequence[int]) -> None:
        self._table, self._rows = table, np.array(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> np.ndarray:
        return self._table.column(name)[self._rows]

    def __getitem__(self, rows: Sequence[int]) -> dict[str, Any]:
        return self._table[self._rows[rows].tolist()]


def run_launched(job: dict[str, Any], context: WorkerContext) -> Measured | None:
    """The entry point of a launched worker. `job`: `MeasuringJob.as_json()`; the result on rank 0."""
    typed = from_plain(MeasuringJob, job)
    backend = connect_launched(typed, context)
    try:
        measured = _measure(typed, backend)
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"there is too little memory to measure this ({first_line(error)})") from error
        raise
    backend.close()
    return measured if backend.rank == 0 else None


def _measure(job: MeasuringJob, backend: Backend) -> Measured:
    steps = [step for group in job.groups for step in group]
    order = GivenSteps(job.plan, job.config.seed, backend.rank, steps)
    loop = build_loop(job, backend, order=order)
    replica = loop.replica
    groups, memory = [], []
    for group in job.groups:
        loop.train(until=loop.optimizer_step + len(group))
        loop.flush()
        groups.append(dict(loop.meter.step_seconds))
        memory.append(backend.peak_memory_bytes() or 0)
    loop.policy.finish()
    evaluations = [_seconds_of_evaluation(loop, rows) for rows in job.evaluations]
    whole, metrics_s = _evaluate_all(loop, job.evaluations, evaluations)
    memory.append(backend.peak_memory_bytes() or 0)
    all_groups, all_memory = zip(*backend.all_gather_object((groups, memory)), strict=True)
    started = time.perf_counter()
    known, _ = measure_utilisation(loop, job.local_workers * job.threads)
    loop.policy.close()
    model = replica.sharded.whole() if replica.sharded is not None else loop.model
    if backend.rank == 0:
        assert model is not None  # as on worker 0
        replica.recipe.save(model, replica.prepared, job.folder / "model")
        shutil.rmtree(job.folder / "model")
    per_sample = known.get("flops_per_sample")
    assert loop.log.first_step is not None
    return Measured(
        groups=[_mean(of_workers) for of_workers in zip(*all_groups, strict=True)],
        memory=[max(of_workers) for of_workers in zip(*all_memory, strict=True)][:-1],
        gradient_memory=_gradient_memory(loop),
        evaluation_memory=max(evaluated - trained for *_, trained, evaluated in all_memory),
        evaluations=evaluations,
        whole_evaluation=whole,
        metrics_s=metrics_s,
        first_step_s=loop.log.first_step.ended_at - job.started_at,
        ending_s=time.perf_counter() - started,
        flops_per_token=per_sample and per_sample / float(_lengths(loop.replica.prepared.train)[order.all_rows].mean()),
        peak_flops_per_s=known.get("peak_flops_per_s"),
        parameters=sum(parameter.numel() for parameter in loop.model.parameters() if parameter.requires_grad),
        frozen_bytes=sum(one.nbytes for one in loop.model.parameters() if not one.requires_grad),
    )


def _mean(of_workers: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(own[name] for own in of_workers) / len(of_workers) for name in of_workers[0]}


def _gradient_memory(loop: Loop) -> int:
    """Bytes of gradients that are allocated in each step, and are in memory during its later micro-batches."""
    kept = {module.weight for module in loop.model.modules() if isinstance(module, GradientKeepingEmbedding)}
    return sum(local(one).nbytes for one in loop.model.parameters() if one.requires_grad and one not in kept)


def _lengths(table: Table) -> np.ndarray:
    return np.asarray(table.column("length"))


def _seconds_of_evaluation(loop: Loop, rows: Sequence[int]) -> float:
    part = dataclasses.replace(loop.replica.prepared, eval=_Part(loop.replica.prepared.eval, rows))
    return _predict(loop, part)[1]


def _predict(loop: Loop, prepared: Prepared) -> tuple[torch.Tensor, float]:
    loop.backend.all_gather_object(None)  # the workers begin together
    started = time.perf_counter()
    predictions = loop.replica.predictor.predict(prepared)
    assert predictions is not None  # nothing stops it
    return predictions, time.perf_counter() - started


def _evaluate_all(
    loop: Loop, parts: Sequence[Sequence[int]], seconds: Sequence[float]
) -> tuple[float | None, list[float]]:
    """Seconds of predicting all evaluation data, and of computing the metrics twice; None and [] for many data."""
    table = loop.replica.prepared.eval
    per_token = sum(seconds) / sum(_lengths(table)[rows].sum() for rows in parts)
    estimated = loop.backend.broadcast_object(float(per_token * _lengths(table).sum()))
    if estimated > _WHOLE_EVALUATION_S:
        return None, []
    predictions, whole = _predict(loop, loop.replica.prepared)
    metrics_s = []
    for _ in range(2):
        started = time.perf_counter()
        if loop.backend.rank == 0:
            loop.replica.recipe.metrics(predictions, table)
        metrics_s.append(time.perf_counter() - started)
    return whole, metrics_s
