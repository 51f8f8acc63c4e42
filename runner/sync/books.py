"""What a policy has to say about its synchronisations, and what workers of local phases agree on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from runner.backends import Backend
from runner.sync.protocol import SyncStats
from runner.sync.telemetry import Spread, SyncRecord
from runner.sync.window import Window
from runner.sync.wire import Transfer


class Books:
    """Every synchronisation of a run: its record until somebody takes it, and the totals."""

    def __init__(self) -> None:
        self._records: list[SyncRecord] = []
        self.stats = SyncStats(0, 0, 0.0, 0.0)

    def enter(self, transfer: Transfer, window: Window, drift_of: Spread, cosine_of: Spread) -> None:
        record = SyncRecord(
            step=window.last + 1,
            steps=window.steps,
            bytes=transfer.bytes,
            seconds=transfer.seconds,
            stall_seconds=transfer.stall_seconds,
            drift_of=drift_of,
            cosine_of=cosine_of,
        )
        self._records.append(record)
        self.stats += SyncStats(1, record.bytes, record.seconds, record.stall_seconds)

    def take(self) -> list[SyncRecord]:
        records, self._records = self._records, []
        return records

    def state_dict(self) -> dict[str, Any]:
        return {"stats": dataclasses.astuple(self.stats)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stats = SyncStats(*state["stats"])


def smallest(scale: float, backend: Backend) -> float:
    """The smallest of all workers' fp16 loss scales. A collective."""
    scales = torch.zeros(backend.world_size, device=backend.device)
    scales[backend.rank] = scale
    return float(backend.all_reduce(scales).min())
