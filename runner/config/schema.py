"""The typed configuration: what can be set, in which unit, and which values are allowed.

The YAML files under `conf/` hold values only; these dataclasses hold types and rules. Hydra merges the YAML and the
command line onto them, which checks the types; `__post_init__` checks ranges and rules across settings, and the plan
checks what depends on data or machine. The names that a setting can have are in `choices.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from runner.config.choices import (
    SCALED_BY_SDE,
    AccumulationMode,
    AdapterKind,
    BatchMode,
    BatchOrder,
    Compress,
    DeviceKind,
    EquivalenceMode,
    Goal,
    LedgerMode,
    OptimizerName,
    PrecisionName,
    Rehearse,
    ScalingBatch,
    ScalingRule,
    ScalingWeightDecay,
    ScheduleName,
    ShardingKind,
    SyncPolicyName,
    SyncSchedule,
)
from runner.errors import require, shown

_ADAM = ("betas", "eps")

#: The settings that an optimizer of torch takes besides `lr` and `weight_decay`. The others keep torch's defaults.
OPTIMIZER_SETTINGS: dict[OptimizerName, tuple[str, ...]] = {
    OptimizerName.adamw: _ADAM,
    OptimizerName.sgd: ("momentum", "nesterov"),
    OptimizerName.adam: _ADAM,
    OptimizerName.adafactor: (),
    OptimizerName.adagrad: ("eps",),
    OptimizerName.adamax: _ADAM,
    OptimizerName.nadam: _ADAM,
    OptimizerName.radam: _ADAM,
    OptimizerName.rmsprop: ("eps", "momentum"),
    OptimizerName.muon: (*_ADAM, "momentum", "nesterov"),
}
_OUTER = ("outer_lr", "outer_momentum", "outer_nesterov", "outer_per_lr")

#: Settings that only some choices have.
_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "accumulation.mode=fixed": ("steps",),
    "accumulation.mode=auto": ("max_micro_batch",),
    "accumulation.mode=fit": ("memory_share",),
    **{f"adapter.kind={name}": ("rank", "alpha", "dropout", "target_modules", "merge") for name in ("lora", "qlora")},
    "batch.mode=fixed_global": ("global_batch",),
    "batch.mode=per_device": ("micro_batch",),
    "equivalence.mode=identical": ("shards", "threads"),
    **{f"schedule.name={name}": ("min_lr_share",) for name in ("linear", "cosine")},
    "schedule.name=polynomial": ("min_lr_share", "power"),
    "schedule.name=wsd": ("min_lr_share", "decay_share"),
    "sharding.kind=fsdp": ("param_dtype",),
    "sharding.kind=fsdp_offload": ("param_dtype",),
    "sync.overlap=true": ("delay",),
    "sync.policy=outer": _OUTER,
    "sync.schedule=post_local": ("synchronous_share",),
    "sync.schedule=qsr": ("qsr_alpha",),
    **{f"optimizer.name={name.name}": settings for name, settings in OPTIMIZER_SETTINGS.items()},
}


def _check_choices(group: Any) -> None:
    """Refuse settings of a group that the choices made in it do not have. Raises UserError."""
    prefix, fields = type(group).__name__.lower(), dataclasses.fields(group)
    made = {f"{prefix}.{one.name}={shown(getattr(group, one.name))}" for one in fields}
    for one in fields:
        having = [choice for choice, names in _ONLY_WITH.items() if choice.startswith(prefix) and one.name in names]
        value = getattr(group, one.name)
        # A group's choice is typed without the setting that it is: optimizer=sgd.
        typed = re.sub(r"\.(mode|kind|name)=", "=", " or ".join(having))
        ok = not having or value == one.default or not made.isdisjoint(having)
        require(ok, f"{prefix}.{one.name}", value, f"only {typed} has this setting")


def _require_count(setting: str, value: int | None, unit: str, null: str | None = None) -> None:
    """Require at least 1 `unit`. `null`: what null stands for, if the setting may be null. Raises UserError."""
    ok = null is not None if value is None else value >= 1
    require(ok, setting, value, f"use at least 1 {unit}{_or_null(null)}")


def _require_positive(setting: str, value: float | None, null: str | None = None) -> None:
    """Require a finite number above 0. `null`: as above. Raises UserError."""
    ok = null is not None if value is None else 0 < value < math.inf
    require(ok, setting, value, f"must be finite and above 0{_or_null(null)}")


def _require_share(setting: str, value: float | None) -> None:
    """Require a number of at least 0 and below 1. Raises UserError."""
    require(value is not None and 0 <= value < 1, setting, value, "must be at least 0 and below 1")


def _or_null(null: str | None) -> str:
    return "" if null is None else f", or null for {null}"


@dataclass(frozen=True)
class Device:
    """Where the workers run. `workers`: model replicas over all nodes; null takes every local device of the kind.

    `file`: the Accelerate config file that kind and workers were read from, if any. `length_buckets`: row lengths in
    tokens to which batches are padded; null pads to the longest row of a batch or, on a device that compiles for every
    shape, to a few fractions of the longest row of the data.
    """

    kind: DeviceKind = MISSING
    workers: int | None = None
    rehearse: Rehearse = Rehearse.auto
    file: str | None = None
    length_buckets: list[int] | None = None

    def __post_init__(self) -> None:
        _require_count("device.workers", self.workers, "worker", "every local device")
        buckets = self.length_buckets
        ok = buckets is None or (len(buckets) > 0 and min(buckets) >= 1)
        require(ok, "device.length_buckets", buckets, "use lengths of at least 1 token, such as [32,64,128], or null")


@dataclass(frozen=True)
class Batch:
    """Batch sizes in samples. `fixed_global` gives `global_batch`, `per_device` gives `micro_batch`.

    `order`: of an epoch's samples, from which global batches are cut: a table in memory, or computed as it is needed.
    """

    mode: BatchMode = MISSING
    global_batch: int | None = None
    micro_batch: int | None = None
    order: BatchOrder = BatchOrder.permutation
    length_sorted: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.mode is BatchMode.fixed_global:
            _require_count("batch.global_batch", self.global_batch, "sample")
        else:
            _require_count("batch.micro_batch", self.micro_batch, "sample")


@dataclass(frozen=True)
class Accumulation:
    """Micro-batches per optimizer step of one worker: given (`fixed`), or the fewest that fit (`auto`, `fit`).

    `max_micro_batch`: samples, the limit of `auto`. `memory_share`: the limit of `fit`, as a share of the memory that
    there is for a worker.
    """

    mode: AccumulationMode = MISSING
    steps: int | None = None
    max_micro_batch: int | None = None
    memory_share: float | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.mode is AccumulationMode.fit:
            share = self.memory_share
            ok = share is not None and 0 < share <= 1
            require(ok, "accumulation.memory_share", share, "use a share above 0 and at most 1, such as 0.8")
        elif self.mode is AccumulationMode.fixed:
            _require_count("accumulation.steps", self.steps, "micro-batch")
        else:
            _require_count("accumulation.max_micro_batch", self.max_micro_batch, "sample")


@dataclass(frozen=True)
class Precision:
    """Arithmetic of forward and backward; weights and optimizer stay in fp32 (fp64 under fp64)."""

    name: PrecisionName = MISSING


@dataclass(frozen=True)
class Adapter:
    """The weights that are trained: all (`none`), or pairs of small matrices beside frozen ones and the head (`lora`).

    With `qlora` the frozen linear layers are kept in 4 bits.

    `rank`: of a pair's product, which is scaled by `alpha` / `rank` and added to a layer's weights. `dropout`: of the
    pair's input. `target_modules`: ends of the names of the linear layers that get a pair; null: all but the head.
    `merge`: save the whole model, with the products added to its weights, instead of the adapter alone.
    """

    kind: AdapterKind = AdapterKind.none
    rank: int | None = None
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: list[str] | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.kind is AdapterKind.none:
            return
        _require_count("adapter.rank", self.rank, "dimension")
        _require_positive("adapter.alpha", self.alpha)
        _require_share("adapter.dropout", self.dropout)
        names = self.target_modules
        ok = names is None or (len(names) > 0 and all(name.strip() for name in names))
        require(ok, "adapter.target_modules", names, "list names such as [query,value], or null for all linear layers")

    @property
    def in_4_bits(self) -> bool:
        return self.kind is AdapterKind.qlora


@dataclass(frozen=True)
class Sharding:
    """Where the weights are: all of them on every worker (`none`), or a part of each on every worker (`fsdp`).

    `fsdp_offload` keeps the parts, and the optimizer, in the host's memory. `param_dtype`: in which weights are
    gathered for a forward or backward pass; null: the weights' own.
    """

    kind: ShardingKind = ShardingKind.none
    param_dtype: PrecisionName | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        dtype, ok = self.param_dtype, self.param_dtype in (None, PrecisionName.bf16)
        require(ok, "sharding.param_dtype", dtype, "use bf16, or null for the weights' own")


#: Settings of `sync` that earlier versions had. Digests still contain them, so that runs, checkpoints and sweeps of
#: those versions are recognised.
REMOVED_SYNC_SETTINGS: Mapping[str, str | None] = {
    "average": "weights",
    "drift_target": None,
    "rounds": None,
    "rank": None,
}

#: The value of a setting that takes a number, or what fits.
AUTO = "auto"


@dataclass(frozen=True)
class Sync:
    """When and how workers synchronise. `k`: optimizer steps between two synchronisations, at least.

    `schedule`: how the number of local steps changes over the run; `synchronous_share`: share of the samples that
    `post_local` trains on synchronously first; `qsr_alpha`: the coefficient of `qsr`, a learning rate times the root of
    a step count. `fragments`: parts of the weights that are synchronised one after the other in each round of local
    steps; `auto`: as many as `k`, if each has a mebibyte at least. `compress`: number format of the exchange.
    `overlap`: apply an average `delay` optimizer steps after the all-reduce has started. `outer_*`: the outer SGD;
    `outer_per_lr` divides the pseudo-gradient by the learning rate.
    """

    policy: SyncPolicyName = MISSING
    k: int = MISSING
    schedule: SyncSchedule = SyncSchedule.constant
    synchronous_share: float | None = None
    qsr_alpha: float | None = None
    fragments: int | str = 1
    compress: Compress = Compress.none
    overlap: bool = False
    delay: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer_nesterov: bool | None = None
    outer_per_lr: bool | None = None

    @property
    def always_synchronous(self) -> bool:
        """True if gradients are averaged in every step of the run."""
        # Other schedules also have phases longer than k, and take a phase of one step as they take the others: a local
        # step, then an average of weights.
        every_step = self.k == 1 and self.schedule in (SyncSchedule.constant, SyncSchedule.post_local)
        return every_step and self.policy in (SyncPolicyName.periodic, SyncPolicyName.gradients)

    def has_local_steps(self, workers: int) -> bool:
        """True if workers step alone between synchronisations."""
        return workers > 1 and not self.always_synchronous

    @property
    def synchronous_share_or_default(self) -> float:
        """Share of the samples before the first local step of `post_local`."""
        return 0.5 if self.synchronous_share is None else self.synchronous_share

    @property
    def delay_steps(self) -> int:
        """Optimizer steps between the start of an all-reduce and the use of its result; 0 without overlap."""
        if not self.overlap:
            return 0
        fragments = self.fragments if isinstance(self.fragments, int) else self.k
        return self.delay if self.delay is not None else -(-self.k // (2 * fragments))

    def __post_init__(self) -> None:
        _require_count("sync.k", self.k, "optimizer step (1 = fully synchronous)")
        _check_choices(self)
        _require_positive("sync.qsr_alpha", self.qsr_alpha, "the peak learning rate × √k")
        for ok, name, rule in self._rules():
            require(ok, f"sync.{name}", getattr(self, name), rule)
        if self.policy is SyncPolicyName.outer:
            self._check_outer()

    def _rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield for each rule whether it holds, the setting that is invalid if it does not, and the reason."""
        k, local, gradients = self.k, not self.always_synchronous, self.policy is SyncPolicyName.gradients
        constant, share, fragments = self.schedule is SyncSchedule.constant, self.synchronous_share, self.fragments
        yield local or constant, "schedule", "sync.k=1 has no local steps to schedule: set sync.k above 1"
        rule = "use a share of the samples above 0 and below 1, or null for 0.5"
        yield share is None or 0 < share < 1, "synchronous_share", rule
        known = fragments == AUTO if isinstance(fragments, str) else 1 <= fragments <= k
        rule = f"use a number from 1 to sync.k={k}, or auto: each step of a round synchronises one fragment at most"
        yield known, "fragments", rule
        rule = "sync.policy=gradients averages no weights: use sync.fragments=1"
        yield fragments == 1 or not gradients, "fragments", rule
        if self.overlap:
            rule = "sync.policy=gradients uses gradients in the step that made them: set sync.overlap=false"
            yield not gradients, "overlap", rule
            rule = "with sync.k=1 no local step can run during the all-reduce: set sync.k above 1, or"
            yield k > 1, "overlap", f"{rule} sync.overlap=false"
            rule = (
                f"an all-reduce must end before the next one of the same weights starts: use 1 to sync.k={k} steps, or"
            )
            yield self.delay is None or 1 <= self.delay <= k, "delay", f"{rule} null (half of k ÷ sync.fragments)"
        if self.compress is Compress.int8:
            rule = "int8 is for averages of weights, and this averages gradients: use bf16"
            yield local and not gradients, "compress", rule
            rule = "the synchronous part averages gradients, which int8 is not for: use bf16"
            yield self.schedule is not SyncSchedule.post_local, "compress", rule

    def _check_outer(self) -> None:
        for name in _OUTER:
            value = getattr(self, name)
            require(value is not None, f"sync.{name}", value, "sync.policy=outer needs a value: choose sync=outer")
        _require_positive("sync.outer_lr", self.outer_lr)
        _require_share("sync.outer_momentum", self.outer_momentum)
        ok = not (self.outer_nesterov and self.outer_momentum == 0)
        require(ok, "sync.outer_nesterov", True, "needs sync.outer_momentum above 0")


