"""Measure a setup: which rows its workers train on, starting them, and the fit of what they measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runner.backends.machine import available_cores
from runner.config.choices import SyncSchedule
from runner.config.schema import Config, Profile, Sync, Tracking
from runner.cost.prediction import Measurement, fitted
from runner.cost.work import Shapes, evaluation_work
from runner.launch.local import launch, temporary_folder
from runner.measure.store import threads_of
from runner.measure.worker import Measured, MeasuringJob, run_launched
from runner.plan.experiment import Experiment
from runner.train.throughput import PHASES

#: How often each kind of step is timed, after a first time that warms up and shows the memory it needs.
_ROUNDS = 2
#: Optimizer steps between two synchronisations of a measurement, and so the steps that are timed together.
_K = 2
#: Shares of the rows, sorted by length, that short and long rows are from.
_SHORT, _LONG = 0.3, 0.02

#: A step: the rows of each of its micro-batches.
Rows = list[list[int]]


def measure(
    experiment: Experiment, rows: tuple[int, int], shapes: tuple[Shapes, Shapes], started_at: float
) -> Measurement:
    """Train some steps on the setup's workers, and fit what they cost.

    `rows`: of the smallest and of the largest micro-batch. `shapes`: of training and evaluation. `started_at`: seconds
    since the epoch, from which on start-up counts. Raises what `launch` raises.
    """
    train, evaluation = shapes
    config, placement, plan = experiment.config, experiment.placement, experiment.plan
    groups = _groups(train.lengths, rows, np.random.default_rng(config.seed))
    steps = sum(map(len, groups)) + 1
    with temporary_folder() as work:
        job = MeasuringJob(
            config=_for_measuring(config),
            facts=experiment.facts,
            folder=Path(work),
            device_type=placement.device_type,
            local_workers=placement.local_workers,
            threads=threads_of(experiment),
            # Long enough for the measurement, however short the run is.
            plan=dataclasses.replace(plan, optimizer_steps=steps, total_samples=plan.samples_before(steps)),
            started_at=started_at,
            groups=groups,
            evaluations=_evaluations(evaluation.lengths, config.evaluation.micro_batch, plan.world_size),
        )
        measured: Measured = launch(run_launched, job.as_json(), plan.world_size)
    return _fit(experiment, rows, job, measured, shapes)


def _for_measuring(config: Config) -> Config:
    """The same settings without what interrupts training, and with a synchronisation in every second step."""
    sync: Sync = config.sync
    if not sync.always_synchronous:
        sync = dataclasses.replace(
            sync,
            k=_K,
            delay=None,
            fragments=1,
            schedule=SyncSchedule.constant,
            synchronous_share=None,
            qsr_alpha=None,
        )
    evaluation = dataclasses.replace(config.evaluation, every_steps=None, keep_best=False, patience=None)
    # Losses are reduced when a group of steps has ended.
    return dataclasses.replace(
        config,
        sync=sync,
        evaluation=evaluation,
        tracking=Tracking(),
        profile=Profile(),
        max_steps=None,
        log_every=10**9,
    )


def _groups(lengths: np.ndarray, rows: tuple[int, int], random: np.random.Generator) -> list[list[Rows]]:
    """Groups of steps: few and many rows, short, mixed and long ones, and two micro-batches.

    In each round by the memory that they need, which so can be told from the peak after each group.
    """
    by_length = np.argsort(lengths, kind="stable")
    few, many = rows
    short = by_length[: max(many, int(_SHORT * len(lengths)))]
    long = by_length[-max(many, int(_LONG * len(lengths))) :]

    def some(count: int, of: np.ndarray = by_length) -> list[int]:
        return random.choice(of, count, replace=count > len(of)).tolist()

    def kinds() -> list[list[Rows]]:
        return [
            [[some(few)] for _ in range(_K)],
            [[some(many, short)] for _ in range(_K)],
            [[some(many)] for _ in range(_K)],
            [[some(many, long)] for _ in range(_K)],
            [[some(few), some(few)] for _ in range(_K)],
        ]

    return [group for _ in range(1 + _ROUNDS) for group in kinds()]


def _evaluations(lengths: np.ndarray, micro_batch: int, workers: int) -> list[list[int]]:
    """Rows that are evaluated together, a micro-batch of each worker: the shortest and the longest."""
    by_length = np.argsort(lengths, kind="stable")
    many = min(micro_batch * workers, len(lengths))
    few, last = max(many // 4, min(workers, len(lengths))), (len(lengths) - 1) // many * many
    kinds = (by_length[:many], by_length[max(last - many, 0) :][:many], by_length[-few:], by_length[last:])
    return [kind.tolist() for _ in range(1 + _ROUNDS) for kind in kinds]


def _fit(
    experiment: Experiment, rows: tuple[int, int], job: MeasuringJob, measured: Measured, shapes: tuple[Shapes, Shapes]
) -> Measurement:
    train, evaluation = shapes
    groups, parts = job.groups, job.evaluations
    features = np.array([_features(group, train) for group in groups])
    kinds = len(groups) // (1 + _ROUNDS)
    timed, seconds = features[kinds:], measured.groups[kinds:]
    phases = {name: np.array([one[name] for one in seconds]) for name in PHASES}
    fits = {name: fitted(timed, own) for name, own in phases.items()}
    synchronisation_s = 0.0
    if experiment.config.sync.has_local_steps(
        experiment.plan.world_size
    ):  # there the phase is nothing else, once in each group
        synchronisation_s = _K * float(np.median(phases["communication"]))
        fits["communication"] = np.zeros(4)
    whole_step = sum(fits.values())
    total = sum(phases.values())
    errors = (timed @ whole_step + synchronisation_s / _K) / total - 1

    micro_batch, workers = experiment.config.evaluation.micro_batch, experiment.plan.world_size
    evaluated = [_of_evaluation(part, evaluation, micro_batch, workers) for part in parts]
    kinds_of_parts = len(parts) // (1 + _ROUNDS)
    observed, took = evaluated[kinds_of_parts:], list(measured.evaluations[kinds_of_parts:])
    if measured.whole_evaluation is not None:
        observed.append(_of_evaluation(range(len(evaluation.lengths)), evaluation, micro_batch, workers))
        took.append(measured.whole_evaluation)

    largest = np.maximum.accumulate([_largest(group, train) for group in groups[:kinds]])
    peaks = np.array(measured.memory[:kinds], dtype=float)
    memory = fitted(np.column_stack([np.ones(kinds), largest]), peaks)
    # Free memory has gaps when all kinds of steps have run several times, as it has in a run.
    memory[0] = measured.memory[-1] - largest[-1] @ memory[1:]
    tokens = [train.of(rows)[0] for group in groups for step in group for rows in step]
    return Measurement(
        setup=experiment.setup_name,
        measured_at=time.time(),
        steps=sum(map(len, groups[kinds:])),
        rows=rows,
        tokens=(min(tokens), max(tokens)),
        phases={name: tuple(map(float, fit)) for name, fit in fits.items()},
        synchronisation_s=synchronisation_s,
        evaluation=tuple(map(float, fitted(np.array(observed), np.array(took)))),
        metrics_s=tuple(measured.metrics_s) or (0.0, 0.0),
        evaluated=len(evaluation.lengths) if measured.metrics_s else 0,
        start_s=max(measured.first_step_s - float(features[0] @ whole_step), 0.0),
        ending_s=measured.ending_s,
        memory=tuple(map(float, memory)),
        gradient_memory=float(measured.gradient_memory),
        evaluation_memory=float(measured.evaluation_memory),
        error=float(np.sqrt(np.mean(errors**2))),
        oversubscription=_oversubscription(job),
        flops_per_token=measured.flops_per_token,
        peak_flops_per_s=measured.peak_flops_per_s,
        parameters=measured.parameters,
        frozen_bytes=measured.frozen_bytes,
    )


def _oversubscription(job: MeasuringJob) -> float:
    """Threads of all workers for each core, at least 1."""
    return max(1.0, job.threads * job.local_workers / available_cores()) if job.device_type == "cpu" else 1.0


def _features(group: Sequence[Rows], shapes: Shapes) -> np.ndarray:
    """The mean of a group of optimizer steps: 1, further micro-batches, tokens, squares."""
    steps = [(1.0, len(step) - 1.0, *np.sum([shapes.of(rows) for rows in step], axis=0)) for step in group]
    return np.asarray(np.mean(steps, axis=0))


def _largest(group: Sequence[Rows], shapes: Shapes) -> tuple[float, float]:
    """The most tokens and squares of a micro-batch."""
    tokens, squares = zip(*(shapes.of(rows) for step in group for rows in step), strict=True)
    return max(tokens), max(squares)


def _of_evaluation(rows: Sequence[int], shapes: Shapes, micro_batch: int, workers: int) -> np.ndarray:
    """Micro-batches, tokens and squares of the worker with most tokens."""
    some = dataclasses.replace(shapes, lengths=shapes.lengths[list(rows)])
    of_workers = evaluation_work(some, micro_batch, workers)
    return np.asarray(of_workers[of_workers[:, 1].argmax()])
