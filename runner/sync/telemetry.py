"""How far replicas had drifted apart, from two numbers a worker that travel with its weights.

With d_i the update of worker i since the last synchronisation, m = Σ w_i d_i their mean (weights w_i with sum 1) and
r_i = |d_i| / |a| its length as a share of the common weights' a:

    Σ w_i |d_i − m|² = Σ w_i |d_i|² − |m|²                                       the spread around the mean
    Σ_{i≠j} w_i w_j d_i·d_j = |m|² − Σ w_i² |d_i|²                               agreement, before it is normalised
    Σ_{i≠j} w_i w_j |d_i||d_j| = (Σ w_i |d_i|)² − Σ w_i² |d_i|²                  and what it would be at a cosine of 1

so neither needs another worker's update, only the mean that everybody gets, and every worker's w_i and r_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor

_EACH = ("steps", "bytes", "seconds", "stall_seconds")

#: Weight and share, each as a sum of numbers short enough to survive a collective in bf16.
_NUMBERS, _PARTS = 2, 3


def slots(world_size: int) -> int:
    """How many elements of a buffer tell of drift: every worker has its own, and leaves the others' at 0."""
    return world_size * _NUMBERS * _PARTS


def relative(update: Tensor, length: Tensor) -> Tensor:
    """|update| / length."""
    return torch.linalg.vector_norm(update) / length


def tell(where: Tensor, rank: int, weight: Tensor | float, share: Tensor) -> None:
    """Write a worker's weight and share into its slots of `where`, and 0 into the others'."""
    where.zero_()
    rest = torch.stack([share * 0 + weight, share])
    own = where.view(-1, _NUMBERS, _PARTS)[rank]
    for part in range(_PARTS):
        short = rest.bfloat16().to(rest.dtype)
        own[:, part] = short
        rest = rest - short


@dataclass(frozen=True)
class Spread:
    """How replicas stood to each other, on the device until somebody asks.

    `told`: the sum over workers of what `tell` wrote; `mean`: |m| / |a|.
    """

    told: Tensor
    mean: Tensor

    def drift(self) -> float | None:
        """sqrt(Σ w_i |x_i − x̄|²) / |a|: the replicas' distance from their mean, as a share of the weights' length."""
        weights, shares = self._numbers()
        squared = sum(w * r**2 for w, r in zip(weights, shares, strict=True)) - float(self.mean) ** 2
        return math.sqrt(max(squared, 0.0)) if math.isfinite(squared) else None

    def cosine(self) -> float | None:
        """Between the updates of two workers, averaged over pairs by the product of weights and lengths."""
        weights, shares = self._numbers()
        lengths = [w * r for w, r in zip(weights, shares, strict=True)]
        own = sum(length**2 for length in lengths)
        possible = sum(lengths) ** 2 - own
        # Where one worker alone has moved, or none, there is no angle.
        if not (math.isfinite(possible) and possible > 1e-9 * own):
            return None
        return max(-1.0, min(1.0, (float(self.mean) ** 2 - own) / possible))

    def _numbers(self) -> tuple[list[float], list[float]]:
        weights, shares = self.told.double().cpu().view(-1, _NUMBERS, _PARTS).sum(-1).T.tolist()
        return weights, shares


@dataclass(frozen=True)
class SyncRecord:
    """One synchronisation, after optimizer step `step` (counted from 1), that ended a local phase of `steps` steps.

    `bytes`: what this worker put into the collective. `seconds`: from its start to its end, None where the host cannot
    tell; `stall_seconds`: those in which compute stood still. `drift_of`, `cosine_of`: what these are told of.
    """

    step: int
    steps: int
    bytes: int
    seconds: float | None
    stall_seconds: float
    drift_of: Spread
    cosine_of: Spread

    def told(self) -> dict[str, float | None]:
        """As it is logged. Waits for the device."""
        return {
            "steps": self.steps,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "stall_seconds": self.stall_seconds,
            "drift": self.drift_of.drift(),
            "cosine": self.cosine_of.cosine(),
        }


def sync_summary(told: Sequence[Mapping[str, float | None]]) -> dict[str, Any] | None:
    """What `summary.json` says of a run's local phases; None without any."""
    if not told:
        return None

    def numbers(name: str) -> list[float]:
        return [value for one in told if (value := one[name]) is not None]

    def described(name: str, worst: Callable[[list[float]], float], word: str) -> dict[str, float] | None:
        values = numbers(name)
        return {"mean": mean(values), word: worst(values), "last": values[-1]} if values else None

    return {
        "drift": described("drift", max, "max"),
        "cosine": described("cosine", min, "min"),
        **{f"{name}_each": mean(values) if (values := numbers(name)) else None for name in _EACH},
    }
