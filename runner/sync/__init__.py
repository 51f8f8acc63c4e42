"""Sync policies: when and how replicas synchronise."""

from __future__ import annotations

import functools

from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import Compress, SyncPolicyName
from runner.config.schema import Config, Sync
from runner.plan import Plan
from runner.plan.sync_steps import sync_steps
from runner.sync.averaging import wire_dtype
from runner.sync.fully_sharded import FullySharded
from runner.sync.local_sgd import LocalSGD
from runner.sync.post_local import PostLocal
from runner.sync.protocol import StepFacts, SyncPolicy
from runner.sync.published import AccumulatedUpdates, PeriodicGradients
from runner.sync.replica_vector import ReplicaVector
from runner.sync.running_statistics import running_statistics
from runner.sync.streaming import StreamingSGD
from runner.sync.synchronous import FindRowEmbeddings, Synchronous
from runner.sync.telemetry import SyncRecord, SyncStats
from runner.sync.tree_sum import TreeSynchronous

__all__ = ["StepFacts", "SyncPolicy", "SyncRecord", "SyncStats", "build_sync_policy"]


def build_sync_policy(
    config: Config,
    plan: Plan,
    model: nn.Module,
    backend: Backend,
    bytes_per_pass: int | None = None,
    find_embeddings: FindRowEmbeddings | None = None,
) -> SyncPolicy:
    """Return the policy that the configuration names. A single worker is always synchronous.

    `bytes_per_pass`: sent by a sharded model, see `FullySharded`; None if every worker has all weights.
    `find_embeddings`: see `Synchronous`.
    """
    sync, steps = config.sync, sync_steps(plan, config.sync, config.schedule)
    buffers = running_statistics(model)
    if plan.shards is not None:
        return TreeSynchronous(model, backend, plan.shards)
    if bytes_per_pass is not None:
        return FullySharded(model, buffers, backend, bytes_per_pass)
    make_local = functools.partial(_local_policy, sync, steps.due, model, buffers, backend)
    if steps.first_local == 0:
        return make_local()
    wire = wire_dtype(sync.compress)
    # torch's hooks that compress take no sparse gradients, nccl cannot send them, torch.compile cannot compute them.
    sends_rows = backend.device.type == "cpu" and wire is None and not config.compile
    compares = config.noise.every_steps is not None
    synchronous = Synchronous(model, buffers, backend, wire, find_embeddings if sends_rows else None, compares)
    if steps.first_local >= plan.optimizer_steps:  # no step is local
        return synchronous
    return PostLocal(synchronous, make_local, steps.first_local)


def _local_policy(
    sync: Sync, due: frozenset[int], model: nn.Module, buffers: list[Tensor], backend: Backend
) -> SyncPolicy:
    if sync.policy is SyncPolicyName.gradients:
        return PeriodicGradients(model, buffers, backend, sync.compress, due)
    replica = ReplicaVector(model, buffers, backend)
    if sync.policy is SyncPolicyName.accumulated:
        return AccumulatedUpdates(replica, backend, sync, due)
    # An outer optimizer (sync.policy=outer) makes the step to the average in both.
    plain = sync.fragments == 1 and not sync.overlap and sync.compress is not Compress.int8
    return (LocalSGD if plain else StreamingSGD)(replica, backend, sync, due)
