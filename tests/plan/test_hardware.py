"""The arithmetic of devices that are not here, on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from runner.plan.hardware import Estimate, Figures, Model, answer, estimate, mean_work, prediction_of
from runner.plan.prediction import Quantity

#: 1e12 operations for 1,000 tokens, at half of 4e12 per second: half a second.
MODEL = Model(parameters=1e8, flops_per_token=1e9, efficiency=0.5)
FIGURES = Figures(flops_per_s=4e12, memory_bytes=1e10, memory_bytes_per_s=4e11, link_bytes_per_s=1e9)
WORK = mean_work(tokens=1000, micro_batches=2, workers=4, steps=100)


def test_parts_of_a_step() -> None:
    parts = estimate(WORK, MODEL, FIGURES, always_synchronous=False)
    assert parts.compute.value == pytest.approx(0.5)
    assert parts.optimizer.value == pytest.approx(1e8 * 28 / (4e11 * 0.7))
    assert parts.all_reduce.value == pytest.approx(1.5 * 4e8 / 0.45e9), "a ring of four"
    alone = estimate(mean_work(1000, 1, 1, 100), MODEL, FIGURES, always_synchronous=True)
    assert alone.all_reduce.value == 0


def test_gradients_can_be_hidden_by_the_backward_pass() -> None:
    """With k = 1 the low end is what a fast link leaves beside a fast backward pass; the value assumes no overlap."""
    slow, overlapped = (estimate(WORK, MODEL, FIGURES, always_synchronous=one) for one in (False, True))
    assert overlapped.all_reduce.value == slow.all_reduce.value
    assert overlapped.all_reduce.low < slow.all_reduce.low
    fast_link = Figures(4e12, 1e10, 4e11, 1e11)
    assert estimate(WORK, MODEL, fast_link, True).all_reduce.low == 0


def test_which_k_pays() -> None:
    """The smallest power of two with at most a tenth of a step for communication."""

    def parts(all_reduce: float) -> Estimate:
        return Estimate(Quantity(0.9, 0.5, 1.5), Quantity(0.1, 0.1, 0.1), Quantity(all_reduce, 0.0, 2 * all_reduce))

    assert parts(0.1).smallest_useful_k == 1
    assert parts(0.2).smallest_useful_k == 2
    assert parts(0.9).smallest_useful_k == 16
    assert parts(0.5).communication_share(1).value == pytest.approx(1 / 3)
    assert parts(0.5).step(4).value == pytest.approx(1.125)
    assert "sync.k=8" in answer(parts(0.5), "a device", 4)
    assert "sync.k" not in answer(parts(0.05), "a device", 4)


def test_as_a_prediction() -> None:
    parts = estimate(WORK, MODEL, FIGURES, always_synchronous=False)
    found = prediction_of(parts, WORK, MODEL, FIGURES, k=4)
    assert found.training.value == pytest.approx(100 * parts.step(4).value)
    assert found.training.low < found.training.value / 1.3
    assert found.training.high > found.training.value * 1.3
    assert sum(found.step_s.values()) == pytest.approx(parts.step(4).value)
    assert found.communication_share == pytest.approx(parts.communication_share(4).value)
    assert found.memory_bytes == 24e8
    assert found.fits is True
    assert found.measured_at is None


def test_the_published_experiment() -> None:
    """bert-large on four GPUs over PCIe 3.0, 32 samples of at most 384 tokens in a step, 250 steps.

    The published runs took 209 s with k = 1, 164 with 4 and 147 with 16; the GPU is not named.
    """
    work = mean_work(tokens=8 * 384, micro_batches=1, workers=4, steps=250)
    model = Model(335e6, 6 * 335e6)
    figures = Figures(35.6e12, 24e9, 936e9, 15.75e9)
    for k, published in ((1, 209.0), (4, 164.0), (16, 147.0)):
        parts = estimate(work, model, figures, always_synchronous=k == 1)
        training = prediction_of(parts, work, model, figures, k).training
        assert training.low < published < training.high
        assert training.value == pytest.approx(published, rel=0.35)
    assert estimate(work, model, figures, True).communication_share(1).value == pytest.approx(0.32, abs=0.1)
