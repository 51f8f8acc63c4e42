"""How the learning rate follows the batch."""

from __future__ import annotations

import pytest

from runner.plan import lr_factor


@pytest.mark.parametrize(
    ("rule", "batch", "reference_batch", "factor"),
    [
        ("linear", 32, 32, 1.0),
        ("linear", 256, 32, 8.0),
        ("linear", 8, 32, 0.25),
        ("linear", 48, 32, 1.5),
        ("sqrt", 32, 32, 1.0),
        ("sqrt", 128, 32, 2.0),
        ("sqrt", 288, 32, 3.0),
        ("sqrt", 8, 32, 0.5),
        ("none", 32, 32, 1.0),
        ("none", 4096, 32, 1.0),
        ("none", 1, 32, 1.0),
    ],
)
def test_rules_by_hand(rule: str, batch: int, reference_batch: int, factor: float) -> None:
    """Each rule gives the published factor, above and below the reference batch."""
    assert lr_factor(rule, batch, reference_batch) == pytest.approx(factor, rel=1e-15)


def test_unknown_rule_is_no_silent_one() -> None:
    """A rule that does not exist fails instead of leaving the learning rate as it is."""
    with pytest.raises(KeyError):
        lr_factor("cubic", 64, 32)
