"""What a run will need on devices that are not here, from their published figures: pure arithmetic.

A step computes, steps the optimizer and communicates:

    compute     operations of its tokens ÷ (peak × efficiency)
    optimizer   bytes of weights, gradients and moments that AdamW reads and writes ÷ memory bandwidth
    all-reduce  2 (n − 1) / n × bytes of the weights ÷ bandwidth of the link: a ring (Patarasuk & Yuan 2009)

No device reaches its peak, so each part has a share that is usual and a factor by which it is often missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from runner.plan.prediction import Prediction, Quantity
from runner.plan.work import Work

#: Of the peak that fine-tuning a transformer reaches where nothing was measured; and factors of the interval around
#: that, and around an efficiency that was measured on another device.
USUAL_EFFICIENCY = 0.4
_COMPUTE_FACTOR = 1.8
#: Of a link's published rate in all-reduces of whole models. PCIe without peer-to-peer reaches a third, NVLink most.
_LINK_EFFICIENCY, _LINK_FACTOR = 0.45, 2.0
_MEMORY_EFFICIENCY, _MEMORY_FACTOR = 0.7, 1.5
#: AdamW reads weights, gradients and both moments, and writes all but the gradients; in fp32.
_OPTIMIZER_BYTES, _STATE_BYTES, _WEIGHT_BYTES = 28.0, 16.0, 4.0
#: Operations of forward and backward pass for each weight and token (Kaplan et al. 2020).
FLOPS_PER_WEIGHT = 6.0
#: Of a step: communication that is not worth saving.
_SMALL_SHARE = 0.1


@dataclass(frozen=True)
class Model:
    """`parameters`: trained. `flops_per_token`: of forward and backward pass. `efficiency`: of a device's peak."""

    parameters: float
    flops_per_token: float
    efficiency: float = USUAL_EFFICIENCY


@dataclass(frozen=True)
class Figures:
    """Published figures of one device: operations per second, bytes, bytes per second of its memory and of its link."""

    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


def mean_work(tokens: float, micro_batches: int, workers: int, steps: int) -> Work:
    """Steps of `tokens` each on every worker, where the data are not known."""
    own = np.full((1, workers), tokens)
    return Work(
        micro_batches=np.full_like(own, micro_batches),
        tokens=own,
        squares=np.zeros_like(own),
        phase_starts=np.zeros(1, dtype=int),
        share=1 / steps,
        synchronisations=0,
        largest=np.array([tokens / micro_batches, 0.0]),
        padding_share=0.0,
    )


@dataclass(frozen=True)
class Estimate:
    """Seconds of an optimizer step. `all_reduce`: of all weights, once; its low end is hidden by the backward pass."""

    compute: Quantity
    optimizer: Quantity
    all_reduce: Quantity

    def step(self, k: float) -> Quantity:
        """Seconds of a step with one all-reduce in `k` steps."""
        parts = ((self.compute, 1.0), (self.optimizer, 1.0), (self.all_reduce, 1 / k))
        value, low, high = (
            sum(getattr(part, name) * share for part, share in parts) for name in ("value", "low", "high")
        )
        return Quantity(value, low, high)

    def communication_share(self, k: float) -> Quantity:
        """The range of a step. Low: the fastest link beside the slowest computation; high: the other way round."""
        rest = [getattr(self.compute, name) + getattr(self.optimizer, name) for name in ("value", "high", "low")]
        sent = [getattr(self.all_reduce, name) / k for name in ("value", "low", "high")]
        return Quantity(*(one / (one + other) for one, other in zip(sent, rest, strict=True)))

    @property
    def smallest_useful_k(self) -> int:
        """The smallest power of two that leaves communication a small share of a step."""
        rest = self.compute.value + self.optimizer.value
        least = self.all_reduce.value / rest * (1 - _SMALL_SHARE) / _SMALL_SHARE
        return 1 << max(0, math.ceil(math.log2(max(least, 1.0))))


def estimate(work: Work, model: Model, figures: Figures, always_synchronous: bool) -> Estimate:
    """The parts of a step. `always_synchronous`: an all-reduce can run during the backward pass."""
    slowest = float(work.tokens.max(axis=1).mean())
    compute = _around(slowest * model.flops_per_token / (figures.flops_per_s * model.efficiency), _COMPUTE_FACTOR)
    optimizer = model.parameters * _OPTIMIZER_BYTES / (figures.memory_bytes_per_s * _MEMORY_EFFICIENCY)
    workers = work.tokens.shape[1]
    sent = 2 * (workers - 1) / workers * model.parameters * _WEIGHT_BYTES
    all_reduce = _around(sent / (figures.link_bytes_per_s * _LINK_EFFICIENCY), _LINK_FACTOR)
    if always_synchronous:
        hidden = max(all_reduce.low - 2 / 3 * compute.low, 0.0)
        all_reduce = Quantity(all_reduce.value, hidden, all_reduce.high)
    return Estimate(compute, _around(optimizer, _MEMORY_FACTOR), all_reduce)


def _around(seconds: float, factor: float) -> Quantity:
    return Quantity(seconds, seconds / factor, seconds * factor)


def prediction_of(parts: Estimate, work: Work, model: Model, figures: Figures, k: float) -> Prediction:
    """Training alone, since start-up and evaluation are not known; memory without activations."""
    step = parts.step(k)
    training = Quantity(*(work.steps * seconds for seconds in (step.value, step.low, step.high)))
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
        memory_bytes=model.parameters * (_STATE_BYTES + (2 * _WEIGHT_BYTES if k > 1 else 0.0)),
        available_bytes=figures.memory_bytes,
        outside=1.0,
        measured_at=None,
    )


def answer(parts: Estimate, device: str, workers: int) -> str:
    """What synchronous SGD costs, and which k pays, in a sentence."""
    share, pays = parts.communication_share(1), parts.smallest_useful_k
    costs = (
        f"on {workers} × {device} synchronous SGD spends {share.value:.0%} of a step on communication "
        f"({share.low:.0%} to {share.high:.0%})"
    )
    if pays == 1:
        return f"{costs}: a larger k would gain little."
    faster = parts.step(1).value / parts.step(pays).value
    rest = parts.communication_share(pays).value
    gain = f"sync.k={pays} would leave {rest:.0%} and train {faster:.2g} times as fast"
    return f"{costs}; {gain}, and a larger k adds little."