@dataclass(frozen=True)
class Scaling:
    """The rule by which the optimizer's settings follow the batch (plan/scaling.py). `auto`: the one that fits it.

    `reference_batch`: samples the settings were tuned for. `weight_decay`: as given (`fixed`), or changed so that
    learning rate × weight decay ÷ batch stays the same (`per_sample`).
    """

    rule: ScalingRule = MISSING
    batch: ScalingBatch = ScalingBatch.global_batch
    reference_batch: int = MISSING
    weight_decay: ScalingWeightDecay = ScalingWeightDecay.fixed

    def __post_init__(self) -> None:
        _require_count("scaling.reference_batch", self.reference_batch, "sample")


#: The optimizers whose weight decay is not part of the gradient.
_DECOUPLED = (OptimizerName.adamw, OptimizerName.adafactor, OptimizerName.muon)


@dataclass(frozen=True)
class Optimizer:
    """The local optimizer. `lr`: base learning rate, before scaling. `clip_norm`: global L2 norm, null for none."""

    name: OptimizerName = MISSING
    lr: float = MISSING
    weight_decay: float = 0.0
    clip_norm: float | None = None
    betas: list[float] | None = None
    eps: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        _require_positive("optimizer.lr", self.lr)
        decay, norm = self.weight_decay, self.clip_norm
        require(0 <= decay < math.inf, "optimizer.weight_decay", decay, "must be finite and at least 0")
        require(norm is None or norm > 0, "optimizer.clip_norm", norm, "must be above 0, or null for no clipping")
        for name, value in self.settings.items():
            require(value is not None, f"optimizer.{name}", value, f"optimizer={self.name.name} needs a value")
        if self.betas is not None:
            ok = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
            require(ok, "optimizer.betas", self.betas, "use two numbers of at least 0 and below 1")
        require(self.eps is None or self.eps > 0, "optimizer.eps", self.eps, "must be above 0")
        if self.momentum is not None:
            _require_share("optimizer.momentum", self.momentum)
            ok = not self.nesterov or self.momentum > 0
            require(ok, "optimizer.nesterov", True, "needs optimizer.momentum above 0")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that this optimizer takes besides `lr` and `weight_decay`."""
        return {name: getattr(self, name) for name in OPTIMIZER_SETTINGS[self.name]}


@dataclass(frozen=True)
class Schedule:
    """Learning rate over the share of samples seen.

    `warmup_share`: share of all samples spent rising from 0; `decay_share`, of `wsd`: spent falling at the end.
    `min_lr_share`: of the peak, at which it ends. `power`: of `polynomial`.
    """

    name: ScheduleName = MISSING
    warmup_share: float = 0.0
    min_lr_share: float = 0.0
    decay_share: float = 0.1
    power: float = 2.0

    def __post_init__(self) -> None:
        _check_choices(self)
        _require_share("schedule.warmup_share", self.warmup_share)
        _require_share("schedule.min_lr_share", self.min_lr_share)
        _require_positive("schedule.power", self.power)
        share, ok = self.decay_share, 0 < self.decay_share <= 1 - self.warmup_share
        rule = f"must be above 0, and at most 1 with schedule.warmup_share={self.warmup_share:g}"
        require(self.name is not ScheduleName.wsd or ok, "schedule.decay_share", share, rule)


@dataclass(frozen=True)
class Evaluation:
    """When the evaluation data are evaluated, and what follows.

    `every_steps`: optimizer steps between evaluations (null: at the end of each epoch). `metric`: selects the best
    weights and decides about early stopping. `patience`: evaluations without an improvement above `min_delta` before
    the run stops (null: never). `micro_batch`: samples of one forward pass of one worker.
    """

    every_steps: int | None = None
    micro_batch: int = 64
    metric: str = MISSING
    goal: Goal = Goal.max
    keep_best: bool = False
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        _require_count("evaluation.every_steps", self.every_steps, "optimizer step", "once an epoch")
        _require_count("evaluation.micro_batch", self.micro_batch, "sample")
        _require_count("evaluation.patience", self.patience, "evaluation", "no early stopping")
        delta = self.min_delta
        require(0 <= delta < math.inf, "evaluation.min_delta", delta, "must be finite and at least 0")


@dataclass(frozen=True)
class Tracking:
    """Where runs are logged, to any of three trackers besides the run's folder.

    `uri`: MLflow's; null means MLFLOW_TRACKING_URI, else SQLite under `outputs/`. `experiment`: of MLflow, and the
    project of W&B. `log_model`: to MLflow, as one of its models.
    """

    mlflow: bool = False
    tensorboard: bool = False
    wandb: bool = False
    uri: str | None = None
    experiment: str = "runner"
    run_name: str | None = None
    log_model: bool = False

    def __post_init__(self) -> None:
        require(bool(self.experiment.strip()), "tracking.experiment", repr(self.experiment), "must not be empty")
        if not self.mlflow:
            rule = "only MLflow uses it; choose tracking=mlflow, or tracking=[mlflow,…] for several trackers"
            require(self.uri is None, "tracking.uri", "…", rule)
            require(not self.log_model, "tracking.log_model", True, rule)
        elif self.uri is None:
            # Not by interpolation in the YAML file: `--cfg job --resolve` would print a password in the variable.
            object.__setattr__(self, "uri", os.environ.get("MLFLOW_TRACKING_URI"))

    @property
    def local(self) -> list[str]:
        """The trackers that write into the run's folder."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]


