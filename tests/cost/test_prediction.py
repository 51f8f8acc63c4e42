"""The fit of measured steps and what follows from it, on numbers that can be checked by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from runner.cost.prediction import Measurement, Prediction, fitted, predict
from runner.cost.work import Work

PHASES = {
    "data": (0.0, 0.0, 0.0, 0.0),
    "forward": (0.0, 0.01, 0.001, 0.0),
    "backward": (0.02, 0.0, 0.002, 1e-5),
    "optimizer": (0.05, 0.0, 0.0, 0.0),
    "communication": (0.0, 0.0, 0.0, 0.0),
    "other": (0.0, 0.0, 0.0, 0.0),
}
MEASURED = Measurement(
    setup="cpu2",
    measured_at=0.0,
    steps=20,
    rows=(2, 8),
    tokens=(50.0, 200.0),
    phases=PHASES,
    synchronisation_s=0.5,
    evaluation=(0.1, 0.001, 0.0),
    metrics_s=(1.0, 0.2),
    evaluated=10,
    start_s=3.0,
    ending_s=1.0,
    memory=(1e9, 1e6, 0.0),
    gradient_memory=3e7,
    evaluation_memory=5e7,
    error=0.01,
)


def work(tokens: list[list[float]], **changes: Any) -> Work:
    """Steps by workers, one micro-batch each."""
    own = np.array(tokens)
    whole = Work(
        micro_batches=np.ones_like(own),
        tokens=own,
        squares=np.zeros_like(own),
        phase_starts=np.arange(len(own)),
        share=1.0,
        synchronisations=0,
        largest=np.array([own.max(), 0.0]),
        padding_share=0.25,
    )
    return dataclasses.replace(whole, **changes)


def predicted(of: Work, measured: Measurement = MEASURED, available: float | None = None) -> Prediction:
    evaluation = np.array([[2.0, 300.0, 0.0], [2.0, 100.0, 0.0]])
    return predict(of, measured, evaluation, eval_samples=20, evaluations=3, available_bytes=available)


def test_a_step_lasts_as_long_as_its_slowest_worker() -> None:
    found = predicted(work([[100, 200], [200, 100]]))
    assert found.training.value == pytest.approx(2 * (0.07 + 0.6))
    assert found.step_s["waiting"] == pytest.approx(0.15)
    assert sum(found.step_s.values()) == pytest.approx(0.67)
    assert found.communication_share == pytest.approx(0.15 / 0.67)


def test_a_local_phase_lasts_as_long_as_its_slowest_worker() -> None:
    """The same steps in one phase: nobody waits; and one synchronisation."""
    found = predicted(work([[100, 200], [200, 100]], phase_starts=np.array([0]), synchronisations=1))
    assert found.step_s["waiting"] == pytest.approx(0)
    assert found.step_s["communication"] == pytest.approx(0.25)
    assert found.training.value == pytest.approx(2 * (0.07 + 0.45) + 0.5)


def test_waiting_workers_leave_their_cores_to_others() -> None:
    """With two threads per core a slow worker is twice as fast while the other waits."""
    crowded = dataclasses.replace(MEASURED, oversubscription=2.0)
    assert predicted(work([[100, 200]]), crowded).step_s["waiting"] == 0
    assert predicted(work([[0, 1000]]), crowded).step_s["waiting"] == pytest.approx(0)
    one_sided = predicted(work([[0, 0, 0, 1000]]), crowded)
    assert one_sided.training.value == pytest.approx((0.07 + 3) / 2)


def test_accumulation_squares_and_sampled_steps() -> None:
    found = predicted(work([[100]], micro_batches=np.array([[3.0]]), squares=np.array([[1000.0]]), share=0.1))
    assert found.training.value == pytest.approx(10 * (0.07 + 2 * 0.01 + 0.3 + 0.01))


def test_what_is_not_training() -> None:
    found = predicted(work([[100, 100]]))
    assert found.evaluation_s == pytest.approx(3 * (0.2 + 0.3) + 2 * 1.0 + 2 * 2 * 0.2)
    assert found.total.value == pytest.approx(found.training.value + 3 + 1 + found.evaluation_s)
    assert found.padding_share == 0.25
    assert found.money(36).value == pytest.approx(found.total.value / 100)


def test_memory_and_whether_it_fits() -> None:
    found = predicted(work([[100, 200]]))
    assert found.memory_bytes == pytest.approx(1.25e9)
    assert found.fits is None
    accumulated = predicted(work([[100, 200]], micro_batches=np.array([[1.0, 2.0]])))
    assert accumulated.memory_bytes == pytest.approx(1.28e9), "gradients are there while the second is computed"
    assert predicted(work([[100, 200]]), available=1.4e9).fits is True
    assert predicted(work([[100, 200]]), available=1.35e9).fits is False, "too close to promise"


def test_the_interval_is_wider_where_nothing_was_measured() -> None:
    within, outside = predicted(work([[100]])), predicted(work([[1000]]))
    assert (within.outside, outside.outside) == (1.0, 5.0)
    widths = [one.training.high / one.training.value for one in (within, outside)]
    assert widths[0] == pytest.approx(1.1)
    assert widths[1] > 1.3
    noisy = predicted(work([[100]]), dataclasses.replace(MEASURED, error=0.2))
    assert noisy.training.high / noisy.training.value == pytest.approx(1.4)
    assert noisy.training.low < noisy.training.value


def test_the_fit_finds_what_made_the_numbers() -> None:
    random = np.random.default_rng(0)
    features = np.column_stack([np.ones(12), random.integers(0, 3, 12), random.uniform(100, 1000, (12, 2))])
    true = np.array([0.03, 0.0, 2e-4, 1e-5])
    assert fitted(features, features @ true) == pytest.approx(true, abs=1e-9)


def test_the_fit_ignores_single_slow_steps_and_is_never_negative() -> None:
    features = np.column_stack([np.ones(10), np.linspace(100, 1000, 10)])
    measured = features @ np.array([0.01, 1e-3])
    measured[[2, 7]] *= 3  # other processes
    assert fitted(features, measured) == pytest.approx([0.01, 1e-3], rel=0.05)
    assert (fitted(features, 2 - features[:, 1] * 1e-3) >= 0).all()
    assert fitted(features, np.zeros(10)).tolist() == [0, 0]
