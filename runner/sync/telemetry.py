"""Statistics of synchronisations: cost, and how far replicas drifted apart.

With d_i the update of worker i since the last synchronisation, m = Σ w_i d_i the weighted mean (Σ w_i = 1), a the
common weights and r_i = |d_i| / |a|:

    Σ w_i |d_i − m|² = Σ w_i |d_i|² − |m|²                       the spread around the mean
    Σ_{i≠j} w_i w_j d_i·d_j = |m|² − Σ w_i² |d_i|²               the agreement of pairs, not yet normalised
    Σ_{i≠j} w_i w_j |d_i||d_j| = (Σ w_i |d_i|)² − Σ w_i² |d_i|²  what the agreement would be at a cosine of 1

So every worker can compute both from the mean and from w_i and r_i of all workers; it never sees another's update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from torch import Tensor

_COST = ("steps", "bytes", "seconds", "stall_seconds")


@dataclass(frozen=True)
class UpdateSpread:
    """A comparison of the workers' updates. Tensors stay on the device until a method is called.

    `weights`, `norms`: w_i and r_i, one element per worker; `mean_norm`: |m| / |a|.
    """

    weights: Tensor
    norms: Tensor
    mean_norm: Tensor

    def drift(self) -> float | None:
        """sqrt(Σ w_i |x_i − x̄|²) / |a|: the replicas' distance from their mean relative to the norm of the weights."""
        weights, norms = self.weights.cpu().double(), self.norms.cpu().double()
        squared = float((weights * norms**2).sum()) - float(self.mean_norm) ** 2
        return math.sqrt(max(squared, 0.0)) if math.isfinite(squared) else None

    def cosine(self) -> float | None:
        """The cosine between two workers' updates, averaged over pairs; a pair is weighted by w_i |d_i| w_j |d_j|."""
        weighted = self.weights.cpu().double() * self.norms.cpu().double()
        own = float((weighted**2).sum())
        possible = float(weighted.sum()) ** 2 - own
        # Undefined if fewer than two workers have moved.
        if not (math.isfinite(possible) and possible > 1e-9 * own):
            return None
        return max(-1.0, min(1.0, (float(self.mean_norm) ** 2 - own) / possible))


@dataclass(frozen=True)
class SyncRecord:
    """The synchronisation after optimizer step `step` (counted from 1), which ended a local phase of `steps` steps.

    `bytes`: sent by this worker. `seconds`: from start to end of the collective, None where the host cannot measure
    it; `stall_seconds`: the part of it that compute waited for. `weights`: the spread that gives the drift; `updates`:
    the one that gives the cosine.
    """

    step: int
    steps: int
    bytes: int
    seconds: float | None
    stall_seconds: float
    weights: UpdateSpread
    updates: UpdateSpread

    def metrics(self) -> dict[str, float | None]:
        """The numbers by name, as they are logged under `sync/`. Waits for the device."""
        cost = {name: getattr(self, name) for name in _COST}
        return {**cost, "drift": self.weights.drift(), "cosine": self.updates.cosine()}


@dataclass(frozen=True)
class SyncStats:
    """Totals over a run of the collectives for training, on one worker.

    `seconds`: with one in flight; `stall_seconds`: with compute waiting for one, `backward_stall_seconds` of them
    within backward passes. None where the host cannot measure them because they are part of a compiled program.
    """

    synchronisations: int = 0
    bytes: int = 0
    seconds: float | None = 0.0
    stall_seconds: float | None = 0.0
    backward_stall_seconds: float = 0.0

    def __add__(self, other: SyncStats) -> SyncStats:
        def add(a: float | None, b: float | None) -> float | None:
            return None if a is None or b is None else a + b

        return SyncStats(
            self.synchronisations + other.synchronisations,
            self.bytes + other.bytes,
            add(self.seconds, other.seconds),
            add(self.stall_seconds, other.stall_seconds),
            self.backward_stall_seconds + other.backward_stall_seconds,
        )


class SyncHistory:
    """All synchronisations of a run: totals, and the records that have not been logged yet."""

    def __init__(self) -> None:
        self._records: list[SyncRecord] = []
        self.stats = SyncStats()

    def add(self, record: SyncRecord) -> None:
        self._records.append(record)
        self.stats += SyncStats(1, record.bytes, record.seconds, record.stall_seconds)

    def take_records(self) -> list[SyncRecord]:
        records, self._records = self._records, []
        return records

    def state_dict(self) -> dict[str, Any]:
        return {"stats": dataclasses.asdict(self.stats)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stats = SyncStats(**state["stats"])


def sync_summary(logged: Sequence[Mapping[str, float | None]], resolved: Mapping[str, int]) -> dict[str, Any] | None:
    """The section `sync` of `summary.json` from the metrics of all synchronisations; None if there were none.

    `resolved`: see `SyncPolicy.resolved_settings`.
    """
    if not logged:
        return None
    values = {name: [value for row in logged if (value := row[name]) is not None] for name in logged[0]}

    def describe(name: str, worst: Callable[[list[float]], float]) -> dict[str, float] | None:
        own = values[name]
        return {"mean": mean(own), worst.__name__: worst(own), "last": own[-1]} if own else None

    return {
        "drift": describe("drift", max),
        "cosine": describe("cosine", min),
        **resolved,
        **{f"{name}_each": mean(values[name]) if values[name] else None for name in _COST},
    }