@dataclass(frozen=True)
class Checkpoint:
    """When a run's state is saved, so that `resume=` can continue it. `keep`: how many of the newest stay on disk.

    `every_minutes`: of wall-clock time, `every_steps`: optimizer steps, both rounded up to the next step in which all
    workers have the same weights; null: never. `on_preemption`: when SIGTERM or SIGUSR1 ends the run.
    """

    every_minutes: float | None = None
    every_steps: int | None = None
    on_preemption: bool = False
    keep: int = 2

    def __post_init__(self) -> None:
        _require_positive("checkpoint.every_minutes", self.every_minutes, "no checkpoints by time")
        _require_count("checkpoint.every_steps", self.every_steps, "optimizer step", "no checkpoints by steps")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "use at least 1, or checkpoint=none")


@dataclass(frozen=True)
class Launch:
    """Workers that fail or are told to end.

    `max_restarts`: how often the workers of this machine are started again, from the newest checkpoint, after one was
    lost. `timeout_s`: seconds that workers wait for each other. `grace_s`: seconds that a preempted run has to save.
    """

    max_restarts: int = 3
    timeout_s: float = 600.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        require(self.max_restarts >= 0, "launch.max_restarts", self.max_restarts, "use 0 for none, or more")
        for name in ("timeout_s", "grace_s"):
            seconds = getattr(self, name)
            require(0 < seconds < 1e9, f"launch.{name}", seconds, "use a number of seconds above 0")


