"""Losses and speed of training, reduced over workers about once a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.backends import Backend
from runner.train.step_clock import PHASES, StepClock

#: Seconds between two reductions that the meter aims at: often enough to watch, too rare to slow training down.
TARGET_SECONDS = 1.0


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step over all workers. `loss`: mean over the global batch's loss terms.

    `counted`, `planned`: the loss terms that the recipe counted, and those that the losses were divided by.
    """

    step: int
    loss: float
    lr: float
    samples_seen: int
    counted: int
    planned: int


@dataclass(frozen=True)
class _Pending:
    step: int
    loss_sum: Tensor
    counted: Tensor
    count: int
    lr: float
    samples: int
    samples_seen: int


class Meter:
    """Collects each step's loss on the device and reduces a whole stretch of steps by one small collective.

    Reading a loss makes the host wait for the device, and summing it over workers makes the workers wait for each
    other; both are paid once a stretch. The length of a stretch follows from rank 0's clock, which travels with the
    losses, so that all workers choose the same one.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pending: list[_Pending] = []
        self._under_way: deque[tuple[list[_Pending], Callable[[], list[float]]]] = deque()
        self._stretch = 1
        self._mark: float | None = None
        self._paused_at = 0.0
        self._compile_seconds = 0.0
        self._clock = StepClock(backend)
        self._phase_totals = dict.fromkeys(PHASES, 0.0)
        self._phase_steps = 0
        #: Seconds of an optimizer step by phase, over the latest stretch; empty where the device has no phases.
        self.step_seconds: dict[str, float] = {}
        self.loss_total = 0.0
        self.count_total = 0
        self.timed_samples = 0
        self.timed_seconds = 0.0
        self.samples_per_s = 0.0
        #: Between `pause` and `resume`: evaluation, and closing an epoch's books.
        self.paused_seconds = 0.0

    def add(
        self,
        step: int,
        loss_sum: Tensor,
        counted: Tensor,
        global_count: int,
        lr: float,
        samples: int,
        samples_seen: int,
    ) -> None:
        """Note a step (counted from 1).

        `loss_sum`, `counted`: this worker's loss sum and loss terms, as the recipe gave them. `global_count`,
        `samples`: the loss terms and samples of the whole global batch, as planned.
        """
        self._pending.append(_Pending(step, loss_sum, counted, global_count, lr, samples, samples_seen))

    def begin(self, phase: str) -> None:
        """From here on time belongs to this phase of a step."""
        self._clock.begin(phase)

    @property
    def mean_step_seconds(self) -> dict[str, float] | None:
        """Seconds of an optimizer step by phase, over all timed steps; None where there is nothing to tell."""
        if not self._phase_steps:
            return None
        return {phase: total / self._phase_steps for phase, total in self._phase_totals.items()}

    @property
    def full(self) -> bool:
        return len(self._pending) >= self._stretch

    def pause(self) -> None:
        """Take the time since the last reduction out of the speed; the clock starts again with `resume`."""
        self._mark = None
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        self._compiling_since_last()
        self._clock.begin("other")
        self._backend.synchronize()
        self._clock.drain()
        self._mark = time.perf_counter()
        self.paused_seconds += self._mark - self._paused_at

    def reduce(self, stalled: float = 0.0, wait: bool = True) -> list[StepRecord]:
        """The steps since the last reduction, over all workers. A collective.

        `stalled`: seconds of them in which the backward pass waited for communication. `wait`: for the workers that are
        behind; otherwise these steps come with the next reduction, and what comes now are those of the last one.
        """
        if self._pending:
            self._begin(stalled, wait)
        records = []
        while len(self._under_way) > (0 if wait else 1):
            records += self._end(*self._under_way.popleft())
        return records

    def _begin(self, stalled: float, wait: bool) -> None:
        pending, self._pending = self._pending, []
        self._clock.begin("other")
        self._backend.synchronize()
        now = time.perf_counter()
        compiling = self._compiling_since_last()
        elapsed = now - self._mark - compiling if self._mark is not None and self._backend.rank == 0 else 0.0
        timed, self._mark = self._mark is not None, now
        phases = self._clock.drain()
        if timed:
            self._note_phases(phases, stalled, len(pending))
        clock = torch.tensor(elapsed, dtype=torch.float64)
        numbers = [*(p.loss_sum for p in pending), *(p.counted for p in pending), clock]
        self._under_way.append((pending, self._backend.start_sum(numbers, async_op=not wait)))

    def _end(self, pending: list[_Pending], result: Callable[[], list[float]]) -> list[StepRecord]:
        reduced = result()
        losses, counted, seconds = reduced[: len(pending)], reduced[len(pending) : -1], reduced[-1]
        if seconds > 0:
            samples = sum(p.samples for p in pending)
            self.timed_samples += samples
            self.timed_seconds += seconds
            self.samples_per_s = samples / seconds
            self._stretch = max(1, min(100, round(TARGET_SECONDS * len(pending) / seconds)))
        self.loss_total += sum(losses)
        self.count_total += sum(p.count for p in pending)
        return [
            StepRecord(p.step, loss / max(p.count, 1), p.lr, p.samples_seen, int(terms), p.count)
            for p, loss, terms in zip(pending, losses, counted, strict=True)
        ]

    def _note_phases(self, seconds: dict[str, float], stalled: float, steps: int) -> None:
        if not seconds:
            return
        stalled = min(max(stalled, 0.0), seconds["backward"])
        seconds["backward"] -= stalled
        seconds["communication"] += stalled
        self.step_seconds = {phase: spent / steps for phase, spent in seconds.items()}
        self._phase_steps += steps
        for phase, spent in seconds.items():
            self._phase_totals[phase] += spent

    def _compiling_since_last(self) -> float:
        """Seconds, which belong to a run's beginning, whenever a program is met for the first time."""
        compiled = self._backend.compilations()
        seconds, before = (compiled.seconds if compiled is not None else 0.0), self._compile_seconds
        self._compile_seconds = seconds
        return seconds - before

    def state_dict(self) -> dict[str, float]:
        assert not self._pending, "reduce first: pending losses are not part of the state"
        assert not self._under_way, "and wait for them"
        return {"loss_total": self.loss_total, "count_total": self.count_total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss_total, self.count_total = state["loss_total"], int(state["count_total"])
