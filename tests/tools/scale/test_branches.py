"""What follows from the losses of branches."""

from __future__ import annotations

import math

import pytest

from runner.tools.scale.branches import SAME, UNDECIDED, WORSE, Branch, find, longer, planned

RULES = {16: ("linear", "sde"), 32: ("linear", "sde")}


def values(losses: dict[tuple[int, str, float], list[float]]) -> dict[Branch, float]:
    """By batch, rule and windows, the loss for each seed. The reference batch of 8 ends at 1.0, 1.1 and 0.9."""
    found = {(8, "none", 1.0): [1.0, 1.1, 0.9], **losses}
    return {
        Branch(batch, rule, seed, windows): loss
        for (batch, rule, windows), of_seeds in found.items()
        for seed, loss in enumerate(of_seeds)
    }


def test_every_seed_has_all_batches_before_the_next() -> None:
    branches = planned(8, (16, 32), RULES, 2)
    assert len(branches) == 10
    assert branches[:3] == [Branch(8, "none", 0), Branch(16, "linear", 0), Branch(16, "sde", 0)]


def test_the_largest_batch_and_its_rule() -> None:
    """Paired by seed: losses that differ by a constant have no spread. Half of a progress of 1 may be lost."""
    found = find(
        values(
            {
                (16, "linear", 1.0): [1.05, 1.151, 0.949],
                (16, "sde", 1.0): [1.02, 1.121, 0.919],
                (32, "linear", 1.0): [1.9, 2.01, 1.79],
                (32, "sde", 1.0): [1.8, 1.91, 1.69],
            }
        ),
        *(8, 2.0, 0.5),
    )
    assert (found.progress, found.limit) == (pytest.approx(1.0), pytest.approx(0.5))
    assert [(cell.batch, cell.rule, cell.verdict) for cell in found.cells] == [
        *((16, "linear", SAME), (16, "sde", SAME)),
        *((32, "linear", WORSE), (32, "sde", WORSE)),
    ]
    assert (found.largest, found.rule) == (16, "sde")
    assert found.beyond is not None
    assert (found.beyond.batch, found.beyond.rule) == (32, "sde")
    assert {(one.batch, one.rule, one.windows) for one in longer(found, 3)} == {(32, "sde", 1.5), (32, "sde", 2.0)}
    assert found.more_samples is None  # not measured yet


@pytest.mark.parametrize(
    ("of_longer", "more"),
    [
        ({1.5: 0.3, 2.0: -0.1}, 1.875),  # losses above the reference batch's: +0.6 after one window, +0.3, −0.1
        ({1.5: -0.6, 2.0: -0.7}, 1.25),
        ({1.5: 0.4, 2.0: 0.2}, math.inf),
    ],
)
def test_how_many_more_samples_a_batch_needs(of_longer: dict[float, float], more: float) -> None:
    """Between the windows that were tried, on a line."""
    base = [1.0, 1.1, 0.9]
    losses = {(16, "sde", windows): [one + above for one in base] for windows, above in of_longer.items()}
    found = find(values({(16, "sde", 1.0): [1.6, 1.71, 1.49], **losses}), 8, 2.0, 0.5)
    assert found.more_samples == pytest.approx(more)
    assert (found.largest, found.rule) == (8, None)


def test_undecided_and_diverged() -> None:
    found = find(values({(16, "linear", 1.0): [math.inf, 1.0, 1.0], (16, "sde", 1.0): [1.0, 1.9, 0.7]}), *(8, 2.0, 0.5))
    assert {cell.rule: cell.verdict for cell in found.cells} == {"linear": WORSE, "sde": UNDECIDED}
    assert {cell.rule: cell.diverged for cell in found.cells} == {"linear": 1, "sde": 0}
    assert (found.largest, found.rule) == (8, None)


def test_a_rule_that_is_the_same_counts_although_another_may_be_better() -> None:
    losses = {(16, "linear", 1.0): [1.02, 1.121, 0.919], (16, "sde", 1.0): [0.5, 1.3, 0.9]}
    found = find(values(losses), 8, 2.0, 0.1)
    assert (found.largest, found.rule, found.beyond) == (16, "linear", None)


def test_a_reference_batch_that_may_have_learnt_nothing() -> None:
    assert find(values({}), 8, 2.0, 0.1).learns
    assert not find(values({}), 8, 1.05, 0.1).learns


def test_a_longer_branch_that_diverges_says_nothing() -> None:
    losses = {(16, "sde", 1.0): [1.6, 1.71, 1.49], (16, "sde", 1.5): [math.inf] * 3, (16, "sde", 2.0): [0.8, 0.9, 0.7]}
    assert find(values(losses), 8, 2.0, 0.5).more_samples == pytest.approx(1.75)


def test_a_lower_loss_is_the_same() -> None:
    found = find(values({(16, "sde", 1.0): [0.5, 0.61, 0.39]}), 8, 2.0, 0.1)
    assert (found.largest, found.rule, found.beyond) == (16, "sde", None)