@dataclass(frozen=True)
class Profile:
    """`steps`: optimizer steps that torch.profiler records, null for none; `skip`: those before them."""

    steps: int | None = None
    skip: int = 10

    def __post_init__(self) -> None:
        _require_count("profile.steps", self.steps, "optimizer step", "no profile")
        _require_count("profile.skip", self.skip, "optimizer step, in which it starts")


@dataclass(frozen=True)
class Noise:
    """`every_steps`: optimizer steps between two measurements of the gradient's noise; null: it is not measured.

    With local steps each synchronisation is one.
    """

    every_steps: int | None = None

    def __post_init__(self) -> None:
        _require_count("noise.every_steps", self.every_steps, "optimizer step", "no measurement")


@dataclass(frozen=True)
class Decide:
    """Limits of a sweep with `seed=auto`, which adds seeds to a setup until it is equivalent or different.

    `min_seeds`: before the first look; `max_seeds`: of each setup; `max_minutes`: no round begins later; `margin` and
    `baseline`: as for `runner.compare`. `race`: in a sweep without `seed=auto`, stop the setups that will hardly win.
    """

    min_seeds: int = 4
    max_seeds: int = 20
    max_minutes: float | None = None
    margin: float | None = None
    baseline: str | None = None
    race: bool = False

    def __post_init__(self) -> None:
        require(self.min_seeds >= 2, "decide.min_seeds", self.min_seeds, "use at least 2: one has no spread")
        ok = self.min_seeds <= self.max_seeds <= 100
        require(ok, "decide.max_seeds", self.max_seeds, f"use decide.min_seeds ({self.min_seeds}) to 100")
        for name in ("max_minutes", "margin"):
            value = getattr(self, name)
            ok = value is None or (math.isfinite(value) and value > 0)
            require(ok, f"decide.{name}", value, "must be finite and above 0, or null")


