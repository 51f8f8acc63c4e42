"""Sync policies: when and how replicas are brought together."""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.backends import Backend
from runner.config.choices import Average, SyncPolicyName
from runner.config.schema import Config, Sync
from runner.plan import Plan
from runner.plan.sync_steps import SyncSteps, sync_steps
from runner.sync.gradients import PeriodicGradients
from runner.sync.local_phases import LocalPhases
from runner.sync.moments import Moments
from runner.sync.outer import Assign, OuterSgd
from runner.sync.post_local import PostLocal
from runner.sync.protocol import StepFacts, SyncPolicy, SyncStats
from runner.sync.replica import MakeRule, running_statistics
from runner.sync.synchronous import Synchronous
from runner.sync.telemetry import SyncRecord
from runner.sync.updates import CollectedUpdates, MovingUpdates
from runner.sync.wire import wire_dtype

__all__ = ["StepFacts", "SyncPolicy", "SyncRecord", "SyncStats", "build_sync_policy"]


def build_sync_policy(
    config: Config, plan: Plan, model: nn.Module, optimizer: Optimizer, backend: Backend
) -> SyncPolicy:
    """The policy that a configuration names. One worker has nobody to synchronise with and is always synchronous."""
    sync, steps = config.sync, sync_steps(plan, config.sync, config.schedule)
    buffers = running_statistics(model)

    def local() -> SyncPolicy:
        return _local(sync, steps, model, buffers, optimizer, backend)

    if steps.first_local == 0:
        return local()
    synchronous = Synchronous(model, buffers, backend, wire_dtype(sync.compress))
    if steps.first_local >= plan.optimizer_steps:
        return synchronous
    return PostLocal(synchronous, local, steps.first_local)


def _local(
    sync: Sync, steps: SyncSteps, model: nn.Module, buffers: list[Tensor], optimizer: Optimizer, backend: Backend
) -> SyncPolicy:
    """The policy of local phases."""
    if sync.policy is SyncPolicyName.gradients:
        return PeriodicGradients(model, buffers, backend, sync.compress, steps.due)
    moments = None
    if sync.average is Average.weights_and_moments:
        moments = Moments(optimizer, [p for p in model.parameters() if p.requires_grad])
    updates = CollectedUpdates if sync.policy is SyncPolicyName.accumulated else MovingUpdates
    return LocalPhases(
        model, buffers, backend, sync.compress, steps.due, _rule(sync), updates, sync.delay_steps, moments
    )


def _rule(sync: Sync) -> MakeRule:
    if sync.policy is not SyncPolicyName.outer:
        return Assign
    assert sync.outer_lr is not None
    assert sync.outer_momentum is not None
    return functools.partial(
        OuterSgd,
        lr=sync.outer_lr,
        momentum=sync.outer_momentum,
        nesterov=bool(sync.outer_nesterov),
        per_lr=bool(sync.outer_per_lr),
    )
