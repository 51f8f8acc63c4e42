"""Drift and cosine from two numbers per worker, compared with their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runner.sync.telemetry import SyncRecord, UpdateSpread, sync_summary
from runner.sync.vectors import norm


def spread(updates: Tensor, weights: list[float], length: float) -> UpdateSpread:
    mean = sum(w * u for w, u in zip(weights, updates, strict=True))
    return UpdateSpread(torch.tensor(weights), updates.norm(dim=1) / length, mean.norm() / length)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weights", [[0.2, 0.8], [0.1, 0.2, 0.3, 0.4]])
def test_definitions(dtype: torch.dtype, weights: list[float]) -> None:
    """For more than two workers the cosine is a mean over pairs, weighted by the norms of both updates."""
    torch.manual_seed(0)
    updates = torch.randn(len(weights), 50, dtype=torch.float64) + 0.5
    found = spread(updates.to(dtype), weights, 7.0)
    mean = sum(w * u for w, u in zip(weights, updates, strict=True))
    drift = math.sqrt(sum(w * float((u - mean).square().sum()) for w, u in zip(weights, updates, strict=True))) / 7
    pairs = [(i, j) for i in range(len(weights)) for j in range(len(weights)) if i != j]
    norms = [float(u.norm()) for u in updates]
    agreement = sum(weights[i] * weights[j] * float(updates[i] @ updates[j]) for i, j in pairs)
    cosine = agreement / sum(weights[i] * weights[j] * norms[i] * norms[j] for i, j in pairs)
    if len(weights) == 2:
        assert cosine == pytest.approx(float(updates[0] @ updates[1]) / (norms[0] * norms[1]))
    assert found.drift() == pytest.approx(drift, rel=1e-6)
    assert found.cosine() == pytest.approx(cosine, rel=1e-6)


def test_undefined() -> None:
    """There is no angle if fewer than two workers moved, and no drift of nan."""
    still = spread(torch.zeros(2, 5), [0.5, 0.5], 1.0)
    assert (still.drift(), still.cosine()) == (0.0, None)
    one = spread(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), [0.5, 0.5], 1.0)
    assert (one.drift(), one.cosine()) == (pytest.approx(0.5), None)
    broken = spread(torch.full((2, 5), math.nan), [0.5, 0.5], 1.0)
    assert (broken.drift(), broken.cosine()) == (None, None)


def test_norm_of_a_long_vector() -> None:
    """A single fp32 sum over this many squares would be less exact."""
    vector = torch.full((5_000_000,), 0.1)
    assert float(norm(vector)) == pytest.approx(float(vector.double().norm()), rel=1e-5)


def test_summary() -> None:
    """Means over all synchronisations, and the worst and latest drift and cosine."""
    assert sync_summary([], {}) is None
    half, none = spread(torch.eye(2), [0.5, 0.5], 1.0), spread(torch.zeros(2, 2), [0.5, 0.5], 1.0)
    records = [SyncRecord(4, 4, 100, 0.5, 0.25, half, half), SyncRecord(6, 2, 100, None, 0.75, none, none)]
    summary = sync_summary([record.metrics() for record in records], {"fragments": 1})
    assert summary is not None
    assert summary["drift"] == pytest.approx({"mean": math.sqrt(0.5) / 2, "max": math.sqrt(0.5), "last": 0.0})
    assert summary["cosine"] == pytest.approx({"mean": 0.0, "min": 0.0, "last": 0.0}, abs=1e-6)
    each = {name: summary[f"{name}_each"] for name in ("steps", "bytes", "seconds", "stall_seconds")}
    assert summary["fragments"] == 1
    assert each == {"steps": 3, "bytes": 100, "seconds": 0.5, "stall_seconds": 0.5}
