"""Which setups of a race go on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runner.tools.sweep.rungs import RUNGS, going_on, last_rank, ranks, share_trained

SETUPS = 16


def winner_is_stopped(values: np.ndarray) -> bool:
    """`values`: [setups, rungs and the end]."""
    racing = np.arange(len(values))
    for rung in range(len(RUNGS)):
        racing = racing[going_on(values[racing, : rung + 1])]
    return values[:, -1].argmax() not in racing


def test_ranks_that_do_not_move_leave_a_few() -> None:
    """At the first rung nothing is known about movement, and nothing stops."""
    still = np.arange(SETUPS, dtype=float)[:, None] + np.arange(len(RUNGS))
    assert last_rank(still[:, :1]) == math.inf
    assert all(1 <= last_rank(still[:, : rung + 1]) < 2 for rung in range(1, len(RUNGS)))


def test_rungs_without_training_between_them_stop_nothing() -> None:
    """Such as those before the first synchronisation: the evaluations are the same ones."""
    assert last_rank(np.arange(SETUPS, dtype=float)[:, None].repeat(2, axis=1)) == math.inf


def test_setups_that_have_not_begun_to_learn_go_on_until_the_last_rung() -> None:
    """Their metric is that of a constant answer; those that are worse than others, and better than that, stop."""
    learnt = np.arange(SETUPS, dtype=float)[:, None] + np.arange(len(RUNGS))
    learnt[:4] = 0.0
    assert going_on(learnt[:, :3], 0.0).tolist() == [True] * 4 + [False] * (SETUPS - 6) + [True] * 2
    assert going_on(learnt, 0.0).tolist() == [False] * (SETUPS - 2) + [True] * 2


def test_setups_without_a_difference_go_on() -> None:
    """They share a rank; if each look orders them anew, hardly any rank is too low."""
    assert ranks(np.array([50.0, 50.0, 50.0])).tolist() == [0, 0, 0]
    found = [last_rank(values) for values in np.random.default_rng(0).standard_normal((100, SETUPS, 2))]
    assert np.minimum(found, SETUPS - 1).mean() > 0.8 * (SETUPS - 1)


def test_share_trained() -> None:
    """Ranks that move leave more setups in the race; of two, both train to the end."""
    assert share_trained(2, 0.0) == 1.0
    assert 0.2 < share_trained(16, 0.0) < share_trained(16, 1.0) < 0.5


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_the_winner_is_rarely_stopped(noise: float) -> None:
    """Curves with a spread at the first rung, and steps from doubling to doubling whose variance halves each time."""
    generator = np.random.default_rng(0)
    starts = 3 * generator.standard_normal((400, SETUPS, 1))
    steps = noise * generator.standard_normal((400, SETUPS, len(RUNGS) + 1)) * 0.5 ** (np.arange(len(RUNGS) + 1) / 2)
    curves = starts + steps.cumsum(axis=2)
    assert np.mean([winner_is_stopped(one) for one in curves]) <= 0.06
