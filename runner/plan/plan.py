"""The plan: all derived numbers of a run in one frozen object."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.config.choices import AccumulationMode, BatchMode, BatchOrder, ScalingRule
from runner.errors import UserError, require
from runner.folder.files import digest_of
from runner.plan.batch import BatchSizes, batch_sizes, sharded_sizes, uneven_sizes
from runner.plan.scaling import lr_factor, rule_for, scaled, scaling_samples
from runner.plan.steps import epoch_length, samples_before, total_steps

if TYPE_CHECKING:  # imports OmegaConf
    from runner.config.schema import Config, Optimizer

#: Settings besides the learning rate that a scaling rule can change.
_FOLLOW_THE_BATCH = ("betas", "eps", "weight_decay")


@dataclass(frozen=True)
class Plan:
    """Batch sizes in samples; `k` and step counts in optimizer steps.

    `order`: of an epoch's samples. `shards`: of each global batch under `equivalence=identical`, each of them a
    micro-batch; else None. `betas`, `eps`, `weight_decay`: of the optimizer, where they follow the batch; None: as they
    are in the settings. `auto_rule`: the scaling rule that `scaling=auto` stands for; None with another choice, or at
    the reference batch.
    """

    world_size: int
    micro_batch: int
    accumulation_steps: int
    replica_batch: int
    global_batch: int
    k: int
    sync_window: int
    reference_batch: int
    base_lr: float
    lr_factor: float
    lr: float
    samples_per_epoch: int
    epochs: int
    total_samples: int
    optimizer_steps: int
    warmup_steps: int
    drop_last: bool
    order: str = BatchOrder.permutation.name
    shards: int | None = None
    betas: list[float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    auto_rule: str | None = None

    @property
    def scaled_settings(self) -> dict[str, Any]:
        """The optimizer's settings that follow the batch, besides the learning rate."""
        return {name: value for name in _FOLLOW_THE_BATCH if (value := getattr(self, name)) is not None}

    def scaled(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer's settings for this batch size."""
        return dataclasses.replace(optimizer, lr=self.lr, **self.scaled_settings)

    @property
    def digest(self) -> str:
        """A hash of all numbers."""
        return digest_of_numbers(dataclasses.asdict(self))

    @property
    def steps_per_epoch(self) -> int:
        return epoch_length(self.samples_per_epoch, self.global_batch, self.drop_last)

    @property
    def whole_steps(self) -> int:
        """Optimizer steps of all epochs, whatever `max_steps` is."""
        return self.epochs * self.steps_per_epoch

    @property
    def cut_short(self) -> bool:
        """Whether an epoch has fewer samples than the global batch."""
        return self.global_batch > self.samples_per_epoch

    def samples_before(self, step: int) -> int:
        """Samples seen by all workers after `step` optimizer steps."""
        return samples_before(step, self.samples_per_epoch, self.global_batch, self.drop_last)

    def steps_for(self, samples: float) -> int:
        """The fewest optimizer steps that see at least `samples` samples."""
        return bisect.bisect_left(range(self.optimizer_steps), samples, key=self.samples_before)

    def on_workers(self, world_size: int, accumulation_steps: int, k: int) -> Plan:
        """The same global batches, learning rate and steps on other workers, whose shares may differ by one sample."""
        if self.shards is not None:
            sizes = sharded_sizes(world_size, self.global_batch, self.shards)
        else:
            sizes = uneven_sizes(world_size, self.global_batch, accumulation_steps)
        return dataclasses.replace(self, **dataclasses.asdict(sizes), k=k, sync_window=self.global_batch * k)

    def as_json(self) -> dict[str, Any]:
        """The content of `plan.json`."""
        return {**dataclasses.asdict(self), "digest": self.digest}

    @property
    def of_experiment(self) -> dict[str, Any]:
        """The numbers that are the same on any workers, whatever `sync` is."""
        of_workers = {field.name for field in dataclasses.fields(BatchSizes)} - {"global_batch"} | {"k", "sync_window"}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in of_workers}


def digest_of_numbers(numbers: Mapping[str, Any]) -> str:
    """The digest of a plan's numbers; a file of an earlier version lacks those that are None, and the order."""
    known = {name: value for name, value in numbers.items() if value not in (None, BatchOrder.permutation.name)}
    return digest_of(known)[:16]


