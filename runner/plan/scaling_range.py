"""Which scaling rule a plan uses, and whether it was seen to keep the metric for such a batch."""

from __future__ import annotations

from runner.config.choices import OptimizerName, ScalingRule
from runner.config.schema import Config
from runner.plan.plan import Plan
from runner.plan.scaling import scaling_samples

#: The largest κ for which a rule kept the reference batch's metric under AdamW (benchmarks/results/scaling-rules.md).
_KEPT_UP_TO = {ScalingRule.sqrt: 4.0, ScalingRule.sde: 8.0}
#: Fewer are too few: `sde` kept the metric with 153 of 1,203; with 25 of 193 and 78 of 1,203 no rule did.
_FEWEST_STEPS = 100


def rule_of(config: Config, plan: Plan) -> tuple[ScalingRule, int]:
    """A plan's rule, and the batch in it."""
    scaling = config.scaling
    batch = scaling_samples(scaling.batch.name, plan.global_batch, plan.samples_per_epoch, plan.world_size)
    return (ScalingRule[plan.auto_rule] if plan.auto_rule is not None else scaling.rule), batch


def scaling_warning(config: Config, plan: Plan) -> str | None:
    """A sentence where nobody has seen the rule keep the metric; None where it was measured, or nothing is scaled."""
    rule, batch = rule_of(config, plan)
    ratio = batch / config.scaling.reference_batch
    chosen = rule is ScalingRule.none  # a learning rate for this batch
    if ratio <= 1 or chosen or config.optimizer.name is OptimizerName.sgd:
        return None
    asked = "measure it with python -m runner.scale"
    times = f"{ratio:.3g} times the reference batch ({config.scaling.reference_batch})"
    if ratio > _KEPT_UP_TO.get(rule, 1.0):
        return f"the batch is {times}, and scaling={rule.name} has not been shown to keep the metric there: {asked}"
    if plan.optimizer_steps < _FEWEST_STEPS and config.max_steps is None:  # with it a run is a short trial
        steps = f"the batch is {times}, which leaves {plan.optimizer_steps} optimizer steps"
        return f"{steps}: no rule has been shown to keep the metric with so few; {asked}"
    return None
