"""What data sheets, the files of `conf/hardware/`, say about a device: its peak, and what a run will need on it.

A step computes, steps the optimizer and communicates:

    compute     operations of its tokens ÷ (peak × efficiency)
    optimizer   bytes of weights, gradients and moments that AdamW reads and writes ÷ memory bandwidth
    all-reduce  bytes of the weights that a ring sends ÷ bandwidth of the link

No device reaches its peak, so each part has a share that is usual and a factor by which it is often missed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from runner.config.choices import AdapterKind, PrecisionName
from runner.config.schema import Adapter, Hardware
from runner.cost.prediction import Prediction
from runner.cost.quantity import Quantity
from runner.cost.step import StepCost, ring_bytes
from runner.cost.work import Work
from runner.plan import Plan

#: Of the peak that fine-tuning a transformer reaches where nothing was measured; and factors of the interval around
#: that, and around an efficiency that was measured on another device.
USUAL_EFFICIENCY = 0.4
_COMPUTE_FACTOR = 1.8
#: Of a link's published rate in all-reduces of whole models. PCIe without peer-to-peer reaches a third, NVLink most.
_LINK_EFFICIENCY, _LINK_FACTOR = 0.45, 2.0
_MEMORY_EFFICIENCY, _MEMORY_FACTOR = 0.7, 1.5
#: AdamW reads weights, gradients and both moments, and writes all but the gradients; in fp32.
_OPTIMIZER_BYTES, _STATE_BYTES, _WEIGHT_BYTES = 28.0, 16.0, 4.0
#: Operations of forward and backward pass for each weight and token (Kaplan et al. 2020). A third are for the weight's
#: own gradient, which a frozen one does not have.
_FLOPS_PER_WEIGHT, _FLOPS_PER_FROZEN_WEIGHT = 6.0, 4.0
#: Four bits, and a scale in fp32 for 64 weights.
_4_BIT_BYTES = 4.5 / 8


def published_peak(gpu: str, precision: PrecisionName) -> float | None:
    """Dense operations per second of a GPU, by torch's name for it; None if no data sheet has them."""
    from runner.config.compose import conf_dir  # imports Hydra, which a worker needs for nothing else

    found, longest = None, 0
    for path in (conf_dir() / "hardware").glob("*.yaml"):
        sheet: Any = OmegaConf.to_container(OmegaConf.load(path))
        for name in sheet.get("gpus", ()):
            if len(name) > longest and re.search(rf"\b{name}\b", gpu):
                found, longest = sheet["tflops"].get(precision.name), len(name)
    return None if found is None else 1e12 * found


@dataclass(frozen=True)
class Model:
    """`parameters`: trained. `flops_per_token`: of forward and backward pass. `efficiency`: of a device's peak.

    `frozen_bytes`: of the weights that are not trained, in 4 bits or more.
    """

    parameters: float
    flops_per_token: float
    efficiency: float = USUAL_EFFICIENCY
    frozen_bytes: float = 0.0


def model_of_size(parameters: float, adapter: Adapter) -> Model:
    """A transformer with this number of weights, trained whole or by pairs of matrices next to all linear layers.

    The size of the pairs is that of a model `w` wide with `w` / 128 layers of 12 `w`² weights, about the shape of Llama
    and of BERT: 18 `w` in each layer for a rank of 1. Embeddings are counted like linear layers.
    """
    if adapter.kind is AdapterKind.none:
        return Model(parameters, _FLOPS_PER_WEIGHT * parameters)
    assert adapter.rank is not None
    width = (parameters * 128 / 12) ** (1 / 3)
    trained = 18 * width * adapter.rank * width / 128
    return Model(
        parameters=trained,
        flops_per_token=_FLOPS_PER_FROZEN_WEIGHT * parameters + _FLOPS_PER_WEIGHT * trained,
        frozen_bytes=parameters * (_4_BIT_BYTES if adapter.in_4_bits else _WEIGHT_BYTES),
    )


