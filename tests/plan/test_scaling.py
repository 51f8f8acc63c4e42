"""Scaling rules, against an independent reading of each published formula."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from runner.config.choices import OptimizerName, ScalingRule, ScalingWeightDecay
from runner.config.schema import Optimizer, Scaling
from runner.errors import UserError
from runner.plan import scaling_samples
from runner.plan.scaling import rule_for, scaled
from tests.configured import configured, prepared

RATIOS = [Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4), Fraction(8)]
ADAMW = Optimizer(OptimizerName.adamw, lr=1e-3, weight_decay=0.01, betas=[0.9, 0.999], eps=1e-8)


def at(rule: str, ratio: Fraction, weight_decay: str = "fixed") -> Optimizer:
    scaling = Scaling(ScalingRule[rule], reference_batch=64, weight_decay=ScalingWeightDecay[weight_decay])
    return scaled(ADAMW, scaling, scaling.rule, int(64 * ratio))


@pytest.mark.parametrize("ratio", RATIOS)
def test_each_rule_by_its_formula(ratio: Fraction) -> None:
    """The learning rates of all rules; the moving averages by what the papers keep equal."""
    kappa = float(ratio)
    rates = {
        rule: at(rule, ratio).lr / 1e-3 for rule in ("linear", "sqrt", "sde", "half_life", "half_life_sqrt", "none")
    }
    root = kappa**0.5
    expected = {"linear": kappa, "sqrt": root, "sde": root, "half_life": 1, "half_life_sqrt": root, "none": 1}
    assert rates == pytest.approx(expected, rel=1e-14)

    sde = at("sde", ratio)
    # Malladi et al., definition 4.3: the time constant 1 / (1 - β) in samples, and ε in units of the gradient's noise.
    assert [64 * kappa / (1 - beta) for beta in sde.betas or ()] == pytest.approx([640, 64000], rel=1e-12)
    assert sde.eps == pytest.approx(1e-8 * (64 / (64 * kappa)) ** 0.5, rel=1e-14)

    for rule in ("half_life", "half_life_sqrt"):
        first, second = at(rule, ratio).betas or ()
        half_life = 64 * kappa * math.log(0.5) / math.log(second)  # Marek et al., section 3: in samples
        assert (first, half_life) == (0.9, pytest.approx(64 * math.log(0.5) / math.log(0.999), rel=1e-10))

    for rule in rates:
        kept = at(rule, ratio, "per_sample")
        per_sample = kept.lr * kept.weight_decay / (64 * kappa)  # Bergsma et al.: 1 / τ, with a fixed amount of data
        assert per_sample == pytest.approx(1e-3 * 0.01 / 64, rel=1e-14)
        assert at(rule, ratio).weight_decay == 0.01


def test_a_rule_without_a_formula_is_an_error() -> None:
    """Such as `auto`, which stands for another one."""
    with pytest.raises(KeyError):
        at("auto", Fraction(2))


def test_largest_batch_of_the_sde_rule() -> None:
    """β₁ = 0.9 allows κ below 10: the message names the largest batch, and that one works."""
    with pytest.raises(UserError, match="at most 639"):
        at("sde", Fraction(10))
    assert min(at("sde", Fraction(639, 64)).betas or ()) > 0


@pytest.mark.parametrize(
    ("overrides", "local_steps", "ratio", "rule"),
    [
        ("optimizer=adamw", False, 9.99, "sde"),
        ("optimizer=adamw", False, 10, "sqrt"),
        ("optimizer=adamw optimizer.betas=[0.9,0.5]", False, 2, "sqrt"),
        ("optimizer=adam", False, 0.25, "sde"),
        ("optimizer=adafactor", False, 8, "sqrt"),
        ("optimizer=muon", False, 8, "sqrt"),
        ("optimizer=sgd", False, 8, "linear"),
        ("optimizer=adamw", True, 8, "sqrt"),
    ],
)
def test_what_auto_stands_for(overrides: str, local_steps: bool, ratio: float, rule: str) -> None:
    optimizer = configured(overrides).optimizer
    assert rule_for(Scaling(ScalingRule.auto, reference_batch=8), optimizer, local_steps, ratio).name == rule
    assert rule_for(Scaling(ScalingRule.none, reference_batch=8), optimizer, local_steps, ratio).name == "none"


@pytest.mark.parametrize("setup", ["batch.global_batch=192", "device=cpu4 batch=per_device batch.micro_batch=48"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_accumulation_and_workers_scale_alike(setup: str, accumulation: int) -> None:
    """Whatever makes the batch four times the reference has the same settings, in plan, certificate and params."""
    size = "batch.micro_batch=24" if accumulation == 2 and "cpu4" in setup else ""
    experiment = prepared(f"{setup} {size} accumulation.steps={accumulation}")
    plan = experiment.plan
    assert plan.global_batch == 192
    assert (plan.lr, plan.betas, plan.eps) == (2e-3, pytest.approx([0.6, 0.996]), pytest.approx(5e-9))
    assert plan.scaled(experiment.config.optimizer).betas == plan.betas
    certified = {item.name: item for item in experiment.certificate.properties}["scaled_settings"]
    assert certified.value == "betas 0.6, 0.996; eps 5e-09"
    # The baseline of a fixed global batch has it too; that of a fixed batch per device has a smaller one.
    assert certified.equal is (setup == "batch.global_batch=192")


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ("batch.global_batch=48", ""),
        ("batch.global_batch=24 scaling=linear", ""),
        ("batch.global_batch=240", ""),
        ("batch.global_batch=240 scaling=linear", "scaling=linear"),
        ("batch.global_batch=240 scaling=half_life", "scaling=half_life"),
        ("batch.global_batch=240 optimizer=sgd", ""),
        ("batch.global_batch=480", "scaling=sqrt"),
        ("batch.global_batch=240 epochs=4", "16 optimizer steps"),
    ],
)
def test_a_rule_warns_where_it_was_not_measured(overrides: str, warned: str) -> None:
    """Or where few optimizer steps are left."""
    notes = [note for note in prepared(f"epochs=30 {overrides}").notes if "runner.scale" in note]
    assert (warned in notes[0]) if warned else not notes


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ("optimizer=sgd scaling=sde", "scaling"),
        ("optimizer=rmsprop scaling=half_life", "scaling"),
        ("optimizer=muon scaling=half_life", "scaling"),
        ("optimizer=sgd scaling.weight_decay=per_sample", "scaling.weight_decay"),
    ],
)
def test_rules_that_do_not_apply(overrides: str, setting: str) -> None:
    with pytest.raises(UserError, match=f"^{setting}="):
        configured(overrides)


def test_averages_of_the_global_batch_are_for_synchronous_steps() -> None:
    """Several workers that step alone get the root, under every policy; one worker is synchronous."""
    for local in ("sync.k=4", "sync=outer sync.outer_lr=0.7 sync.k=1"):
        with pytest.raises(UserError, match=r"^scaling="):
            prepared(f"device=cpu4 {local} scaling=sde")
        assert prepared(f"device=cpu4 {local} batch.global_batch=96").plan.auto_rule == "sqrt"
    plan = prepared("sync.k=4 batch.global_batch=96").plan
    assert (plan.auto_rule, plan.betas) == ("sde", pytest.approx([0.8, 0.998]))


@pytest.mark.parametrize(
    ("scaling_batch", "global_batch", "samples", "expected"),
    [
        ("global_batch", 96, 1000, 96),
        ("replica_batch", 96, 1000, 24),
        ("global_batch", 4096, 1000, 1000),  # a step sees at most an epoch
        ("replica_batch", 4096, 10, 3),
    ],
)
def test_samples_in_the_rule(scaling_batch: str, global_batch: int, samples: int, expected: int) -> None:
    assert scaling_samples(scaling_batch, global_batch, samples, 4) == expected
