"""How many more samples a batch needs, between and beyond what a branch test has found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from runner.errors import UserError
from runner.plan.prediction import Quantity
from runner.plan.sample_cost import SampleCost, read_sample_cost


def cost(more: float, low: float, high: float) -> SampleCost:
    return SampleCost(64, 128, Quantity(more, low, high))


def test_up_to_the_largest_batch_nothing_more_is_needed() -> None:
    assert cost(1.5, 1.2, 1.8).at(16) == cost(1.5, 1.2, 1.8).at(64) == Quantity(1.0, 1.0, 1.0)


def test_the_critical_batch_by_hand() -> None:
    """1.25 times at 128: (c + 128) / (c + 64) = 1.25 for c = 192, so 448 / 256 = 1.75 times at 256."""
    found = cost(1.25, 1.0, 2.0).at(128)
    assert (found.value, found.low, found.high) == pytest.approx((1.25, 1.0, 2.0))  # type: ignore[union-attr]
    found = cost(1.25, 1.0, 2.0).at(256)
    assert (found.value, found.low) == pytest.approx((1.75, 1.0))  # type: ignore[union-attr]
    assert found.high == pytest.approx(4.0)  # type: ignore[union-attr] # of twice the batch half is wasted


def test_what_is_not_known() -> None:
    assert SampleCost(64, None, None).at(128) is None
    assert SampleCost(64, 128, None).at(128) is None
    beyond = SampleCost(64, 128, Quantity(math.inf, 1.9, math.inf)).at(128)
    assert (beyond.value, beyond.low) == (math.inf, pytest.approx(1.9))  # type: ignore[union-attr]


def test_reading_a_result(tmp_path: Path) -> None:
    """The folder or its file; anything else is refused in one sentence."""
    content = {
        "largest": 64,
        "beyond": {"batch": 128},
        "more_samples": "Infinity",
        "more_samples_range": [1.5, "Infinity"],
    }
    (tmp_path / "result.json").write_text(json.dumps(content))
    for path in (tmp_path, tmp_path / "result.json"):
        assert read_sample_cost(str(path)) == SampleCost(64, 128, Quantity(math.inf, 1.5, math.inf))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "large.json").write_text(" " * 2**21)
    for name in ("list.json", "large.json", "absent.json"):
        with pytest.raises(UserError, match=r"^plan\.scale="):
            read_sample_cost(str(tmp_path / name))
