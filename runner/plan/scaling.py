"""How the settings of an optimizer follow the batch size: scaling rules, each with its source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from runner.config.choices import SCALED_BY_SDE, OptimizerName, ScalingRule, ScalingWeightDecay
from runner.errors import require

if TYPE_CHECKING:  # imports OmegaConf
    from runner.config.schema import Optimizer, Scaling


def scaling_samples(scaling_batch: str, global_batch: int, samples_per_epoch: int, world_size: int) -> int:
    """The batch size in the scaling rule: samples per optimizer step of all workers, or of one (`replica_batch`).

    A step never sees more samples than an epoch has, even if the global batch is larger.
    """
    observed = min(global_batch, samples_per_epoch)
    return observed if scaling_batch == "global_batch" else -(-observed // world_size)


def rule_for(scaling: Scaling, optimizer: Optimizer, local_steps: bool, ratio: float) -> ScalingRule:
    """The rule itself, or what `auto` stands for; docs/scaling.md has the experiment.

    `local_steps`: whether workers step alone between synchronisations, each with a batch for which moving averages of
    the global batch were not derived; the learning rate is the same. `ratio`: κ.
    """
    if scaling.rule is not ScalingRule.auto:
        return scaling.rule
    if optimizer.name is OptimizerName.sgd:
        return ScalingRule.linear
    if optimizer.name not in SCALED_BY_SDE or local_steps:
        return ScalingRule.sqrt
    assert optimizer.betas is not None
    return ScalingRule.sde if ratio < largest_sde_ratio(optimizer.betas) else ScalingRule.sqrt


def scaled(optimizer: Optimizer, scaling: Scaling, rule: ScalingRule, batch: int) -> Optimizer:
    """The settings for steps of `batch` samples, given those tuned for steps of `scaling.reference_batch`.

    With κ = batch ÷ reference batch, learning rate η, moving averages β and weight decay λ:

    - `linear`: ηκ. Goyal et al. 2017, "Accurate, Large Minibatch SGD", for SGD.
    - `sqrt`: η√κ. Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks".
    - `sde`: η√κ, 1 − β → κ (1 − β) for both β, ε ÷ √κ. Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive
      Gradient Algorithms", for Adam. A β has to stay above 0, so κ below 1 ÷ (1 − β).
    - `half_life`: β₂ → β₂^κ, so that the second moment forgets half of a gradient after the same number of samples.
      Marek et al. 2025, "Small Batch Size Training for Language Models". `half_life_sqrt`: the same with η√κ.
    - `none`: nothing.

    `scaling.weight_decay=per_sample` keeps what decoupled weight decay takes away per sample, ηλ ÷ batch: λκη ÷ η′.
    Wang & Aitchison 2024, "How to set AdamW's weight decay as you scale model and dataset size"; Bergsma et al. 2025,
    "Power Lines". The common advice to multiply the rate by the number of processes is the linear rule for a batch held
    equal per device. Raises UserError for a batch that is too large for `sde`.
    """
    ratio = batch / scaling.reference_batch
    if ratio == 1:
        return optimizer
    changes: dict[str, float | list[float]] = {"lr": optimizer.lr * lr_factor(rule, ratio)}
    if rule is ScalingRule.sde:
        assert optimizer.betas is not None
        assert optimizer.eps is not None
        _require_positive_betas(optimizer.betas, scaling, batch)
        changes["betas"] = [_sde_beta(beta, scaling, batch) for beta in optimizer.betas]
        changes["eps"] = optimizer.eps / math.sqrt(ratio)
    if rule in (ScalingRule.half_life, ScalingRule.half_life_sqrt):
        assert optimizer.betas is not None
        changes["betas"] = [optimizer.betas[0], optimizer.betas[1] ** ratio]
    if scaling.weight_decay is ScalingWeightDecay.per_sample:
        changes["weight_decay"] = optimizer.weight_decay * ratio / lr_factor(rule, ratio)
    return dataclasses.replace(optimizer, **changes)  # type: ignore[arg-type] # each has its own type


#: The factor of each rule on the base learning rate as a function of κ, and how that is written; `auto` has none.
_LR_FACTORS: dict[ScalingRule, tuple[Callable[[float], float], str]] = {
    ScalingRule.none: (lambda ratio: 1.0, "1, for {}"),
    ScalingRule.linear: (lambda ratio: ratio, "{}"),
    ScalingRule.sqrt: (math.sqrt, "√({})"),
    ScalingRule.sde: (math.sqrt, "√({})"),
    ScalingRule.half_life: (lambda ratio: 1.0, "1, for {}"),
    ScalingRule.half_life_sqrt: (math.sqrt, "√({})"),
}


def lr_factor(rule: ScalingRule, ratio: float) -> float:
    """The factor on the base learning rate. `ratio`: κ."""
    return _LR_FACTORS[rule][0](ratio)


def lr_formula(rule: ScalingRule, ratio: str) -> str:
    """The same in words. `ratio`: κ, such as `128 / reference 32`."""
    return _LR_FACTORS[rule][1].format(ratio)


def settings_text(value: float | Sequence[float]) -> str:
    """One number, or several such as betas."""
    numbers = value if isinstance(value, Sequence) else [value]
    return ", ".join(f"{number:.4g}" for number in numbers)


def _sde_beta(beta: float, scaling: Scaling, batch: int) -> float:
    return 1 - batch / scaling.reference_batch * (1 - beta)


def largest_sde_ratio(betas: Sequence[float]) -> float:
    """The κ at and above which the rule `sde` gives a β that is not above 0."""
    return round(1 / (1 - min(betas)), 9)


def _require_positive_betas(betas: list[float], scaling: Scaling, batch: int) -> None:
    smallest = min(betas)
    most = math.ceil(scaling.reference_batch * largest_sde_ratio(betas)) - 1
    rule = (
        f"a batch of {batch} is {batch / scaling.reference_batch:.4g} times scaling.reference_batch="
        f"{scaling.reference_batch}, and beta {smallest:g} would become {_sde_beta(smallest, scaling, batch):.3g}: "
        f"use a global batch of at most {most}, or scaling=sqrt"
    )
    require(batch <= most, "scaling", ScalingRule.sde, rule)
