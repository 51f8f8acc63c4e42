"""Loss, throughput and time per phase of training steps, reduced over workers once for several steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from runner.backends import Backend, Compilations

#: Phases of an optimizer step. `backward` excludes the communication it waits for; `other` is logging and the loop.
PHASES = ("data", "forward", "backward", "optimizer", "communication", "other")


@dataclass(frozen=True)
class StepLoss:
    """One worker's loss in optimizer step `step` (counted from 1), still on the device.

    `loss_sum`, `counted`: sum and number of this worker's loss terms, as the recipe returned them. `planned`,
    `samples`: loss terms and samples of the whole global batch. `samples_seen`: after the step, over all workers.
    `gradient_norm`: of this worker's gradient before clipping, None if it was not computed. `applied`: whether this
    worker's optimizer stepped, which it does not without samples or if the fp16 loss scaler skips the step. `repeated`:
    whether this worker has repeated it with smaller micro-batches, for lack of memory. `also`: other numbers to sum,
    as many in each step.
    """

    step: int
    loss_sum: Tensor
    counted: Tensor
    planned: int
    lr: float
    samples: int
    samples_seen: int
    gradient_norm: Tensor | None = None
    applied: bool = True
    repeated: bool = False
    also: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step over all workers. `loss`: mean over the loss terms of the global batch.

    `counted`: loss terms that the recipe counted; `planned`: loss terms that the loss was divided by. `gradient_norms`:
    their sum over workers; `applied`: how many workers' optimizers stepped; `repeated`: how many have repeated it.
    `also`: the sums of the steps' other numbers.
    """

    step: int
    loss: float
    lr: float
    samples_seen: int
    counted: int
    planned: int
    gradient_norms: float
    applied: int
    repeated: int = 0
    also: Sequence[float] = ()


