"""The certificate: what a setup holds equal to its baseline, and what it does not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runner.config.choices import Compress, EquivalenceMode, OptimizerName
from runner.config.schema import Config
from runner.plan import Plan
from runner.plan.schedule import lr_multiplier
from runner.plan.sync_words import sync_sentence

#: What a difference costs a run: nothing, the word "equivalent", or comparability itself.
_FREE, _COMPARABLE, NOT_COMPARABLE = "equivalent", "comparable", "not comparable"
_WIRE = {Compress.none: "as it is", Compress.bf16: "bf16", Compress.fp16: "fp16"}
_LEVELS = (_FREE, _COMPARABLE, NOT_COMPARABLE)


@dataclass(frozen=True)
class Setup:
    """What the certificate compares.

    `data`: digest of every text and label; `has_dropout`: whether training drops units at all; `versions`: of
    libraries, by name; `batch_statistics`: whether the model normalises by those of a micro-batch, which is known when
    it has been built.
    """

    config: Config
    plan: Plan
    data: str
    has_dropout: bool
    device_type: str
    rehearsed: bool
    versions: Mapping[str, str]
    batch_statistics: bool = False


@dataclass(frozen=True)
class Property:
    """One compared property. `change`: by how much, where it is a number; `effect`: what that is known to do."""

    name: str
    value: Any
    baseline: Any
    equal: bool
    allows: str
    change: str
    effect: str

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Certificate:
    """`level`: equivalent, comparable or not comparable. Whether the ledger is sound is known only after the run."""

    level: str
    properties: tuple[Property, ...]

    def as_json(self) -> dict[str, Any]:
        """The content of `certificate.json`."""
        return {
            "level": self.level,
            "equal": [p.as_json() for p in self.properties if p.equal],
            "different": [p.as_json() for p in self.properties if not p.equal],
        }


def _recipe(setup: Setup) -> str:
    """Model and data, by name and hash; what the learning rate was tuned with is no part of them."""
    apart = ("tuned", "metric", "goal", "data")
    recipe = {key: value for key, value in setup.config.recipe.items() if key not in apart}
    content = json.dumps([recipe, setup.data], sort_keys=True, default=str)
    return f"{recipe.get('name')} {hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _batch_statistics(setup: Setup) -> str:
    return f"of {setup.plan.micro_batch} samples" if setup.batch_statistics else "none"


def _steps_alone(setup: Setup) -> bool:
    """Whether there are local phases; one worker has nobody to drift from."""
    return setup.plan.world_size > 1 and not setup.config.sync.averages_gradients_always


def _data_order(setup: Setup) -> str:
    tail = ", tails dropped" if setup.plan.drop_last else ""
    return f"seed {setup.config.seed}, cut by {setup.plan.global_batch}{tail}"


def _loss(setup: Setup) -> str:
    return "sum ÷ worker's count" if _steps_alone(setup) else "sum ÷ global count"


def _lr_curve(setup: Setup) -> list[float]:
    """The learning rate at a hundred points of the run, by the share of samples seen."""
    name, warmup_share = setup.config.schedule.name.name, setup.config.schedule.warmup_share
    return [setup.plan.lr * lr_multiplier(name, i / 100, warmup_share) for i in range(101)]


def _lr_change(setup: Setup, baseline: Setup) -> str:
    """The largest ratio between the two learning rates at the same share of the samples."""
    pairs = zip(_lr_curve(setup), _lr_curve(baseline), strict=True)
    ratios = [(own / other, i) for i, (own, other) in enumerate(pairs) if own and other]
    if not ratios:
        return ""
    ratio, at = max(ratios, key=lambda one: abs(math.log(one[0])))
    everywhere = all(math.isclose(one, ratio, rel_tol=1e-9) for one, _ in ratios)
    return f"× {ratio:.4g}" if everywhere else f"up to × {ratio:.4g}, at {at}% of the samples"


def _schedule(setup: Setup) -> str:
    schedule = setup.config.schedule
    return f"{schedule.name.name}, warm-up over {100 * schedule.warmup_share:.4g}% of the samples"


def _optimizer(setup: Setup) -> str:
    optimizer = setup.config.optimizer
    if optimizer.name is OptimizerName.adamw:
        own = f"betas {optimizer.betas}, eps {optimizer.eps:g}"
    else:
        own = f"momentum {optimizer.momentum:g}{', nesterov' if optimizer.nesterov else ''}"
    return f"{optimizer.name.name}, {own}, decay {optimizer.weight_decay:g}"


def _clipping(setup: Setup) -> str:
    norm = setup.config.optimizer.clip_norm
    return "none" if norm is None else f"norm {norm:g}"


def _clipping_scope(setup: Setup) -> str:
    if setup.config.optimizer.clip_norm is None:
        return "none"
    return "each worker" if _steps_alone(setup) else "global batch"


def _evaluation(setup: Setup) -> str:
    """What decides about the best weights and about stopping, and when it is asked."""
    evaluation = setup.config.evaluation
    often = "every epoch" if evaluation.every_steps is None else f"every {evaluation.every_steps} steps"
    kept = ", best kept" if evaluation.keep_best else ""
    stops = f", patience {evaluation.patience}" if evaluation.patience is not None else ""
    least = f", improvements above {evaluation.min_delta:g}" if (kept or stops) and evaluation.min_delta else ""
    return f"{evaluation.metric} {evaluation.goal.name}, {often}{kept}{stops}{least}"


def _sync(setup: Setup) -> str:
    if setup.plan.world_size == 1:
        return "every step"
    return sync_sentence(setup.config.sync, setup.config.batch.length_sorted)


def _wire(setup: Setup) -> str:
    """The form in which workers exchange what they have learnt."""
    return "as it is" if setup.plan.world_size == 1 else _WIRE[setup.config.sync.compress]


def _dropout(setup: Setup) -> str:
    """What a sample's dropout follows: its place in a worker's micro-batch, or the sample itself."""
    if not setup.has_dropout:
        return "none in the model"
    if setup.config.equivalence.mode is EquivalenceMode.exact:
        return "by sample"
    plan = setup.plan
    order = "sorted" if setup.config.batch.length_sorted else "unsorted"
    buckets = setup.config.device.length_buckets
    padding = f", padded to {buckets}" if buckets is not None else ""
    return f"{plan.world_size} × {plan.accumulation_steps} {order} shares{padding}, {setup.device_type}"


def _versions(setup: Setup) -> str:
    return ", ".join(f"{name} {version}" for name, version in setup.versions.items())


@dataclass(frozen=True)
class _Row:
    """`read`: what is shown; `compared`: what decides, if that is more; `change`: by how much, unless it is a ratio."""

    name: str
    read: Callable[[Setup], Any]
    allows: str
    effect: str
    compared: Callable[[Setup], Any] | None = None
    change: Callable[[Setup, Setup], str] | None = None


_ROWS = (
    _Row("recipe", _recipe, NOT_COMPARABLE, "another model, or other data"),
    _Row("global_batch", lambda s: s.plan.global_batch, _COMPARABLE, "another number of samples behind each step"),
    _Row("samples_seen", lambda s: s.plan.total_samples, NOT_COMPARABLE, "more or less training"),
    _Row("data_order", _data_order, _COMPARABLE, "other samples meet in a step"),
    _Row("batch_statistics", _batch_statistics, _COMPARABLE, "activations are normalised over other samples"),
    _Row("loss_normalisation", _loss, _COMPARABLE, "few terms weigh more"),
    _Row("learning_rate", lambda s: s.plan.lr, _COMPARABLE, "another step size at a sample", _lr_curve, _lr_change),
    _Row("schedule", _schedule, _COMPARABLE, "the learning rate rises and falls elsewhere"),
    _Row("optimizer", _optimizer, NOT_COMPARABLE, "another rule of updating"),
    _Row("clipping", _clipping, NOT_COMPARABLE, "other gradients are shortened"),
    _Row("clipping_scope", _clipping_scope, _COMPARABLE, "each worker shortens its own gradient"),
    _Row("evaluation", _evaluation, NOT_COMPARABLE, "other weights are judged, or by another measure"),
    _Row("sync", _sync, _COMPARABLE, "replicas drift apart in between"),
    _Row("wire", _wire, _COMPARABLE, "what workers exchange is rounded"),
    _Row(
        "seed",
        lambda s: s.config.seed,
        NOT_COMPARABLE,
        "another draw of new weights, order and dropout",
        change=lambda *_: "",
    ),
    _Row("dropout", _dropout, _COMPARABLE, "other units are dropped"),
    _Row("precision", lambda s: s.config.precision.name.name, _COMPARABLE, "other rounding"),
    _Row("compile", lambda s: s.config.compile, _COMPARABLE, "fused kernels round differently"),
    _Row(
        "gradient_checkpointing",
        lambda s: s.config.gradient_checkpointing,
        _COMPARABLE,
        "activations are computed a second time",
    ),
    _Row("versions", _versions, _COMPARABLE, "kernels and defaults may have changed"),
    _Row("world_size", lambda s: s.plan.world_size, _FREE, "sums in another order: last bits"),
    _Row("accumulation_steps", lambda s: s.plan.accumulation_steps, _FREE, "sums in another order: last bits"),
    _Row("device", lambda s: s.device_type, _FREE, "kernels add in another order: last bits"),
    _Row("rehearsed", lambda s: s.rehearsed, _FREE, "not the named device's kernels"),
)


def certify(setup: Setup, baseline: Setup) -> Certificate:
    """Compare a setup with its baseline property by property."""
    return _certificate(tuple(_compare(row, setup, baseline) for row in _ROWS))


def with_batch_statistics(setup: Setup, baseline: Setup) -> Certificate:
    """The certificate of a model that turned out to normalise by the statistics of a micro-batch."""
    return certify(*(dataclasses.replace(one, batch_statistics=True) for one in (setup, baseline)))


def after_stopping(certificate: Certificate, samples_seen: int) -> Certificate:
    """The certificate of a run that stopped early, with what it really saw."""

    def seen(item: Property) -> Property:
        if item.name != "samples_seen":
            return item
        change = _ratio(samples_seen, item.baseline)
        return dataclasses.replace(
            item, value=samples_seen, equal=False, change=change, effect="the run stopped before its plan's end"
        )

    return _certificate(tuple(map(seen, certificate.properties)))


def _certificate(properties: tuple[Property, ...]) -> Certificate:
    level = max((p.allows for p in properties if not p.equal), key=_LEVELS.index, default=_FREE)
    return Certificate(level, properties)


def _compare(row: _Row, setup: Setup, baseline: Setup) -> Property:
    value, reference = row.read(setup), row.read(baseline)
    compared = row.compared or row.read
    if compared(setup) == compared(baseline):
        return Property(row.name, value, reference, True, row.allows, "", "")
    change = row.change(setup, baseline) if row.change else _ratio(value, reference)
    return Property(row.name, value, reference, False, row.allows, change, row.effect)


def _ratio(value: Any, baseline: Any) -> str:
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (value, baseline))
    return f"× {value / baseline:.4g}" if numbers and baseline else ""
