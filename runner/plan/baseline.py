"""A setup as it is certified, and the baseline that it is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from runner.config.choices import AccumulationMode, PrecisionName, SyncPolicyName
from runner.config.schema import Accumulation, Config, Precision, Sharding, Sync
from runner.plan.plan import Plan, make_plan


@dataclass(frozen=True)
class RunSetup:
    """The inputs of a certificate.

    `data`: digest of every sample and label; `has_dropout`: whether training drops units at all; `versions`: of
    libraries, by name; `processor`: its name and instruction set, where they must be the same. Known only once the
    model has been built: `batch_statistics`, whether it normalises by the statistics of a micro-batch. Known only once
    it has been trained: `stopped_after`, the samples seen by a run that stopped before the end of its plan.
    """

    config: Config
    plan: Plan
    data: str
    has_dropout: bool
    device_type: str
    rehearsed: bool
    versions: Mapping[str, str]
    processor: str
    batch_statistics: bool = False
    stopped_after: int | None = None


def baseline_plan(config: Config, plan: Plan) -> Plan:
    """One synchronous worker without accumulation; the global batch is kept, or under `per_device` the micro-batch.

    If `max_steps` ends the run early, the baseline ends after as many samples.
    """
    one_worker = dataclasses.replace(
        config,
        accumulation=Accumulation(AccumulationMode.fixed, steps=1),
        sync=Sync(SyncPolicyName.periodic, k=1),
        max_steps=None,
    )
    whole = make_plan(one_worker, plan.samples_per_epoch, 1)
    if config.max_steps is None:
        return whole
    max_steps = whole.steps_for(plan.total_samples)
    return make_plan(dataclasses.replace(one_worker, max_steps=max_steps), plan.samples_per_epoch, 1)


def baseline_of(setup: RunSetup) -> RunSetup:
    """One fp32 worker with the same recipe and seed, on the same kind of device.

    Its batch is no larger than the training data: nobody would run it with a larger one.
    """
    batch, samples = setup.config.batch, setup.plan.samples_per_epoch
    sizes = {name: getattr(batch, name) for name in ("global_batch", "micro_batch")}
    within = {name: min(size, samples) for name, size in sizes.items() if size is not None}
    config = dataclasses.replace(
        setup.config,
        batch=dataclasses.replace(batch, **within),
        precision=Precision(PrecisionName.fp32),
        compile=False,
        gradient_checkpointing=False,
        sharding=Sharding(),
    )
    plan = baseline_plan(config, setup.plan)
    return dataclasses.replace(setup, config=config, plan=plan, rehearsed=False, stopped_after=None)