@dataclass(frozen=True)
class Equivalence:
    """Equality of a run with its baseline, beyond equal data, batches, learning rate and seeds.

    `standard`: each worker draws dropout from its own generator. `exact`: dropout is a function of seed, step and
    sample. `identical`: besides, a global batch is cut into `shards`, each of which is a micro-batch, and their
    gradients are added in a fixed order; on a CPU each worker computes with `threads` threads.
    """

    mode: EquivalenceMode = MISSING
    shards: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.is_identical:
            _require_count("equivalence.shards", self.shards, "shard")
            _require_count("equivalence.threads", self.threads, "thread")

    @property
    def is_identical(self) -> bool:
        """True if bits do not depend on the number of workers."""
        return self.mode is EquivalenceMode.identical

    @property
    def dropout_by_sample(self) -> bool:
        return self.mode is not EquivalenceMode.standard


@dataclass(frozen=True)
class Hardware:
    """A device that is not here, by its published figures; for `runner.plan` only. `name`: null for none.

    `gpus`: words of torch's names for it, of several data sheets that match, the longest counts: a run measures its
    utilization against that one. `tflops`: 1e12 operations per second, dense, by precision. `memory_gb`: 1e9 bytes,
    `memory_gb_per_s`: that it reads or writes in a second. `link`: what connects the devices, `link_gb_per_s`: 1e9
    bytes that each sends in a second.
    """

    name: str | None = None
    gpus: list[str] = field(default_factory=list)
    tflops: dict[str, float] = field(default_factory=dict)
    memory_gb: float = 0.0
    memory_gb_per_s: float = 0.0
    link: str | None = None
    link_gb_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.name is None:
            require(self.link is None, "link", self.link, "it connects devices: add hardware=…, or leave it out")
            return
        for name in ("memory_gb", "memory_gb_per_s", "link_gb_per_s"):
            _require_positive(f"hardware.{name}", getattr(self, name))
        for precision, value in self.tflops.items():
            known = precision in PrecisionName.__members__
            require(known, "hardware.tflops", precision, f"use {', '.join(PrecisionName.__members__)}")
            _require_positive(f"hardware.tflops.{precision}", value)


