"""What communication costs with another k, and which k pays, on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from runner.cost.step import STANDS_OUT, StepCost, ring_bytes


def test_the_share_of_communication() -> None:
    """0.61 s of communication to 0.39 s of everything else: at k = 8 it is 0.61 / 8 to 0.39."""
    cost = StepCost(0.39, 0.61)
    assert cost.seconds(8) == pytest.approx(0.46625)
    assert cost.communication_share(1) == pytest.approx(0.61)
    assert cost.communication_share(8) == pytest.approx(0.07625 / 0.46625)


@pytest.mark.parametrize("each", [0.01, 0.26, 3.0, 50.0])
@pytest.mark.parametrize("largest", [1, 2, 7, 1000])
def test_the_smallest_useful_k_against_brute_force(each: float, largest: int) -> None:
    good = [k for k in (2**n for n in range(20)) if k <= largest and each / k < STANDS_OUT * (1 + each / k)]
    assert StepCost(1.0, each).smallest_useful_k(largest) == (good[0] if good else None)


def test_bytes_of_a_ring() -> None:
    assert [ring_bytes(100, workers) for workers in (1, 2, 4)] == [0, 100, 150]
