"""Drift and cosine from what travels, against the same by their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runner.sync.telemetry import Spread, SyncRecord, slots, sync_summary, tell


def spread(updates: Tensor, weights: list[float], length: float, dtype: torch.dtype) -> Spread:
    """What would have arrived: every worker's slots, summed in the wire's form."""
    told = torch.zeros(slots(len(updates)), dtype=dtype)
    for rank, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        mine = torch.empty(slots(len(updates)), dtype=updates.dtype)
        tell(mine, rank, weight, torch.linalg.vector_norm(update) / length)
        told += mine.to(dtype)
    mean = sum(w * u for w, u in zip(weights, updates, strict=True))
    return Spread(told.to(updates.dtype), torch.linalg.vector_norm(mean) / length)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.2, 0.8], [0.1, 0.2, 0.3, 0.4]])
def test_against_the_definitions(dtype: torch.dtype, weights: list[float]) -> None:
    """For two workers the cosine is that of their updates, for more the mean over pairs; in bf16 and fp16 as well."""
    torch.manual_seed(0)
    updates = torch.randn(len(weights), 50, dtype=torch.float64) + 0.5
    found = spread(updates, weights, 7.0, dtype)
    mean = sum(w * u for w, u in zip(weights, updates, strict=True))
    drift = math.sqrt(sum(w * float((u - mean).square().sum()) for w, u in zip(weights, updates, strict=True))) / 7
    pairs = [(i, j) for i in range(len(weights)) for j in range(len(weights)) if i != j]
    norms = [float(u.norm()) for u in updates]
    agreement = sum(weights[i] * weights[j] * float(updates[i] @ updates[j]) for i, j in pairs)
    cosine = agreement / sum(weights[i] * weights[j] * norms[i] * norms[j] for i, j in pairs)
    if len(weights) == 2:
        assert cosine == pytest.approx(float(updates[0] @ updates[1]) / (norms[0] * norms[1]))
    rel = 1e-6 if dtype in (torch.float64, torch.float32) else 1e-4
    assert found.drift() == pytest.approx(drift, rel=rel)
    assert found.cosine() == pytest.approx(cosine, rel=rel)


def test_where_there_is_nothing_to_tell() -> None:
    """Nobody moved, one alone moved, or something is no number: no angle rather than a wrong one."""
    still = spread(torch.zeros(2, 5, dtype=torch.float64), [0.5, 0.5], 1.0, torch.float64)
    assert (still.drift(), still.cosine()) == (0.0, None)
    alone = spread(torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64), [0.5, 0.5], 1.0, torch.float64)
    assert alone.cosine() is None
    assert alone.drift() == pytest.approx(0.5)
    broken = spread(torch.full((2, 5), math.nan, dtype=torch.float64), [0.5, 0.5], 1.0, torch.float64)
    assert (broken.drift(), broken.cosine()) == (None, None)


def test_summary() -> None:
    """Means over all synchronisations, the worst and the last of drift and cosine; nothing of none."""
    assert sync_summary([]) is None
    half = spread(torch.eye(2, dtype=torch.float64), [0.5, 0.5], 1.0, torch.float64)
    none = spread(torch.zeros(2, 2, dtype=torch.float64), [0.5, 0.5], 1.0, torch.float64)
    records = [
        SyncRecord(4, 4, 100, 0.5, 0.25, drift_of=half, cosine_of=half),
        SyncRecord(6, 2, 100, None, 0.75, drift_of=none, cosine_of=none),
    ]
    summary = sync_summary([record.told() for record in records])
    assert summary is not None
    assert summary["drift"] == pytest.approx({"mean": math.sqrt(0.5) / 2, "max": math.sqrt(0.5), "last": 0.0})
    assert summary["cosine"] == pytest.approx({"mean": 0.0, "min": 0.0, "last": 0.0})
    each = {name: summary[f"{name}_each"] for name in ("steps", "bytes", "seconds", "stall_seconds")}
    assert each == {"steps": 3, "bytes": 100, "seconds": 0.5, "stall_seconds": 0.5}
