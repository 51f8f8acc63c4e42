"""Sync policies: when and how replicas are brought together."""

from __future__ import annotations

from torch import nn

from runner.backends import Backend
from runner.schema import Sync
from runner.sync.periodic import PeriodicAveraging
from runner.sync.protocol import SyncPolicy, SyncStats
from runner.sync.synchronous import Synchronous

__all__ = ["PeriodicAveraging", "SyncPolicy", "SyncStats", "Synchronous", "build_sync_policy"]


def build_sync_policy(config: Sync, model: nn.Module, backend: Backend) -> SyncPolicy:
    """The policy that a configuration names. One worker has nobody to synchronise with and is always synchronous."""
    if config.k == 1 or backend.world_size == 1:
        return Synchronous(model, backend)
    return PeriodicAveraging(model, backend, config.k)