class PhaseTimer:
    """Times the phases of optimizer steps, and knows the current one."""

    def __init__(self, backend: Backend, annotates: bool = False) -> None:
        """`annotates`: whether phases are marked in a profile."""
        self._backend, self._annotates = backend, annotates
        self._starts: list[tuple[str, Any]] = []
        self._annotation: record_function | None = None
        #: The current phase of a step, and a number that grows whenever this worker makes progress.
        self.phase, self.progress_count = "other", 0

    def begin(self, phase: str) -> None:
        """Start a phase, which ends the previous one.

        Timestamps go through the device's queue, since a GPU runs behind the host. They are read when the host waits
        for the device anyway. A device that compiles whole steps has no phases.
        """
        self.progress(phase)
        timestamp = self._backend.record_event()
        if timestamp is not None:
            self._starts.append((phase, timestamp))
        if self._annotates:
            if self._annotation is not None:
                self._annotation.__exit__(None, None, None)
            self._annotation = record_function(phase).__enter__()

    def progress(self, phase: str) -> None:
        """Note that this worker makes progress, in a phase of a step, in `evaluation` or in `checkpoint`."""
        self.phase, self.progress_count = phase, self.progress_count + 1

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the previous call, empty without phases. The device must be synchronised."""
        if not self._starts:
            return {}
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._starts, self._starts[1:], strict=False):
            seconds[phase] += start.elapsed_time(end) / 1000
        self._starts = self._starts[-1:]  # the current phase
        return seconds


class Meter:
    """Keeps the loss of each step on the device and reduces several steps in one small all-reduce.

    Reading a loss makes the host wait for the device, and summing it makes workers wait for each other. Both are paid
    once per reduction.
    """

    def __init__(
        self, backend: Backend, compilations: Callable[[], Compilations | None], annotates: bool = False
    ) -> None:
        """`compilations`: all so far; None if nothing compiles. `annotates`: whether phases are marked in a profile."""
        self._backend, self._compilations = backend, compilations
        self.timer = PhaseTimer(backend, annotates)
        self._pending: list[StepLoss] = []
        self._in_flight: deque[tuple[list[StepLoss], Callable[[], list[float]]]] = deque()
        self._phase_totals = dict.fromkeys(PHASES, 0.0)
        self._phase_steps = 0
        self._timed_from: float | None = None
        self._paused_at = 0.0
        self._compile_seconds = 0.0
        #: Seconds of an optimizer step by phase since the previous reduction; empty if the device has no phases.
        self.step_seconds: dict[str, float] = {}
        self.loss_total = 0.0
        self.count_total = 0
        self.timed_samples = 0
        self.timed_seconds = 0.0
        self.samples_per_s = 0.0
        #: Seconds between `pause` and `resume`: evaluation.
        self.paused_seconds = 0.0

    def add(self, loss: StepLoss) -> None:
        self._pending.append(loss)

    @property
    def pending_steps(self) -> int:
        """Steps since the previous reduction."""
        return len(self._pending)

    @property
    def mean_step_seconds(self) -> dict[str, float] | None:
        """Seconds of an optimizer step by phase over all timed steps; None if unknown."""
        if not self._phase_steps:
            return None
        return {phase: total / self._phase_steps for phase, total in self._phase_totals.items()}

    def pause(self) -> None:
        """Exclude the time until `resume`, and the time since the previous reduction, from the throughput."""
        self._timed_from = None
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        self._new_compile_seconds()
        self.timer.begin("other")
        self._backend.synchronize()
        self.timer.take_seconds()
        self._timed_from = time.perf_counter()
        self.paused_seconds += self._timed_from - self._paused_at

    def reduce(self, stalled: float = 0.0, wait: bool = True) -> list[StepRecord]:
        """Reduce the pending steps over all workers. A collective.

        `stalled`: seconds in which the backward pass waited for communication since the previous reduction. `wait`:
        if false, return the steps of the previous reduction instead of waiting for this one.
        """
        if self._pending:
            pending, self._pending = self._pending, []
            self._measure(pending, stalled)
            zero = torch.tensor(0.0)
            numbers = [
                *(loss.loss_sum for loss in pending),
                *(loss.counted for loss in pending),
                *(zero if loss.gradient_norm is None else loss.gradient_norm for loss in pending),
                *(zero + loss.applied for loss in pending),
                *(zero + loss.repeated for loss in pending),
                torch.cat([loss.also for loss in pending]),
            ]
            self._in_flight.append((pending, self._backend.start_sum(numbers, async_op=not wait)))
        records = []
        while len(self._in_flight) > (0 if wait else 1):
            pending, result = self._in_flight.popleft()
            records += self._records(pending, result())
        return records

    def _measure(self, steps: list[StepLoss], stalled: float) -> None:
        """Time the steps since the previous reduction, of which the first has nothing to be timed from."""
        self.timer.begin("other")
        self._backend.synchronize()
        now = time.perf_counter()
        compiling = self._new_compile_seconds()
        phases = self.timer.take_seconds()
        timed_from, self._timed_from = self._timed_from, now
        if timed_from is None:
            return
        seconds = now - timed_from - compiling
        if seconds > 0:
            samples = sum(loss.samples for loss in steps)
            self.timed_samples += samples
            self.timed_seconds += seconds
            self.samples_per_s = samples / seconds
        if phases:
            stalled = min(max(stalled, 0.0), phases["backward"])
            phases["backward"] -= stalled
            phases["communication"] += stalled
            self.step_seconds = {phase: spent / len(steps) for phase, spent in phases.items()}
            self._phase_steps += len(steps)
            for phase, spent in phases.items():
                self._phase_totals[phase] += spent

    def _records(self, steps: list[StepLoss], reduced: list[float]) -> list[StepRecord]:
        n = len(steps)
        losses, counted, norms, applied, repeated = (reduced[i : i + n] for i in range(0, 5 * n, n))
        also, each = reduced[5 * n :], len(steps[0].also)
        for loss in losses:  # one by one: the total must not depend on how many steps are reduced together
            self.loss_total += loss
        self.count_total += sum(step.planned for step in steps)
        return [
            StepRecord(
                step=step.step,
                loss=loss / max(step.planned, 1),
                lr=step.lr,
                samples_seen=step.samples_seen,
                counted=int(terms),
                planned=step.planned,
                gradient_norms=norm,
                applied=round(workers),
                repeated=round(again),
                also=also[each * number : each * (number + 1)],
            )
            for number, (step, loss, terms, norm, workers, again) in enumerate(
                zip(steps, losses, counted, norms, applied, repeated, strict=True)
            )
        ]

    def _new_compile_seconds(self) -> float:
        """Seconds of compilation since the previous call. They belong to start-up, whenever they occur."""
        compiled = self._compilations()
        before, self._compile_seconds = self._compile_seconds, compiled.seconds if compiled is not None else 0.0
        return self._compile_seconds - before

    def state_dict(self) -> dict[str, float]:
        assert not self._pending, "reduce first: pending losses are not part of the state"
        assert not self._in_flight, "reduce with wait=True first"
        return {"loss_total": self.loss_total, "count_total": self.count_total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss_total, self.count_total = state["loss_total"], int(state["count_total"])
