"""What settings ask of data, plan and device: refused before a run has a folder, or noted."""

from __future__ import annotations

import importlib.util

from runner.backends.machine import available_cores
from runner.config.choices import (
    Compress,
    Goal,
    OptimizerName,
    ScalingBatch,
    ScalingRule,
    ShardingKind,
    SyncPolicyName,
    SyncSchedule,
)
from runner.config.schema import Config
from runner.data.recipe import DataFacts, Recipe
from runner.errors import UserError, did_you_mean, not_installed, require
from runner.plan.placement import Placement, emulated_bf16
from runner.plan.plan import Plan
from runner.plan.scaling_range import scaling_warning
from runner.plan.schedule import schedule_warning
from runner.plan.sync_steps import sync_steps


def check_plan(config: Config, plan: Plan, device_type: str) -> None:
    """Check what depends on the number of workers, the steps and the device. Raises UserError."""
    _check_sharding(config)
    check_adapter(config, device_type)
    _check_sync(config, plan, device_type)
    _check_scaling(config, plan)
    check_profile(config, plan)


def check_metric(config: Config, recipe: Recipe, facts: DataFacts) -> None:
    """Refuse to select by a metric that the recipe does not compute. Raises UserError."""
    metric, names = config.evaluation.metric, recipe.metrics_of(facts)
    if metric not in names:
        raise UserError(
            f"evaluation.metric={metric} is not computed by recipe={config.recipe['name']} for these data"
            f"{did_you_mean(metric, names)}"
        )
    goal = Goal.min if metric in recipe.minimised else Goal.max
    rule = f"use evaluation.goal={goal.name} for evaluation.metric={metric}"
    require(config.evaluation.goal is goal, "evaluation.goal", config.evaluation.goal, rule)


def _check_sharding(config: Config) -> None:
    """Refuse what cannot train sharded weights. Raises UserError."""
    kind = config.sharding.kind
    if kind is ShardingKind.none:
        return
    rule = f"no worker has all weights to train on alone with sharding={kind.name}: use sync.k=1"
    require(config.sync.always_synchronous, "sync.k", config.sync.k, rule)
    rule = f"it needs whole matrices, which sharding={kind.name} takes apart: use optimizer=adamw"
    name = config.optimizer.name
    require(name not in (OptimizerName.adafactor, OptimizerName.muon), "optimizer", name, rule)


def check_adapter(config: Config, device_type: str) -> None:
    """Refuse weights in 4 bits where bitsandbytes does not compute them. Raises UserError."""
    if not config.adapter.in_4_bits:
        return
    rule = "bitsandbytes does not know torch_xla: use adapter=lora, or CPUs or GPUs"
    require(device_type != "xla", "adapter", config.adapter.kind, rule)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise not_installed("adapter=qlora", "qlora")


def _check_sync(config: Config, plan: Plan, device_type: str) -> None:
    """Check the policy against the length of the run, the interval of evaluations and the device. Raises UserError."""
    if plan.world_size == 1:
        return
    steps = plan.optimizer_steps
    rule = f"this run has {steps} optimizer steps and would never synchronise: use sync.k={steps} or less"
    require(plan.k <= steps, "sync.k", plan.k, rule)
    first_local = sync_steps(plan, config.sync, config.schedule).first_local
    local = steps - first_local
    if first_local and local:
        rule = (
            f"sync.schedule=post_local leaves {local} local steps: use sync.k={local} or less, "
            "or a smaller sync.synchronous_share"
        )
        require(plan.k <= local, "sync.k", plan.k, rule)
    if config.sync.compress is Compress.int8:
        rule = "it needs the collectives of torch.distributed, which torch_xla does not have: use bf16"
        require(device_type != "xla", "sync.compress", config.sync.compress, rule)
        on_cpu = device_type == "cpu"
        rule = "int8 is exchanged by a thread, which was only made for CPUs: use bf16, or sync.overlap=false"
        require(on_cpu or not config.sync.overlap, "sync.compress", config.sync.compress, rule)
    every = config.evaluation.every_steps
    if every is not None and config.sync.schedule is SyncSchedule.constant:
        below = every // plan.k * plan.k
        near = " or ".join(str(size) for size in (below, below + plan.k) if size)
        rule = (
            f"replicas are equal only right after a synchronisation: use a multiple of sync.k={plan.k}, such as {near}"
        )
        require(every % plan.k == 0, "evaluation.every_steps", every, rule)


