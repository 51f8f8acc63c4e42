"""The typed configuration: what can be set, in which unit, and which values are allowed.

The YAML files under `conf/` hold values only; these dataclasses hold types and rules. Hydra merges the YAML and the
command line onto them, so a wrong type is refused where it is written. A rule that spans several settings is checked
when the finished objects are built (`__post_init__`); what depends on the data or the machine is checked by the plan.

The allowed values themselves are in `runner/choices.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from runner.config.choices import (
    AccumulationMode,
    Average,
    BatchMode,
    DeviceKind,
    EquivalenceMode,
    Goal,
    LedgerMode,
    OptimizerName,
    PrecisionName,
    Rehearse,
    ScalingBatch,
    ScalingRule,
    ScheduleName,
    SyncPolicyName,
    TrackerName,
)
from runner.config.sync_settings import Sync
from runner.errors import require


@dataclass(frozen=True)
class Device:
    """Where the workers run. `workers`: model replicas over all nodes; null takes every local device of the kind.

    `file`: the Accelerate config file that kind and workers were taken from, if any. `length_buckets`: tokens that
    batches are padded to, the next of these lengths; null pads to the longest row of a batch, or on a device that
    compiles for every shape to a few fractions of the longest row of the data.
    """

    kind: DeviceKind = MISSING
    workers: int | None = None
    rehearse: Rehearse = Rehearse.auto
    file: str | None = None
    length_buckets: list[int] | None = None

    def __post_init__(self) -> None:
        require(self.workers is None or self.workers >= 1, "device.workers", self.workers, "it must be at least 1")
        require(
            self.length_buckets is None or (len(self.length_buckets) > 0 and min(self.length_buckets) >= 1),
            "device.length_buckets",
            self.length_buckets,
            "give lengths of at least 1 token, such as [32,64,128], or null",
        )


@dataclass(frozen=True)
class Batch:
    """Batch semantics, in samples. `fixed_global` gives `global_batch`, `per_device` gives `micro_batch`."""

    mode: BatchMode = MISSING
    global_batch: int | None = None
    micro_batch: int | None = None
    length_sorted: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        given, derived = (
            ("global_batch", "micro_batch") if self.mode is BatchMode.fixed_global else ("micro_batch", "global_batch")
        )
        size = getattr(self, given)
        require(size is not None and size >= 1, f"batch.{given}", size, "it must be at least 1 sample")
        require(
            getattr(self, derived) is None,
            f"batch.{derived}",
            getattr(self, derived),
            f"under batch={self.mode.name} it is derived; set batch.{given}, or choose "
            f"batch={'per_device' if self.mode is BatchMode.fixed_global else 'fixed_global'}",
        )


@dataclass(frozen=True)
class Accumulation:
    """Micro-batches per optimizer step of one worker: given (`fixed`), or the fewest that fit (`auto`)."""

    mode: AccumulationMode = MISSING
    steps: int | None = None
    max_micro_batch: int | None = None

    def __post_init__(self) -> None:
        fixed = self.mode is AccumulationMode.fixed
        given, other = ("steps", "max_micro_batch") if fixed else ("max_micro_batch", "steps")
        value = getattr(self, given)
        require(value is not None and value >= 1, f"accumulation.{given}", value, "it must be at least 1")
        require(
            getattr(self, other) is None,
            f"accumulation.{other}",
            getattr(self, other),
            f"accumulation={self.mode.name} takes accumulation.{given} only; "
            f"choose accumulation={'auto' if fixed else 'fixed'} for it",
        )


@dataclass(frozen=True)
class Precision:
    """Arithmetic of forward and backward; weights and optimizer stay in fp32 (fp64 under fp64)."""

    name: PrecisionName = MISSING


@dataclass(frozen=True)
class Scaling:
    """How the learning rate follows the batch. `reference_batch`: samples the base learning rate was tuned for."""

    rule: ScalingRule = MISSING
    batch: ScalingBatch = ScalingBatch.global_batch
    reference_batch: int = MISSING

    def __post_init__(self) -> None:
        require(
            self.reference_batch >= 1,
            "scaling.reference_batch",
            self.reference_batch,
            "it must be at least 1 sample",
        )


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
        require(0 < self.lr < math.inf, "optimizer.lr", self.lr, "it must be above 0, and finite")
        ok = 0 <= self.weight_decay < math.inf
        require(ok, "optimizer.weight_decay", self.weight_decay, "it must not be negative, and finite")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            "optimizer.clip_norm",
            self.clip_norm,
            "it must be above 0, or null for no clipping",
        )
        adamw = self.name is OptimizerName.adamw
        for name in ("momentum", "nesterov") if adamw else ("betas", "eps"):
            value = getattr(self, name)
            require(value is None, f"optimizer.{name}", value, f"optimizer={self.name.name} has no such setting")
        for name in ("betas", "eps") if adamw else ("momentum", "nesterov"):
            require(
                getattr(self, name) is not None,
                f"optimizer.{name}",
                None,
                f"optimizer={self.name.name} needs it",
            )
        if adamw:
            assert self.betas is not None
            assert self.eps is not None
            ok = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
            require(ok, "optimizer.betas", self.betas, "it must be two numbers of at least 0 and below 1")
            require(self.eps > 0, "optimizer.eps", self.eps, "it must be above 0")
        else:
            assert self.momentum is not None
            require(
                0 <= self.momentum < 1,
                "optimizer.momentum",
                self.momentum,
                "it must be at least 0 and below 1",
            )
            require(
                not self.nesterov or self.momentum > 0,
                "optimizer.nesterov",
                True,
                "it needs a momentum above 0",
            )


@dataclass(frozen=True)
class Schedule:
    """Learning rate over the share of samples seen. `warmup_share`: share of all samples spent rising from 0."""

    name: ScheduleName = MISSING
    warmup_share: float = 0.0

    def __post_init__(self) -> None:
        require(
            0 <= self.warmup_share < 1,
            "schedule.warmup_share",
            self.warmup_share,
            "it must be at least 0 and below 1",
        )


@dataclass(frozen=True)
class Evaluation:
    """When the held-out part is evaluated and what follows from it.

    `every_steps`: optimizer steps between evaluations (null: at the end of each epoch). `metric`: decides about the
    best weights and early stopping. `patience`: evaluations without an improvement above `min_delta` before the run
    stops (null: never). `micro_batch`: samples of one forward pass of one worker.
    """

    every_steps: int | None = None
    micro_batch: int = 64
    metric: str = MISSING
    goal: Goal = Goal.max
    keep_best: bool = False
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.every_steps is None or self.every_steps >= 1,
            "evaluation.every_steps",
            self.every_steps,
            "it must be at least 1 optimizer step, or null for once an epoch",
        )
        require(self.micro_batch >= 1, "evaluation.micro_batch", self.micro_batch, "it must be at least 1 sample")
        require(
            self.patience is None or self.patience >= 1,
            "evaluation.patience",
            self.patience,
            "it must be at least 1 evaluation, or null for no early stop",
        )
        ok = 0 <= self.min_delta < math.inf
        require(ok, "evaluation.min_delta", self.min_delta, "it must not be negative, and finite")


@dataclass(frozen=True)
class Tracking:
    """Where runs are logged. `uri`: an MLflow tracking URI, null for a SQLite store under `outputs/`."""

    kind: TrackerName = MISSING
    uri: str | None = None
    experiment: str = "runner"
    run_name: str | None = None
    log_model: bool = False

    def __post_init__(self) -> None:
        require(
            bool(self.experiment.strip()),
            "tracking.experiment",
            repr(self.experiment),
            "it must not be empty",
        )
        if self.kind is TrackerName.none:
            rule = "tracking=none logs to the run's folder only; choose tracking=mlflow for it"
            require(self.uri is None, "tracking.uri", "…", rule)
            require(not self.log_model, "tracking.log_model", True, rule)


@dataclass(frozen=True)
class Equivalence:
    """How far equality with the baseline is pursued beyond equal data, batches, learning rate and seeds.

    `standard`: dropout from each worker's own generator. `exact`: dropout as a function of seed, step and sample.
    """

    mode: EquivalenceMode = MISSING


@dataclass(frozen=True)
class PlanOverrides:
    """For `runner.plan` only. `train_samples`: size of the training set, used if the data are not on this machine."""

    train_samples: int | None = None

    def __post_init__(self) -> None:
        ok = self.train_samples is None or self.train_samples >= 1
        require(ok, "plan.train_samples", self.train_samples, "use at least 1 sample, or null")


@dataclass(frozen=True)
class Config:
    """The whole configuration of one run. `recipe` stays a plain mapping: its own class checks it."""

    seed: int = MISSING
    epochs: int = MISSING
    max_steps: int | None = None
    compile: bool = False
    gradient_checkpointing: bool = False
    ledger: LedgerMode = LedgerMode.fail
    cache_dir: str = MISSING
    trusted_packages: list[str] = field(default_factory=list)
    recipe: Any = MISSING
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
    equivalence: Equivalence = MISSING
    plan: PlanOverrides = field(default_factory=PlanOverrides)

    def __post_init__(self) -> None:
        # torch and NumPy take 32-bit seeds; seed + epoch must fit as well.
        require(0 <= self.seed < 2**31, "seed", self.seed, "it must be at least 0 and below 2147483648")
        require(self.epochs >= 1, "epochs", self.epochs, "it must be at least 1")
        require(
            self.max_steps is None or self.max_steps >= 1,
            "max_steps",
            self.max_steps,
            "it must be at least 1 optimizer step, or null for whole epochs",
        )
        separate = self.sync.policy is SyncPolicyName.gradients and not self.sync.averages_gradients_always
        rule = "workers' loss scales move apart between synchronisations of gradients: use precision=bf16 or fp32"
        require(not (separate and self.precision.name is PrecisionName.fp16), "sync.policy", self.sync.policy, rule)
        rule = "optimizer=sgd with optimizer.momentum=0 has no moments: use sync.average=weights"
        moments = self.sync.average is Average.weights_and_moments
        require(not (moments and self.optimizer.momentum == 0), "sync.average", self.sync.average, rule)
        if self.equivalence.mode is EquivalenceMode.exact:
            for name, why in (
                ("compile", "a compiled model draws its dropout inside the compiled program"),
                ("gradient_checkpointing", "activations are recomputed where their dropout can no longer be known"),
            ):
                rule = f"{why}, and equivalence=exact has to choose it; leave one of the two out"
                require(not getattr(self, name), name, "true", rule)


@functools.cache
def hydra_schema() -> DictConfig:
    """`Config` as Hydra's root node, merged first so that every later value is checked against it."""
    root = _writable(Config)
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            root[name] = _writable(kind)
    return root


def _writable(kind: Any) -> DictConfig:
    # Frozen dataclasses become read-only nodes; composing has to write to them. What is built at the end is frozen.
    node = OmegaConf.structured(kind)
    OmegaConf.set_readonly(node, None)
    return node
