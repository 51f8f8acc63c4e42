"""Scaling rules reach training: a replay against the numbers that each published formula gives, typed by hand."""

from __future__ import annotations

import pytest

from runner.cli import run_tool

#: Four times the reference batch. Base: η 0.001, β 0.9 and 0.999, ε 1e-8, λ 0.01.
SMALL = [
    *("precision=fp64", "equivalence=exact", "batch.global_batch=24", "scaling.reference_batch=6", "epochs=2"),
    *("recipe.data.train_samples=72", "recipe.data.eval_samples=10", "recipe.model.hidden_size=16"),
    *("recipe.model.feed_forward_size=16", "recipe.model.layers=1", "recipe.model.heads=2"),
]


@pytest.mark.parametrize(
    ("rule", "by_hand"),
    [
        # 1 − 4 × 0.1, 1 − 4 × 0.001, and 1e-8 ÷ 2
        ("scaling=sde", "optimizer.lr=0.002 optimizer.betas=[0.6,0.996] optimizer.eps=5e-9"),
        # 0.999⁴, and 0.01 × 4 × 0.001 ÷ 0.002
        (
            "scaling=half_life_sqrt scaling.weight_decay=per_sample",
            "optimizer.lr=0.002 optimizer.betas=[0.9,0.996005996001] optimizer.weight_decay=0.02",
        ),
    ],
)
def test_a_rule_and_the_numbers_of_its_formula(rule: str, by_hand: str) -> None:
    """On other workers and micro-batches, too."""
    assert (
        run_tool(
            "verify", [*SMALL, "--a", f"device=cpu2 {rule}", "--b", f"accumulation.steps=3 scaling=none {by_hand}"]
        )
        == 0
    )


def test_another_rule_is_another_training() -> None:
    assert run_tool("verify", [*SMALL, "--a", "scaling=sde", "--b", "scaling=sqrt"]) == 3