def _check_scaling(config: Config, plan: Plan) -> None:
    """Refuse rules for the moving averages of the global batch where workers step alone. Raises UserError."""
    rule, local_steps = config.scaling.rule, config.sync.has_local_steps(plan.world_size)
    of_averages = rule in (ScalingRule.sde, ScalingRule.half_life, ScalingRule.half_life_sqrt)
    ok = not (of_averages and local_steps and config.scaling.batch is ScalingBatch.global_batch)
    alone = "between synchronisations workers make steps of their own batch: use scaling.batch=replica_batch"
    require(ok, "scaling", rule, f"{alone}, or scaling=auto")


def check_profile(config: Config, plan: Plan, done: int = 0) -> None:
    """Refuse to profile steps that do not come. `done`: steps before the command. Raises UserError."""
    steps, skip, ahead = config.profile.steps, config.profile.skip, plan.optimizer_steps - done
    rule = f"after profile.skip={skip} the run has {max(ahead - skip, 0)} optimizer steps: use fewer of both"
    require(steps is None or skip + steps <= ahead, "profile.steps", steps, rule)


def unmeasured_noise(config: Config, plan: Plan, device_type: str) -> str | None:
    """Why the noise of gradients cannot be measured, and what to do; None if it can."""
    sync = config.sync
    local = sync.has_local_steps(plan.world_size)
    alone = plan.world_size * plan.accumulation_steps > 1
    rules = (
        (alone, "it compares two gradients, and one worker has only one: use accumulation.steps=2, or more workers"),
        (
            local or plan.accumulation_steps == 1 or not config.batch.length_sorted,
            "micro-batches of sorted lengths are not samples of the batch: add batch.length_sorted=false",
        ),
        (config.sharding.kind is ShardingKind.none, "no worker has a whole gradient with sharding: use sharding=none"),
        (plan.shards is None, "equivalence=identical adds gradients in its own way: use equivalence=exact"),
        (device_type != "xla", "it was not made for torch_xla: use CPUs or GPUs"),
        (
            sync.policy is not SyncPolicyName.gradients or not local,
            "sync=gradients never makes replicas equal: use another policy",
        ),
    )
    return next((rule for ok, rule in rules if not ok), None)


def notes_on(config: Config, plan: Plan, placement: Placement) -> list[str]:
    """What has no effect, costs more than one may think or may not work, in sentences."""
    notes, limit = [], config.max_steps
    if plan.cut_short:
        setting = "batch.micro_batch" if config.batch.global_batch is None else "batch.global_batch"
        notes.append(
            f"a global batch of {plan.global_batch:,} is more than the {plan.samples_per_epoch:,} training "
            f"samples: each step trains on all of them; use a smaller {setting}"
        )
    if limit is not None and limit > plan.whole_steps:
        epochs = f"{plan.epochs} epoch{'s' * (plan.epochs > 1)}"
        notes.append(
            f"max_steps={limit} has no effect, since {epochs} end after {plan.optimizer_steps:,} steps: for more, "
            "raise epochs"
        )
    if config.profile.steps is not None:
        first = config.profile.skip + 1
        steps = f"steps {first:,} to {first + config.profile.steps - 1:,} are profiled, and slower for it"
        notes.append(f"{steps}: profile/worker-0.json.gz opens in ui.perfetto.dev")
    asked = config.accumulation.steps
    if plan.shards is not None and asked is not None and 1 < asked < plan.accumulation_steps:
        shards = f"under equivalence=identical a worker computes its {plan.accumulation_steps} shards one by one"
        notes.append(f"accumulation.steps={asked} has no effect: {shards}")
    threads, cores = config.equivalence.threads, available_cores()
    used = (threads or cores) * placement.local_workers
    if placement.device_type == "cpu" and used < cores:
        notes.append(
            f"equivalence.threads={threads} uses {used} of {cores} cores: more workers give the same bits sooner"
        )
    reason = unmeasured_noise(config, plan, placement.device_type)
    if config.noise.every_steps is not None and reason is not None:  # on other workers, or for lack of memory
        notes.append(f"the noise of the gradient is not measured: {reason}")
    warnings = (
        emulated_bf16(config, placement),
        scaling_warning(config, plan),
        schedule_warning(plan, config.schedule),
    )
    notes += [warning for warning in warnings if warning is not None]
    if plan.world_size == 1 and plan.k > 1 and config.sync.policy is SyncPolicyName.periodic:
        notes.append(f"sync.k={plan.k} has no effect with one worker: there is nothing to average")
    return notes
