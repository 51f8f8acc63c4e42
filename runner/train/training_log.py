"""Reduces what steps have measured over all workers, and logs it on rank 0."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.train.compilation import CompilationWatch
from runner.train.hooks import LogMetrics, Training
from runner.train.noise import GradientNoise
from runner.train.replica import Replica
from runner.train.throughput import Meter, StepRecord


@dataclass(frozen=True)
class FirstStep:
    """When the first step ended, in seconds since the epoch, and the seconds of compilation until then, if any."""

    ended_at: float
    compile_s: float | None


class TrainingLog:
    """Called with metrics, it logs them on rank 0; as a hook, it has losses reduced and logged when they are due."""

    def __init__(
        self,
        replica: Replica,
        write: LogMetrics | None,
        meter: Meter,
        noise: GradientNoise,
        compilations: CompilationWatch,
    ) -> None:
        self._write = write if replica.backend.rank == 0 else None
        self._replica, self._meter, self._noise, self._compilations = replica, meter, noise, compilations
        self._stats = replica.policy.stats()
        #: The synchronisations that ended a local phase, as logged; on rank 0 only.
        self.synchronisations: list[dict[str, float | None]] = []
        self.first_step: FirstStep | None = None

    def __call__(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log the metrics that are known."""
        known = {name: value for name, value in metrics.items() if value is not None}
        if self._write is not None and known:
            self._write(step, known)

    def after_step(self, training: Training) -> None:
        if self.first_step is None:
            training.flush()
            compiled = self._compilations.total()
            self.first_step = FirstStep(time.time(), compiled.seconds if compiled is not None else None)
        elif training.synchronised and self._meter.pending_steps >= self._replica.config.log_every:
            training.flush(wait=not self._replica.policy.overlaps)

    def reduce(self, wait: bool) -> list[StepRecord]:
        """Reduce the steps since the previous call; without `wait` they may come with the next. A collective."""
        before, self._stats = self._stats, self._replica.policy.stats()
        return self._meter.reduce(self._stats.backward_stall_seconds - before.backward_stall_seconds, wait)

    def write_steps(self, step: int, records: Sequence[StepRecord], wait: bool) -> None:
        """Log these steps, of which `step` is the latest that was trained, and what came with them. A collective."""
        self(step, self._noise.reduce(wait))
        self._write_synchronisations()
        for record in records:
            known = {"train/loss": record.loss, "train/lr": record.lr, "train/samples_seen": record.samples_seen}
            self(record.step, known)
        if records:
            stats, compiled = self._stats, self._compilations.total()
            measured = {
                "train/samples_per_s": self._meter.samples_per_s or None,
                "comm/bytes": stats.bytes,
                "comm/seconds": stats.seconds,
                "comm/stall_seconds": stats.stall_seconds,
                "compile/count": compiled.count if compiled else None,
                "compile/seconds": compiled.seconds if compiled else None,
                **{f"step/{phase}_s": seconds for phase, seconds in self._meter.step_seconds.items()},
            }
            self(step, measured)

    def _write_synchronisations(self) -> None:
        """Log the synchronisations that ended local phases, on rank 0."""
        records, plan = self._replica.policy.take_records(), self._replica.plan
        if self._replica.backend.rank != 0:
            return
        for record in records:
            metrics = record.metrics()
            self.synchronisations.append(metrics)
            self(record.step, {f"sync/{name}": value for name, value in metrics.items()})
            samples = plan.samples_before(record.step) - plan.samples_before(record.step - record.steps)
            self(record.step, self._noise.add_updates(record, samples))

    def continue_from(self, synchronisations: Sequence[dict[str, float | None]]) -> None:
        """Continue the log of a run whose sync policy has loaded its state."""
        self.synchronisations = list(synchronisations)
        self._stats = self._replica.policy.stats()
