"""How the learning rate follows the batch."""

from __future__ import annotations

import pytest

from runner.plan import lr_factor, scaling_samples


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


@pytest.mark.parametrize(
    ("scaling_batch", "global_batch", "samples", "workers", "expected"),
    [
        ("global_batch", 96, 1000, 4, 96),
        ("replica_batch", 96, 1000, 4, 24),
        ("global_batch", 4096, 1000, 4, 1000),
        ("replica_batch", 4096, 1000, 4, 250),
        ("replica_batch", 4096, 10, 4, 3),
    ],
)
def test_the_rule_goes_by_what_a_step_sees(
    scaling_batch: str, global_batch: int, samples: int, workers: int, expected: int
) -> None:
    """Of an epoch with fewer samples than a global batch a step sees no more than all of them."""
    assert scaling_samples(scaling_batch, global_batch, samples, workers) == expected


def test_unknown_rule_is_no_silent_one() -> None:
    """A rule that does not exist fails instead of leaving the learning rate as it is."""
    with pytest.raises(KeyError):
        lr_factor("cubic", 64, 32)
