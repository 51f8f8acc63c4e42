"""What may surprise about a plan."""

from __future__ import annotations

from runner.backends.machine import available_cores
from runner.config.choices import SyncPolicyName
from runner.config.schema import Config
from runner.plan.checks import unmeasured_noise
from runner.plan.placement import Placement
from runner.plan.plan import Plan
from runner.plan.scaling_range import scaling_warning
from runner.plan.schedule import schedule_warning


def notes_on(config: Config, plan: Plan, placement: Placement) -> list[str]:
    """What has no effect, costs more than one may think or may not work, in sentences."""
    limit = config.max_steps
    notes = []
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
    if threads is not None and placement.device_type == "cpu" and threads * placement.local_workers < cores:
        used = threads * placement.local_workers
        notes.append(
            f"equivalence.threads={threads} uses {used} of {cores} cores: more workers give the same bits sooner"
        )
    reason = unmeasured_noise(config, plan, placement.device_type)
    if config.noise.every_steps is not None and reason is not None:  # on other workers, or for lack of memory
        notes.append(f"the noise of the gradient is not measured: {reason}")
    for warning in (scaling_warning(config, plan), schedule_warning(plan, config.schedule)):
        if warning is not None:
            notes.append(warning)
    if plan.world_size == 1 and plan.k > 1 and config.sync.policy is SyncPolicyName.periodic:
        notes.append(f"sync.k={plan.k} has no effect with one worker: there is nothing to average")
    return notes
