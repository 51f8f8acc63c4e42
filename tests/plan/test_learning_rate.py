"""How the learning rate depends on the batch size."""

from __future__ import annotations

import pytest

from runner.plan import lr_factor, scaling_samples


@pytest.mark.parametrize(
    ("rule", "batch", "factor"),
    [("linear", 256, 8.0), ("linear", 8, 0.25), ("sqrt", 128, 2.0), ("sqrt", 8, 0.5), ("none", 4096, 1.0)],
)
def test_rules_by_hand(rule: str, batch: int, factor: float) -> None:
    """Each rule gives the published factor, above and below the reference batch."""
    assert lr_factor(rule, batch, 32) == pytest.approx(factor, rel=1e-15)


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
