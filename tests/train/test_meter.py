"""The speed of training: what the clock counts, on a clock and a compiler that are told what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from runner.backends import Compilations
from runner.train.meter import Meter


@dataclass(frozen=True)
class Event:
    now: float

    def elapsed_time(self, end_event: Event) -> float:
        return 1000 * (end_event.now - self.now)


class Lonely:
    """A world of one worker, whose clock and compiler are moved by hand."""

    rank, world_size = 0, 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
        self.now, self.compiled, self._compiles = 100.0, 0.0, compiles
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def compilations(self) -> Compilations | None:
        return Compilations(1, self.compiled, 0) if self._compiles else None

    def synchronize(self) -> None:
        pass

    def start_sum(self, numbers: Sequence[Tensor], async_op: bool) -> Callable[[], list[float]]:
        summed = [float(number) for number in numbers]
        return lambda: summed

    def record_event(self) -> Event | None:
        return None if self._compiles else Event(self.now)

    def go_on(self, seconds: float, compiling: float = 0.0) -> None:
        """Time passes, part of it with compiling."""
        self.now += seconds
        self.compiled += compiling


def train(meter: Meter, steps: int, samples: int = 10) -> None:
    """So many steps, and a reduction after the last."""
    for number in range(1, steps + 1):
        meter.add(number, torch.tensor(2.0), torch.tensor(samples), samples, 1e-3, samples, samples * number)
    meter.reduce()


@pytest.mark.parametrize("compiles", [False, True])
def test_speed_is_samples_by_seconds_between_reductions(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first reduction on, and without the time between `pause` and `resume`."""
    here = Lonely(monkeypatch, compiles)
    meter = Meter(here)  # type: ignore[arg-type]
    here.go_on(50)
    train(meter, 1)  # the clock starts
    assert meter.samples_per_s == 0
    here.go_on(4)
    train(meter, 2)
    assert meter.samples_per_s == pytest.approx(5)
    meter.pause()
    here.go_on(100)
    meter.resume()
    here.go_on(1)
    train(meter, 1)
    assert meter.samples_per_s == pytest.approx(10)
    assert (meter.timed_samples, meter.timed_seconds) == (30, pytest.approx(5))


def test_compiling_is_no_part_of_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 seconds, 4 of which compiled, 1 was training: ten samples are ten a second. Only once, and not before."""
    here = Lonely(monkeypatch, compiles=True)
    meter = Meter(here)  # type: ignore[arg-type]
    here.go_on(40, compiling=30)
    train(meter, 1)
    here.go_on(5, compiling=4)
    train(meter, 1)
    assert meter.samples_per_s == pytest.approx(10)
    here.go_on(2)
    train(meter, 1)
    assert meter.samples_per_s == pytest.approx(5)
    assert (meter.timed_samples, meter.timed_seconds) == (20, pytest.approx(3))


def test_what_an_evaluation_compiles_is_not_taken_off_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands while an evaluation compiles: the seconds of training after it stay whole."""
    here = Lonely(monkeypatch, compiles=True)
    meter = Meter(here)  # type: ignore[arg-type]
    train(meter, 1)
    meter.pause()
    here.go_on(9, compiling=8)
    meter.resume()
    here.go_on(10)
    train(meter, 1)
    assert meter.samples_per_s == pytest.approx(1)
    assert (meter.timed_samples, meter.timed_seconds) == (10, pytest.approx(10))


def test_where_the_time_of_a_step_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases add up to the time between reductions; waiting for communication within backward counts as such."""
    here = Lonely(monkeypatch, compiles=False)
    meter = Meter(here)  # type: ignore[arg-type]
    here.go_on(50)
    train(meter, 1)  # imports and first allocations: no phase of a step
    for _ in range(2):
        for phase, seconds in (("data", 1), ("forward", 3), ("backward", 6), ("optimizer", 2), ("communication", 4)):
            meter.begin(phase)
            here.go_on(seconds)
        meter.begin("other")
        here.go_on(0.5)
        meter.add(2, torch.tensor(2.0), torch.tensor(10), 10, 1e-3, 10, 20)
    meter.reduce(stalled=2.0)
    expected = {"data": 1, "forward": 3, "backward": 5, "optimizer": 2, "communication": 5, "other": 0.5}
    assert meter.step_seconds == pytest.approx(expected)
    assert meter.mean_step_seconds == pytest.approx(expected)
    meter.pause()
    here.go_on(100)  # an evaluation
    meter.resume()
    meter.begin("forward")
    here.go_on(7)
    train(meter, 1)
    assert meter.step_seconds == pytest.approx(dict.fromkeys(expected, 0.0) | {"forward": 7})


def test_a_compiled_step_has_no_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host cannot tell nothing is told."""
    here = Lonely(monkeypatch, compiles=True)
    meter = Meter(here)  # type: ignore[arg-type]
    train(meter, 1)
    meter.begin("forward")
    here.go_on(7)
    train(meter, 1)
    assert meter.step_seconds == {}
    assert meter.mean_step_seconds is None


def test_losses_that_nobody_waits_for_come_with_the_next_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is told once, in order, by the last reduction that waits at the latest; the speed is the same."""
    here = Lonely(monkeypatch, compiles=False)
    meter = Meter(here)  # type: ignore[arg-type]
    told = []
    for number in (1, 2, 3):
        here.go_on(5)
        meter.add(number, torch.tensor(2.0), torch.tensor(10), 10, 1e-3, 10, 10 * number)
        told.append([record.step for record in meter.reduce(wait=False)])
    told.append([record.step for record in meter.reduce()])
    assert told == [[], [1], [2], [3]]
    assert meter.reduce() == []
    assert meter.samples_per_s == pytest.approx(2)
    assert (meter.timed_samples, meter.timed_seconds) == (20, pytest.approx(10))
    assert (meter.loss_total, meter.count_total) == (6.0, 30)
    meter.state_dict()


def test_the_time_that_is_no_training_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations, and nothing of the training between them."""
    here = Lonely(monkeypatch, compiles=False)
    meter = Meter(here)  # type: ignore[arg-type]
    for evaluation in (3, 4):
        train(meter, 1)
        here.go_on(50)
        meter.pause()
        here.go_on(evaluation)
        meter.resume()
    here.go_on(50)
    assert meter.paused_seconds == pytest.approx(7)