@dataclass(frozen=True)
class Estimate:
    """Seconds of an optimizer step. `all_reduce`: of all weights, once; its low end is hidden by the backward pass."""

    compute: Quantity
    optimizer: Quantity
    all_reduce: Quantity

    @property
    def usual(self) -> StepCost:
        """The step without the intervals."""
        return StepCost(self.compute.value + self.optimizer.value, self.all_reduce.value)

    def step(self, k: float) -> Quantity:
        """Seconds of a step with one all-reduce in `k` steps."""
        return self.compute + self.optimizer + self.all_reduce * (1 / k)

    def communication_share(self, k: float) -> Quantity:
        """The range of a step. Low: the fastest link with the slowest computation; high: the other way round."""
        local, sent = self.compute + self.optimizer, self.all_reduce
        costs = (self.usual, StepCost(local.high, sent.low), StepCost(local.low, sent.high))
        return Quantity(*(cost.communication_share(k) for cost in costs))


def estimate(work: Work, model: Model, hardware: Hardware, peak_flops_per_s: float, overlaps: bool) -> Estimate:
    """The parts of a step. `overlaps`: an all-reduce can run during the backward pass."""
    slowest = float(work.tokens.max(axis=1).mean())
    compute_s = slowest * model.flops_per_token / (peak_flops_per_s * model.efficiency)
    optimizer_s = model.parameters * _OPTIMIZER_BYTES / (hardware.memory_gb_per_s * 1e9 * _MEMORY_EFFICIENCY)
    sent = ring_bytes(model.parameters * _WEIGHT_BYTES, work.tokens.shape[1])
    compute = Quantity.around(compute_s, _COMPUTE_FACTOR)
    all_reduce = Quantity.around(sent / (hardware.link_gb_per_s * 1e9 * _LINK_EFFICIENCY), _LINK_FACTOR)
    if overlaps:
        hidden = max(all_reduce.low - 2 / 3 * compute.low, 0.0)
        all_reduce = Quantity(all_reduce.value, hidden, all_reduce.high)
    return Estimate(compute, Quantity.around(optimizer_s, _MEMORY_FACTOR), all_reduce)


def prediction_of(parts: Estimate, work: Work, model: Model, hardware: Hardware, k: float) -> Prediction:
    """Training alone, since start-up and evaluation are not known; memory without activations."""
    training = parts.step(k) * work.steps
    return Prediction(
        training=training,
        total=training,
        step_s={
            "forward": parts.compute.value / 3,
            "backward": parts.compute.value * 2 / 3,
            "optimizer": parts.optimizer.value,
            "communication": parts.all_reduce.value / k,
            "waiting": 0.0,
        },
        start_s=0.0,
        evaluations=0,
        evaluation_s=0.0,
        ending_s=0.0,
        padding_share=work.padding_share,
        memory_bytes=model.frozen_bytes + model.parameters * (_STATE_BYTES + (2 * _WEIGHT_BYTES if k > 1 else 0.0)),
        available_bytes=hardware.memory_gb * 1e9,
        outside=1.0,
        measured_at=None,
    )


def answer(parts: Estimate, hardware: Hardware, plan: Plan) -> str:
    """What synchronous SGD costs, and which k pays, in a sentence."""
    share, cost = parts.communication_share(1), parts.usual
    costs = (
        f"on {plan.world_size} × {hardware.name} over {hardware.link} synchronous SGD spends {share.value:.0%} of a "
        f"step on communication ({share.low:.0%} to {share.high:.0%})"
    )
    k, advice = cost.advice(plan.optimizer_steps)
    most = cost.seconds(1) / cost.local_s
    if k == 1:
        return f"{costs}: no larger k trains more than {most:,.1f} times as fast."
    if k is None:
        return f"{costs}; {advice}."
    faster = cost.seconds(1) / cost.seconds(k)
    return f"{costs}; {advice} and train {faster:,.1f} times as fast, and no k more than {most:,.1f} times."
