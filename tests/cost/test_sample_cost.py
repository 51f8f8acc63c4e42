"""How many more samples a batch needs, between and beyond what a branch test has found."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from runner.cost.quantity import Quantity
from runner.cost.sample_cost import Beyond, SampleCost, read_sample_cost
from runner.errors import UserError

#: No larger batch was tried.
UNKNOWN = SampleCost("cola", "MiniLM", "0123", 16, 64, "sde", None, None, None)


def cost(more: float, low: float, high: float) -> SampleCost:
    return dataclasses.replace(UNKNOWN, beyond=Beyond(128, "sqrt"), more_samples=more, more_samples_range=(low, high))


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
    assert UNKNOWN.at(128) is None
    assert dataclasses.replace(UNKNOWN, beyond=Beyond(128, "sqrt")).at(128) is None
    assert cost(1.0, 1.0, 1.5).at(128) == Quantity(1.0, 1.0, 1.5)
    assert cost(1.0, 1.0, 1.5).at(256) is None  # undecided at 128
    beyond = cost(math.inf, 1.9, math.inf).at(128)
    assert (beyond.value, beyond.low) == (math.inf, pytest.approx(1.9))  # type: ignore[union-attr]


RESULT = {
    "recipe": "cola",
    "model": "MiniLM",
    "data": "0123",
    "reference": 16,
    "largest": 64,
    "rule": "sde",
    "beyond": {"batch": 128, "rule": "sqrt"},
    "more_samples": "Infinity",
    "more_samples_range": [1.5, "Infinity"],
}


def test_reading_a_result(tmp_path: Path) -> None:
    """The folder, or its file."""
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    for path in (tmp_path, tmp_path / "result.json"):
        found = read_sample_cost(str(path))
        assert found == cost(math.inf, 1.5, math.inf)
    alone = {**RESULT, "largest": 16, "rule": None}
    (tmp_path / "result.json").write_text(json.dumps(alone))
    assert read_sample_cost(str(tmp_path)).best_rule == "sqrt"


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        " " * 2**21,
        "[" * 100_000,
        json.dumps({**RESULT, "largest": "Infinity"}),
        json.dumps({**RESULT, "largest": 128}),
        json.dumps({**RESULT, "more_samples": "NaN"}),
        json.dumps({**RESULT, "more_samples": 1.2}),
    ],
)
def test_what_is_no_result(content: str, tmp_path: Path) -> None:
    """Somebody else's file, in one sentence."""
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(UserError, match=r"^plan\.scale="):
        read_sample_cost(str(tmp_path))
    with pytest.raises(UserError, match=r"^plan\.scale="):
        read_sample_cost(str(tmp_path / "absent.json"))
