"""The arithmetic of devices that are not here, on numbers that can be checked by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runner.config.choices import AdapterKind, PrecisionName
from runner.config.schema import Adapter, Hardware
from runner.cost.hardware import Estimate, Model, answer, estimate, model_of_size, prediction_of, published_peak
from runner.cost.quantity import Quantity
from runner.cost.work import Work, mean_work
from runner.plan import Plan

#: 1e12 operations for 1,000 tokens, at half of 4e12 per second: half a second.
MODEL = Model(parameters=1e8, flops_per_token=1e9, efficiency=0.5)
PEAK = 4e12
HARDWARE = Hardware("a device", memory_gb=10, memory_gb_per_s=400, link="a link", link_gb_per_s=1)
PLAN = dataclasses.replace(
    Plan(*range(1, 17), False), world_size=4, replica_batch=10, accumulation_steps=2, optimizer_steps=100
)
WORK = mean_work(PLAN, tokens=100)


def parts_of(work: Work = WORK, hardware: Hardware = HARDWARE, overlaps: bool = False) -> Estimate:
    return estimate(work, MODEL, hardware, PEAK, overlaps)


def test_parts_of_a_step() -> None:
    parts = parts_of()
    assert parts.compute.value == pytest.approx(0.5)
    assert parts.optimizer.value == pytest.approx(1e8 * 28 / (4e11 * 0.7))
    assert parts.all_reduce.value == pytest.approx(1.5 * 4e8 / 0.45e9), "a ring of four"
    alone = parts_of(mean_work(dataclasses.replace(PLAN, world_size=1), tokens=100), overlaps=True)
    assert alone.all_reduce.value == 0


def test_gradients_can_be_hidden_by_the_backward_pass() -> None:
    """With k = 1 the low end is what a fast link leaves beside a fast backward pass; the value assumes no overlap."""
    slow, overlapped = (parts_of(overlaps=one) for one in (False, True))
    assert overlapped.all_reduce.value == slow.all_reduce.value
    assert overlapped.all_reduce.low < slow.all_reduce.low
    assert parts_of(hardware=dataclasses.replace(HARDWARE, link_gb_per_s=100), overlaps=True).all_reduce.low == 0


@pytest.mark.parametrize(
    ("parameters", "rank", "trained"),
    # Counted: Llama 7B has 32 layers 4,096 wide with 11,008 hidden units in three matrices; BERT-base 12 of 768.
    [(6.5e9, 16, 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11008))), (8.6e7, 8, 12 * 8 * (4 * 2 * 768 + 2 * 5 * 768))],
    ids=["Llama 7B", "BERT-base"],
)
def test_a_size_with_an_adapter(parameters: float, rank: int, trained: int) -> None:
    """Only the pairs have gradients and moments; the other weights take 4.5 bits, or four bytes."""
    whole = model_of_size(parameters, Adapter())
    assert (whole.parameters, whole.frozen_bytes) == (parameters, 0)
    for kind, size in ((AdapterKind.lora, 4), (AdapterKind.qlora, 4.5 / 8)):
        model = model_of_size(parameters, Adapter(kind, rank=rank, alpha=16))
        assert model.parameters == pytest.approx(trained, rel=0.25)
        assert model.frozen_bytes == parameters * size
        assert 0.65 * whole.flops_per_token < model.flops_per_token < 0.7 * whole.flops_per_token


@pytest.mark.parametrize(("all_reduce", "advised"), [(0.2, None), (0.5, "sync.k=4"), (30.0, "no sync.k up to the 100")])
def test_which_k_pays(all_reduce: float, advised: str | None) -> None:
    """Communication of a sixth, a third and nearly all of a step, of which 1 s is something else."""
    parts = Estimate(Quantity(0.9, 0.5, 1.5), Quantity(0.1, 0.1, 0.1), Quantity(all_reduce, 0.0, 2 * all_reduce))
    share = parts.communication_share(1)
    assert (share.value, share.low) == (pytest.approx(all_reduce / (1 + all_reduce)), 0)
    assert share.high == pytest.approx(2 * all_reduce / (0.6 + 2 * all_reduce))
    assert parts.step(4).value == pytest.approx(1 + all_reduce / 4)
    words = answer(parts, HARDWARE, PLAN)
    assert (advised or "no larger k") in words
    assert ("sync.k=" in words) is (advised == "sync.k=4")


def test_as_a_prediction() -> None:
    parts = parts_of()
    found = prediction_of(parts, WORK, MODEL, HARDWARE, k=4)
    assert found.training.value == pytest.approx(100 * parts.step(4).value)
    assert found.training.low < found.training.value / 1.3
    assert found.training.high > found.training.value * 1.3
    assert sum(found.step_s.values()) == pytest.approx(parts.step(4).value)
    assert found.communication_share == pytest.approx(parts.communication_share(4).value)
    assert found.memory_bytes == 24e8
    frozen = dataclasses.replace(MODEL, frozen_bytes=1e9)
    assert prediction_of(parts, WORK, frozen, HARDWARE, k=1).memory_bytes == 16e8 + 1e9
    assert found.fits is True
    assert found.measured_at is None


def test_the_published_experiment() -> None:
    """bert-large on four GPUs over PCIe 3.0, 32 samples of at most 384 tokens in a step, 250 steps.

    The published runs took 209 s with k = 1, 164 with 4 and 147 with 16; the GPU is not named.
    """
    plan = dataclasses.replace(PLAN, replica_batch=8, accumulation_steps=1, optimizer_steps=250)
    work, model = mean_work(plan, tokens=384), Model(335e6, 6 * 335e6)
    sheet: dict[str, Any] = {"memory_gb": 24, "memory_gb_per_s": 936, "link_gb_per_s": 15.75}
    hardware = Hardware("GeForce RTX 3090", link="PCIe 3.0 x16", **sheet)
    for k, published in ((1, 209.0), (4, 164.0), (16, 147.0)):
        parts = estimate(work, model, hardware, 35.6e12, k == 1)
        training = prediction_of(parts, work, model, hardware, k).training
        assert training.low < published < training.high
        assert training.value == pytest.approx(published, rel=0.35)
    assert estimate(work, model, hardware, 35.6e12, True).communication_share(1).value == pytest.approx(0.32, abs=0.1)


@pytest.mark.parametrize(
    ("gpu", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "tf32", 494),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6),
        ("an unknown one", "fp32", None),
    ],
)
def test_published_peaks(gpu: str, precision: str, tera: float | None) -> None:
    assert published_peak(gpu, PrecisionName[precision]) == (None if tera is None else tera * 1e12)