@dataclass(frozen=True)
class PlanOverrides:
    """Settings of `runner.plan` only. `train_samples`: size of the training set, if the data are not on this machine.

    `price_per_hour`: of all devices of a setup together, in any currency, to show what a run costs. `csv`: a new file
    for the setups that are ranked; `scale`: the folder of a branch test (`runner.scale`), by which they are ranked to
    the same loss; `plot`: a new file for their speed-up by the number of workers. For `hardware`: `parameters` of a
    model, and `tokens` of a sample, the mean.
    """

    train_samples: int | None = None
    price_per_hour: float | None = None
    csv: str | None = None
    plot: str | None = None
    scale: str | None = None
    parameters: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "tokens"):
            value = getattr(self, name)
            require(value is None or 1 <= value < math.inf, f"plan.{name}", value, "use at least 1, or null")
        _require_positive("plan.price_per_hour", self.price_per_hour, "no price")
        _require_count("plan.train_samples", self.train_samples, "sample", "those of the data")


#: Settings that do not belong to a setup: runs of one setup can differ in them.
SETUP_DIGEST_EXCLUDES = (
    *("seed", "log_every", "verbose", "tracking", "checkpoint", "launch", "profile", "noise"),
    *("nonfinite_steps", "cache_dir", "plan", "measure", "hardware", "decide"),
)


