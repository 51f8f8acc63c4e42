"""The properties that a certificate compares, and what a difference in each does to training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runner.config.choices import AdapterKind, BatchOrder, Compress, ShardingKind
from runner.config.instantiate import NOT_TRAINED_WITH
from runner.config.schema import Adapter
from runner.folder.files import digest_of
from runner.plan.baseline import RunSetup
from runner.plan.describe_sync import describe_sync
from runner.plan.levels import COMPARABLE, EQUIVALENT, IDENTICAL, NOT_COMPARABLE
from runner.plan.scaling import settings_text
from runner.plan.schedule import falling_words, lr_multiplier


@dataclass(frozen=True)
class CertifiedProperty:
    """One compared property.

    `allows`: the best level if it differs. `change`: the ratio, if the property is a number. `effect`: what the
    difference does to training.
    """

    name: str
    value: Any
    baseline: Any
    equal: bool
    allows: str
    change: str
    effect: str


def describe_adapter(adapter: Adapter) -> str:
    """What decides about the result, in words; empty without an adapter."""
    if adapter.kind is AdapterKind.none:
        return ""
    layers = "all linear layers" if adapter.target_modules is None else ", ".join(adapter.target_modules)
    dropout = f", dropout {adapter.dropout:g}" if adapter.dropout else ""
    frozen = ", the frozen ones in 4 bits" if adapter.in_4_bits else ""
    return f"rank {adapter.rank}, alpha {adapter.alpha:g}{dropout}, on {layers}{frozen}"


#: To which length recipes may pad rows; `none`: layers compute no padding.
_PADDINGS = ("none", "longest", "max_length")


def _recipe(setup: RunSetup) -> str:
    """Model and data, by name and hash; neither padding nor the values that the learning rate was tuned with count."""
    excluded = [*NOT_TRAINED_WITH]
    if setup.config.recipe.get("padding") in _PADDINGS:  # a recipe of the user's may mean something else by it
        excluded.append("padding")
    recipe = {key: value for key, value in setup.config.recipe.items() if key not in excluded}
    return f"{recipe.get('name')} {digest_of([recipe, setup.data])[:8]}"


def _adapter(setup: RunSetup) -> str:
    adapter = setup.config.adapter
    words = describe_adapter(adapter)
    return f"{adapter.kind.name}, {words}" if words else adapter.kind.name


def _batch_statistics(setup: RunSetup) -> str:
    return f"of {setup.plan.micro_batch} samples" if setup.batch_statistics else "none"


def _batch_effect(setup: RunSetup) -> str:
    if setup.plan.cut_short:
        return f"there are only {setup.plan.samples_per_epoch:,} training samples: an epoch is one step"
    return "each gradient averages over another batch size"


def _samples_seen(setup: RunSetup) -> int:
    return setup.plan.total_samples if setup.stopped_after is None else setup.stopped_after


def _samples_effect(setup: RunSetup) -> str:
    return "more or less training" if setup.stopped_after is None else "the run stopped before the end of its plan"


def _data_order(setup: RunSetup) -> str:
    tail = ", tails dropped" if setup.plan.drop_last else ""
    kind = "" if setup.plan.order == BatchOrder.permutation.name else f"{setup.plan.order}, "
    return f"{kind}seed {setup.config.seed}, cut by {min(setup.plan.global_batch, setup.plan.samples_per_epoch)}{tail}"


def _loss(setup: RunSetup) -> str:
    return "sum ÷ worker's count" if setup.config.sync.has_local_steps(setup.plan.world_size) else "sum ÷ global count"


def _lr_curve(setup: RunSetup) -> list[float]:
    """The learning rate after each percent of the samples."""
    return [setup.plan.lr * lr_multiplier(setup.config.schedule, i / 100) for i in range(101)]


def _lr_change(setup: RunSetup, baseline: RunSetup) -> str:
    """The largest ratio between the two learning rates at the same share of the samples."""
    pairs = zip(_lr_curve(setup), _lr_curve(baseline), strict=True)
    ratios = [(lr / reference, i) for i, (lr, reference) in enumerate(pairs) if lr and reference]
    if not ratios:
        return ""
    ratio, at = max(ratios, key=lambda one: abs(math.log(one[0])))
    constant = all(math.isclose(one, ratio, rel_tol=1e-9) for one, _ in ratios)
    return f"× {ratio:.4g}" if constant else f"up to × {ratio:.4g}, at {at}% of the samples"


def _schedule(setup: RunSetup) -> str:
    schedule = setup.config.schedule
    warm_up = f"warm-up over {100 * schedule.warmup_share:.4g}% of the samples"
    return ", ".join([schedule.name.name, warm_up, *falling_words(schedule)])


def _optimizer(setup: RunSetup) -> str:
    optimizer = setup.config.optimizer
    settings = {**optimizer.settings, "decay": optimizer.weight_decay}
    parts = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}".removesuffix(" True")
        for name, value in settings.items()
        if value is not False
    ]
    return ", ".join([optimizer.name.name, *parts])


def _scaled_settings(setup: RunSetup) -> str:
    """Settings that the scaling rule has changed, besides the learning rate."""
    changed = setup.plan.scaled_settings
    return "; ".join(f"{name} {settings_text(value)}" for name, value in changed.items()) or "none"


def _clipping(setup: RunSetup) -> str:
    norm = setup.config.optimizer.clip_norm
    return "none" if norm is None else f"norm {norm:g}"


def _clipping_scope(setup: RunSetup) -> str:
    if setup.config.optimizer.clip_norm is None:
        return "none"
    return "each worker" if setup.config.sync.has_local_steps(setup.plan.world_size) else "global batch"


def _evaluation(setup: RunSetup) -> str:
    """What selects the best weights and stops the run, and how often it is evaluated."""
    evaluation = setup.config.evaluation
    often = "every epoch" if evaluation.every_steps is None else f"every {evaluation.every_steps} steps"
    kept = ", best kept" if evaluation.keep_best else ""
    stops = f", patience {evaluation.patience}" if evaluation.patience is not None else ""
    least = f", improvements above {evaluation.min_delta:g}" if (kept or stops) and evaluation.min_delta else ""
    return f"{evaluation.metric} {evaluation.goal.name}, {often}{kept}{stops}{least}"


def _sync(setup: RunSetup) -> str:
    if setup.plan.world_size == 1:
        return "every step"
    return describe_sync(setup.config.sync, setup.config.batch.length_sorted)


def _wire(setup: RunSetup) -> str:
    """The number format in which workers exchange updates."""
    compress, sharding = setup.config.sync.compress, setup.config.sharding.kind
    if setup.plan.world_size == 1 or compress is Compress.none:
        return "as it is"
    often = sharding is not ShardingKind.none and setup.plan.accumulation_steps > 1
    return f"{compress.name}, in each micro-batch" if often else compress.name


def _gathered(setup: RunSetup) -> str:
    """The format in which sharded weights are gathered."""
    dtype = setup.config.sharding.param_dtype
    return "as they are" if dtype is None else dtype.name


def _dropout(setup: RunSetup) -> str:
    """What determines a sample's dropout: its place in a worker's micro-batch, or the sample itself."""
    if not setup.has_dropout:
        return "none in the model"
    if setup.config.equivalence.dropout_by_sample:
        return "by sample"
    plan = setup.plan
    order = "sorted" if setup.config.batch.length_sorted else "unsorted"
    shares = f"{plan.world_size} × {plan.accumulation_steps} {order} shares"
    return f"{shares}, padding {_padding(setup)}, {setup.device_type}"


def _padding(setup: RunSetup) -> str:
    """The length to which a recipe pads rows; by `none`, only where a model computes no padding."""
    buckets = setup.config.device.length_buckets
    lengths = "" if buckets is None else f", lengths {buckets}"
    return f"{setup.config.recipe.get('padding', 'longest')}{lengths}"


#: How sums are taken where workers decide about it.
BY_WORKER = "by worker"


def _summation(setup: RunSetup) -> str:
    """What decides about the order in which gradients, and the sums within kernels, are added."""
    equivalence = setup.config.equivalence
    if not equivalence.is_identical:
        return BY_WORKER
    threads = (
        f", {equivalence.threads} thread{'s' * (equivalence.threads != 1)} each" if setup.device_type == "cpu" else ""
    )
    return f"tree of {equivalence.shards} shards{threads}"


def _evaluation_batches(setup: RunSetup) -> str:
    return f"of {setup.config.evaluation.micro_batch} samples" if setup.config.equivalence.is_identical else BY_WORKER


def _versions(setup: RunSetup) -> str:
    return ", ".join(f"{name} {version}" for name, version in setup.versions.items())


@dataclass(frozen=True)
class _Row:
    """How one property is compared.

    `read`: the value shown. `effect`: of a difference, if needed for this setup. `compared`: what decides about
    equality, if not that value. `change`: how to express the difference, if not as a ratio. `only_sums`: whether a
    difference only changes the order of sums, which shards fix.
    """

    name: str
    read: Callable[[RunSetup], Any]
    allows: str
    effect: str | Callable[[RunSetup], str]
    compared: Callable[[RunSetup], Any] | None = None
    change: Callable[[RunSetup, RunSetup], str] | None = None
    only_sums: bool = False

    def compare(self, setup: RunSetup, baseline: RunSetup) -> CertifiedProperty:
        value, reference = self.read(setup), self.read(baseline)
        compared = self.compared or self.read
        fixed = self.only_sums and all(one.config.equivalence.is_identical for one in (setup, baseline))
        allows = IDENTICAL if fixed else self.allows
        if compared(setup) == compared(baseline):
            return CertifiedProperty(self.name, value, reference, True, allows, "", "")
        change = self.change(setup, baseline) if self.change else _ratio(value, reference)
        effect = self.effect if isinstance(self.effect, str) else self.effect(setup)
        return CertifiedProperty(self.name, value, reference, False, allows, change, _NO_EFFECT if fixed else effect)


def _ratio(value: Any, baseline: Any) -> str:
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (value, baseline))
    return f"× {value / baseline:.4g}" if numbers and baseline else ""


_ORDER_OF_SUMS = "different summation order: last bits differ"
_NO_EFFECT = "none: the same bits"
_ROWS = (
    _Row("recipe", _recipe, NOT_COMPARABLE, "a different model or different data"),
    _Row("adapter", _adapter, NOT_COMPARABLE, "other weights are trained"),
    _Row("global_batch", lambda s: s.plan.global_batch, COMPARABLE, _batch_effect),
    _Row("samples_seen", _samples_seen, NOT_COMPARABLE, _samples_effect),
    _Row("data_order", _data_order, COMPARABLE, "global batches contain different samples"),
    _Row("batch_statistics", _batch_statistics, COMPARABLE, "activations are normalised over different samples"),
    _Row("loss_normalisation", _loss, COMPARABLE, "samples on workers with fewer labels get a larger weight"),
    _Row(
        "learning_rate",
        lambda s: s.plan.lr,
        COMPARABLE,
        "a different step size at the same sample",
        _lr_curve,
        _lr_change,
    ),
    _Row("schedule", _schedule, COMPARABLE, "the learning rate follows a different curve"),
    _Row("optimizer", _optimizer, NOT_COMPARABLE, "a different update rule"),
    _Row("scaled_settings", _scaled_settings, COMPARABLE, "betas, eps or weight decay follow the batch"),
    _Row("clipping", _clipping, NOT_COMPARABLE, "gradients are clipped differently"),
    _Row("clipping_scope", _clipping_scope, COMPARABLE, "each worker clips its local gradient"),
    _Row("evaluation", _evaluation, NOT_COMPARABLE, "different weights are evaluated, or by another metric"),
    _Row("sync", _sync, COMPARABLE, "replicas diverge between synchronisations"),
    _Row("wire", _wire, COMPARABLE, "exchanged updates are rounded"),
    _Row(
        "seed",
        lambda s: s.config.seed,
        NOT_COMPARABLE,
        "different initial weights, data order and dropout",
        change=lambda *_: "",
    ),
    _Row("dropout", _dropout, COMPARABLE, "different units are dropped"),
    _Row("precision", lambda s: s.config.precision.name.name, COMPARABLE, "different rounding"),
    _Row("gathered_weights", _gathered, COMPARABLE, "all weights are rounded before they are used"),
    _Row("compile", lambda s: s.config.compile, COMPARABLE, "fused kernels round differently"),
    _Row(
        "gradient_checkpointing",
        lambda s: s.config.gradient_checkpointing,
        COMPARABLE,
        "activations are recomputed in the backward pass",
    ),
    _Row("versions", _versions, COMPARABLE, "kernels and defaults may differ"),
    _Row("summation", _summation, EQUIVALENT, _ORDER_OF_SUMS),
    _Row("evaluation_batches", _evaluation_batches, EQUIVALENT, "last bits of predictions differ"),
    _Row("world_size", lambda s: s.plan.world_size, EQUIVALENT, _ORDER_OF_SUMS, only_sums=True),
    _Row("accumulation_steps", lambda s: s.plan.accumulation_steps, EQUIVALENT, _ORDER_OF_SUMS, only_sums=True),
    _Row("padding", _padding, EQUIVALENT, _ORDER_OF_SUMS),
    _Row("sharding", lambda s: s.config.sharding.kind.name, EQUIVALENT, _ORDER_OF_SUMS),
    _Row("device", lambda s: s.device_type, EQUIVALENT, "different kernels: last bits differ"),
    _Row("processor", lambda s: s.processor, EQUIVALENT, "different kernels: last bits differ"),
    _Row(
        "rehearsed",
        lambda s: s.rehearsed,
        EQUIVALENT,
        "kernels of another device than the named one",
        only_sums=True,  # the baseline has the same kernels
    ),
)


def compare(setup: RunSetup, baseline: RunSetup) -> tuple[CertifiedProperty, ...]:
    """All properties of a setup, compared with those of its baseline."""
    return tuple(row.compare(setup, baseline) for row in _ROWS)
