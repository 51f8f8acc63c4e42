"""Throughput, time per phase, and the reduction of losses, with a clock and a compiler set by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from runner.backends import Compilations
from runner.train.throughput import Meter, StepLoss


@dataclass(frozen=True)
class Event:
    now: float

    def elapsed_time(self, end_event: Event) -> float:
        return 1000 * (end_event.now - self.now)


class FakeBackend:
    """A single worker. With `compiles` it is a device whose steps have no phases."""

    rank, world_size = 0, 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
        self.now, self.compiled, self._compiles = 100.0, 0.0, compiles
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def compilations(self) -> Compilations | None:
        return Compilations(1, self.compiled, 0) if self._compiles else None

    def synchronize(self) -> None:
        pass

    def start_sum(self, numbers: Sequence[Tensor], async_op: bool) -> Callable[[], list[float]]:
        summed = [number for tensor in numbers for number in tensor.reshape(-1).tolist()]
        return lambda: summed

    def record_event(self) -> Event | None:
        return None if self._compiles else Event(self.now)

    def pass_time(self, seconds: float, compiling: float = 0.0) -> None:
        self.now += seconds
        self.compiled += compiling


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    return FakeBackend(monkeypatch, compiles=False)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    return FakeBackend(monkeypatch, compiles=True)


def add_steps(meter: Meter, steps: int = 1) -> None:
    for number in range(1, steps + 1):
        meter.add(StepLoss(number, torch.tensor(2.0), torch.tensor(10), 10, 1e-3, 10, 10 * number))


def test_throughput_is_timed_from_the_first_reduction(cpu: FakeBackend) -> None:
    """And excludes the time between `pause` and `resume`, which is added up separately."""
    meter = Meter(cpu, cpu.compilations)  # type: ignore[arg-type]
    for seconds, steps in ((50, 1), (4, 2)):
        cpu.pass_time(seconds)
        add_steps(meter, steps)
        assert meter.pending_steps == steps
        meter.reduce()
    assert meter.samples_per_s == pytest.approx(5)
    for _ in range(2):
        meter.pause()
        cpu.pass_time(100)
        meter.resume()
    cpu.pass_time(1)
    add_steps(meter)
    meter.reduce()
    assert meter.samples_per_s == pytest.approx(10)
    assert (meter.timed_samples, meter.timed_seconds) == (30, pytest.approx(5))
    assert meter.paused_seconds == pytest.approx(200)


def test_compilation_is_excluded_once(compiling: FakeBackend) -> None:
    """Of 5 seconds with 4 of compilation 1 is training; what an evaluation compiles is in its own time."""
    meter = Meter(compiling, compiling.compilations)  # type: ignore[arg-type]
    for seconds, compile_seconds in ((40, 30), (5, 4), (2, 0)):
        compiling.pass_time(seconds, compile_seconds)
        add_steps(meter)
        meter.reduce()
    assert (meter.timed_samples, meter.timed_seconds) == (20, pytest.approx(3))
    meter.pause()
    compiling.pass_time(9, 8)
    meter.resume()
    compiling.pass_time(10)
    add_steps(meter)
    meter.reduce()
    assert (meter.timed_samples, meter.timed_seconds) == (30, pytest.approx(13))
    assert (meter.step_seconds, meter.mean_step_seconds) == ({}, None)


def test_seconds_by_phase(cpu: FakeBackend) -> None:
    """Waiting for communication within the backward pass counts as communication."""
    meter = Meter(cpu, cpu.compilations)  # type: ignore[arg-type]
    cpu.pass_time(50)
    add_steps(meter)
    meter.reduce()
    for _ in range(2):
        for phase, seconds in (("data", 1), ("forward", 3), ("backward", 6), ("optimizer", 2), ("communication", 4)):
            meter.timer.begin(phase)
            cpu.pass_time(seconds)
        meter.timer.begin("other")
        cpu.pass_time(0.5)
        add_steps(meter)
    meter.reduce(stalled=2.0)
    expected = {"data": 1, "forward": 3, "backward": 5, "optimizer": 2, "communication": 5, "other": 0.5}
    assert meter.step_seconds == pytest.approx(expected)
    meter.pause()
    cpu.pass_time(100)
    meter.resume()
    meter.timer.begin("forward")
    cpu.pass_time(6)
    add_steps(meter)
    meter.reduce()
    assert meter.step_seconds == pytest.approx(dict.fromkeys(expected, 0.0) | {"forward": 6})
    assert meter.mean_step_seconds == pytest.approx(
        {name: 2 * value / 3 for name, value in expected.items()} | {"forward": 4}
    )


def test_without_waiting_losses_come_with_the_next_reduction(cpu: FakeBackend) -> None:
    meter = Meter(cpu, cpu.compilations)  # type: ignore[arg-type]
    returned = []
    for number in (1, 2, 3):
        cpu.pass_time(5)
        meter.add(StepLoss(number, torch.tensor(2.0), torch.tensor(10), 10, 1e-3, 10, 10 * number))
        returned.append([record.step for record in meter.reduce(wait=False)])
    returned.append([record.step for record in meter.reduce()])
    assert returned == [[], [1], [2], [3]]
    assert meter.reduce() == []
    assert (meter.timed_samples, meter.timed_seconds) == (20, pytest.approx(10))
    assert meter.state_dict() == {"loss_total": 6.0, "count_total": 30}