@dataclass(frozen=True)
class Config:
    """The whole configuration of one run. `recipe` is a plain mapping, which the recipe's own class checks.

    `measure`: for `runner.plan` only: whether it trains some steps to find out what a run will need.
    """

    seed: int = MISSING
    epochs: int = MISSING
    max_steps: int | None = None
    log_every: int = 10
    verbose: bool = False
    compile: bool = False
    gradient_checkpointing: bool = False
    ledger: LedgerMode = LedgerMode.fail
    nonfinite_steps: int = 1
    cache_dir: str = MISSING
    trusted_packages: list[str] = field(default_factory=list)
    recipe: Any = MISSING
    adapter: Adapter = field(default_factory=Adapter)
    sharding: Sharding = field(default_factory=Sharding)
    device: Device = MISSING
    batch: Batch = MISSING
    accumulation: Accumulation = MISSING
    precision: Precision = MISSING
    sync: Sync = MISSING
    scaling: Scaling = MISSING
    optimizer: Optimizer = MISSING
    schedule: Schedule = MISSING
    evaluation: Evaluation = MISSING
    tracking: Tracking = MISSING
    checkpoint: Checkpoint = MISSING
    launch: Launch = field(default_factory=Launch)
    profile: Profile = field(default_factory=Profile)
    noise: Noise = field(default_factory=Noise)
    decide: Decide = field(default_factory=Decide)
    equivalence: Equivalence = MISSING
    plan: PlanOverrides = field(default_factory=PlanOverrides)
    measure: bool = False
    hardware: Hardware = field(default_factory=Hardware)

    def __post_init__(self) -> None:
        # torch and NumPy take 32-bit seeds.
        require(0 <= self.seed < 2**31, "seed", self.seed, "must be at least 0 and below 2147483648")
        _require_count("epochs", self.epochs, "epoch")
        _require_count("max_steps", self.max_steps, "optimizer step", "whole epochs")
        _require_count("log_every", self.log_every, "optimizer step")
        _require_count("nonfinite_steps", self.nonfinite_steps, "optimizer step")
        local_gradients = self.sync.policy is SyncPolicyName.gradients and not self.sync.always_synchronous
        rule = "each worker would have its own fp16 loss scale: use precision=bf16 or fp32"
        ok = not (local_gradients and self.precision.name is PrecisionName.fp16)
        require(ok, "sync.policy", self.sync.policy, rule)
        self._check_scaling()
        dtype, ok = self.sharding.param_dtype, self.precision.name is PrecisionName.bf16
        require(dtype is None or ok, "sharding.param_dtype", dtype, "it needs precision=bf16; use that, or null")
        if self.equivalence.dropout_by_sample:
            mode = f"equivalence={self.equivalence.mode.name}"
            rule = f"{mode} cannot control dropout inside a compiled model; leave one of the two out"
            require(not self.compile, "compile", True, rule)
            rule = f"{mode} cannot control dropout in recomputed activations; leave one of the two out"
            require(not self.gradient_checkpointing, "gradient_checkpointing", True, rule)
        if self.equivalence.is_identical:
            self._check_identical()

    def _check_scaling(self) -> None:
        """Refuse rules that were not derived for the optimizer."""
        rule, name = self.scaling.rule, self.optimizer.name
        other = f"it does not apply to optimizer={name.name}: use scaling=auto, or optimizer=adamw"
        require(rule is not ScalingRule.sde or name in SCALED_BY_SDE, "scaling", rule, other)
        by_half_life = rule in (ScalingRule.half_life, ScalingRule.half_life_sqrt)
        moving = name is not OptimizerName.muon and self.optimizer.betas is not None  # of every weight
        require(not by_half_life or moving, "scaling", rule, other)
        decay = self.scaling.weight_decay
        coupled = f"optimizer={name.name} adds its weight decay to the gradient: use fixed, or optimizer=adamw"
        ok = decay is ScalingWeightDecay.fixed or name in _DECOUPLED
        require(ok, "scaling.weight_decay", decay, coupled)

    def _check_identical(self) -> None:
        """Refuse what lets the result depend on the number of workers."""
        batch, sync, sharding = self.batch.mode, self.sync, self.sharding.kind
        # Phases of one step are local, too, with an outer optimizer or by qsr.
        k: tuple[str, Any] = ("sync.k=1", sync.k) if sync.k > 1 else ("sync=periodic", sync.policy)
        rules = (
            (batch is BatchMode.fixed_global, "batch=fixed_global", batch, "its global batch grows with the workers"),
            (sync.always_synchronous, *k, "workers train alone between synchronisations"),
            (sync.compress is Compress.none, "sync.compress=none", sync.compress, "each worker rounds its own sum"),
            (sharding is ShardingKind.none, "sharding=none", sharding, "FSDP adds gradients in another order"),
        )
        for ok, right, value, reason in rules:
            rule = f"{reason}; with equivalence=identical use {right}"
            require(ok, right.partition("=")[0], value, rule)


@functools.cache
def hydra_schema() -> DictConfig:
    """`Config` as Hydra's root node, merged first so that every later value is checked against it."""
    root = _writable(Config)
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            root[name] = _writable(kind)
    return root


def _writable(kind: Any) -> DictConfig:
    # Frozen dataclasses become read-only nodes, but composing writes to them. The final objects are frozen.
    node = OmegaConf.structured(kind)
    OmegaConf.set_readonly(node, None)
    return node
