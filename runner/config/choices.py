"""The allowed values of settings. Each member's name is its spelling in YAML and on the command line."""

from __future__ import annotations

import enum


class DeviceKind(str, enum.Enum):
    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"
    tpu = "tpu"
    from_accelerate = "from_accelerate"  # replaced by the value in the file when settings are read


class Rehearse(str, enum.Enum):
    auto = "auto"
    never = "never"


class BatchMode(str, enum.Enum):
    fixed_global = "fixed_global"
    per_device = "per_device"


class BatchOrder(str, enum.Enum):
    permutation = "permutation"
    keyed = "keyed"


class AccumulationMode(str, enum.Enum):
    fixed = "fixed"
    auto = "auto"
    fit = "fit"


class PrecisionName(str, enum.Enum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp64 = "fp64"
    from_accelerate = "from_accelerate"  # as above


class AdapterKind(str, enum.Enum):
    none = "none"
    lora = "lora"
    qlora = "qlora"


class ShardingKind(str, enum.Enum):
    none = "none"
    fsdp = "fsdp"
    fsdp_offload = "fsdp_offload"


class SyncPolicyName(str, enum.Enum):
    periodic = "periodic"
    outer = "outer"
    accumulated = "accumulated"
    gradients = "gradients"


class SyncSchedule(str, enum.Enum):
    constant = "constant"
    post_local = "post_local"
    qsr = "qsr"


class Compress(str, enum.Enum):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"
    int8 = "int8"


class ScalingRule(str, enum.Enum):
    auto = "auto"
    linear = "linear"
    sqrt = "sqrt"
    sde = "sde"
    half_life = "half_life"
    half_life_sqrt = "half_life_sqrt"
    none = "none"


class ScalingWeightDecay(str, enum.Enum):
    fixed = "fixed"
    per_sample = "per_sample"


class ScalingBatch(str, enum.Enum):
    global_batch = "global_batch"
    replica_batch = "replica_batch"


class OptimizerName(str, enum.Enum):
    adamw = "adamw"
    sgd = "sgd"
    adam = "adam"
    adafactor = "adafactor"
    adagrad = "adagrad"
    adamax = "adamax"
    nadam = "nadam"
    radam = "radam"
    rmsprop = "rmsprop"
    muon = "muon"


#: The optimizers for which the scaling rule `sde` was derived.
SCALED_BY_SDE = (OptimizerName.adamw, OptimizerName.adam)


class ScheduleName(str, enum.Enum):
    linear = "linear"
    cosine = "cosine"
    polynomial = "polynomial"
    wsd = "wsd"
    constant = "constant"


class Goal(str, enum.Enum):
    max = "max"
    min = "min"


class EquivalenceMode(str, enum.Enum):
    standard = "standard"
    exact = "exact"
    identical = "identical"


class LedgerMode(str, enum.Enum):
    fail = "fail"
    warn = "warn"