def make_plan(config: Config, samples_per_epoch: int, world_size: int) -> Plan:
    """The plan of these settings for a number of training samples and of workers. Raises UserError for invalid sizes.

    With `accumulation=fit` memory decides later: the most that could fit are one micro-batch.
    """
    batch, limits, scaling, optimizer = config.batch, config.accumulation, config.scaling, config.optimizer
    accumulation_steps = 1 if limits.mode is AccumulationMode.fit else limits.steps
    shards = config.equivalence.shards
    if shards is None:
        sizes = batch_sizes(
            world_size=world_size,
            global_batch=batch.global_batch,
            micro_batch=batch.micro_batch,
            accumulation_steps=accumulation_steps,
            max_micro_batch=limits.max_micro_batch,
        )
    else:
        assert batch.global_batch is not None
        sizes = sharded_sizes(world_size, batch.global_batch, shards)
        _check_limits(sizes, accumulation_steps, limits.max_micro_batch)
    global_batch, drop_last = sizes.global_batch, batch.drop_last
    parts = world_size * sizes.accumulation_steps
    if shards is None and parts > samples_per_epoch:
        raise UserError(
            f"{world_size} worker(s) × accumulation.steps={sizes.accumulation_steps} give {parts} micro-batches, more "
            f"than the {samples_per_epoch} training samples: use fewer workers or steps"
        )
    if drop_last and global_batch > samples_per_epoch:
        raise UserError(
            f"batch.drop_last=true drops all {samples_per_epoch} training samples, fewer than a global batch of "
            f"{global_batch}: use batch.drop_last=false or a smaller batch"
        )
    steps = total_steps(samples_per_epoch, global_batch, drop_last, config.epochs, config.max_steps)

    def seen(step: int) -> int:
        return samples_before(step, samples_per_epoch, global_batch, drop_last)

    observed = scaling_samples(scaling.batch.name, global_batch, samples_per_epoch, world_size)
    ratio = observed / scaling.reference_batch
    rule = rule_for(scaling, optimizer, config.sync.has_local_steps(world_size), ratio)
    fitting = scaled(optimizer, scaling, rule, observed)
    pairs = {name: (getattr(fitting, name), getattr(optimizer, name)) for name in _FOLLOW_THE_BATCH}
    return Plan(
        **dataclasses.asdict(sizes),
        k=config.sync.k,
        sync_window=global_batch * config.sync.k,
        reference_batch=scaling.reference_batch,
        base_lr=optimizer.lr,
        lr_factor=lr_factor(rule, ratio),
        lr=fitting.lr,
        samples_per_epoch=samples_per_epoch,
        epochs=config.epochs,
        total_samples=seen(steps),
        optimizer_steps=steps,
        warmup_steps=bisect.bisect_left(range(steps), config.schedule.warmup_share * seen(steps), key=seen),
        drop_last=drop_last,
        order=batch.order.name,
        shards=shards,
        auto_rule=rule.name if scaling.rule is ScalingRule.auto and ratio != 1 else None,
        **{name: new for name, (new, old) in pairs.items() if new != old},
    )


def continued_plan(old: Plan, config: Config, workers: int, new_accumulation: bool) -> Plan:
    """The `old` plan of a run that continues on `workers`. Raises UserError if there are too many of them.

    `new_accumulation`: whether that setting was changed; if not, what limited the micro-batch still does.
    """
    rule = f"use at most {old.global_batch}, the samples of the run's global batch"
    require(workers <= old.global_batch, "device.workers", workers, rule)
    rule = f"use at most {old.shards}, the run's equivalence.shards"
    require(old.shards is None or workers <= old.shards, "device.workers", workers, rule)
    rule = "with equivalence=identical micro-batches are the shards, which the run has; leave it out"
    require(old.shards is None or not new_accumulation, "accumulation", config.accumulation.mode, rule)
    replica_batch, accumulation = -(-old.global_batch // workers), config.accumulation
    limit = accumulation.max_micro_batch
    if config.batch.mode is BatchMode.per_device and not new_accumulation:
        limit = config.batch.micro_batch
    if accumulation.mode is AccumulationMode.fit:
        limit = replica_batch if new_accumulation else old.micro_batch
    if workers == old.world_size and not new_accumulation:
        steps = old.accumulation_steps
    elif limit is not None:
        steps = -(-replica_batch // limit)
    else:
        assert accumulation.steps is not None
        steps = min(accumulation.steps, replica_batch)
    return old.on_workers(workers, steps, config.sync.k)


def _check_limits(sizes: BatchSizes, accumulation_steps: int | None, max_micro_batch: int | None) -> None:
    """A worker's micro-batches are its shards; what is configured of micro-batches are limits. Raises UserError."""
    steps, fewest = sizes.accumulation_steps, (accumulation_steps or 1) * sizes.world_size
    more = f"equivalence.shards={fewest} or more" if fewest <= sizes.global_batch else "a larger batch.global_batch"
    rule = f"a worker has at most {steps} of the shards, its micro-batches: use {more}"
    require((accumulation_steps or 1) <= steps, "accumulation.steps", accumulation_steps, rule)
    if max_micro_batch is not None:
        fewest = -(-sizes.global_batch // max_micro_batch)
        rule = f"a shard has up to {sizes.micro_batch} samples: use equivalence.shards={fewest} or more"
        require(sizes.micro_batch <= max_micro_batch, "accumulation.max_micro_batch", max_micro_batch, rule)
