"""Sync policies: when and how replicas synchronise."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.backends import Backend
from runner.config.choices import Average, SyncPolicyName
from runner.config.schema import Config, Sync
from runner.plan import Plan
from runner.plan.sync_steps import SyncSteps, sync_steps
from runner.sync.averaging import wire_dtype
from runner.sync.fully_sharded import FullySharded
from runner.sync.gradients import PeriodicGradients
from runner.sync.local_sgd import LocalSGD
from runner.sync.optimizers import Moments, OuterSGD
from runner.sync.protocol import StepFacts, SyncPolicy
from runner.sync.rounds import PlannedRounds
from runner.sync.synchronous import PostLocal, Synchronous
from runner.sync.telemetry import SyncRecord, SyncStats
from runner.sync.tree_sum import TreeSynchronous

__all__ = ["StepFacts", "SyncPolicy", "SyncRecord", "SyncStats", "build_sync_policy"]


#: With `sync.fragments=auto` a fragment is not smaller, so that bandwidth and not latency decides how long its
#: all-reduce takes.
_SMALLEST_FRAGMENT_BYTES = 2**20


def build_sync_policy(
    config: Config,
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    backend: Backend,
    bytes_per_pass: int | None = None,
) -> SyncPolicy:
    """The policy that the configuration names. A single worker is always synchronous.

    `bytes_per_pass`: of a sharded model, see `FullySharded`; None if every worker has all weights.
    """
    sync, steps = config.sync, sync_steps(plan, config.sync, config.schedule)
    buffers = running_statistics(model)
    if plan.shards is not None:
        return TreeSynchronous(model, backend, plan.shards)
    if bytes_per_pass is not None:
        return FullySharded(model, buffers, backend, bytes_per_pass)
    make_local = functools.partial(_local_policy, sync, steps, model, buffers, optimizer, backend)
    if steps.first_local == 0:
        return make_local()
    wire = wire_dtype(sync.compress)
    # torch's hooks that compress take no sparse gradients, nccl cannot send them, torch.compile cannot compute them.
    sends_rows = backend.device.type == "cpu" and wire is None and not config.compile
    compares = config.noise.every_steps is not None
    synchronous = Synchronous(model, buffers, backend, wire, sends_rows, compares)
    if steps.first_local >= plan.optimizer_steps:
        return synchronous
    return PostLocal(synchronous, make_local, steps.first_local)


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers of a new model, which have to be averaged like weights.

    Buffers with infinities are masks, not statistics: they have no mean.
    """
    return [b for b in model.buffers() if b.is_floating_point() and bool(torch.isfinite(b).all())]


def _local_policy(
    sync: Sync, steps: SyncSteps, model: nn.Module, buffers: list[Tensor], optimizer: Optimizer, backend: Backend
) -> SyncPolicy:
    if sync.policy is SyncPolicyName.gradients:
        return PeriodicGradients(model, buffers, backend, sync.compress, steps.due)
    make_outer = moments = None
    if sync.policy is SyncPolicyName.outer:
        assert sync.outer_lr is not None
        assert sync.outer_momentum is not None
        make_outer = functools.partial(
            OuterSGD,
            lr=sync.outer_lr,
            momentum=sync.outer_momentum,
            nesterov=bool(sync.outer_nesterov),
            per_lr=bool(sync.outer_per_lr),
        )
    if sync.average is Average.weights_and_moments:
        moments = Moments(optimizer, [p for p in model.parameters() if p.requires_grad])
    fragments = sync.fragments
    if not isinstance(fragments, int):
        weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        fragments = max(1, min(sync.k, weights // _SMALLEST_FRAGMENT_BYTES))
    return LocalSGD(
        model,
        buffers,
        backend,
        sync.compress,
        PlannedRounds(steps.due),
        make_outer,
        accumulate=sync.policy is SyncPolicyName.accumulated,
        delay=sync.delay_steps,
        moments=moments,
        fragments=fragments,
    )
