"""Steps, tails and the samples seen before each step."""

from __future__ import annotations

import pytest

from runner.plan.steps import Step, epoch_length, samples_before, step_of_epoch


def epoch_steps(samples: int, global_batch: int, drop_last: bool) -> list[Step]:
    return [step_of_epoch(t, samples, global_batch) for t in range(epoch_length(samples, global_batch, drop_last))]


def test_steps_of_an_epoch() -> None:
    """The tail is a shorter step, or belongs to no step under drop_last."""
    steps = epoch_steps(10, 4, drop_last=False)
    assert steps == [Step(0, 0, 4), Step(1, 4, 8), Step(2, 8, 10)]
    assert [step.samples for step in steps] == [4, 4, 2]
    assert epoch_steps(10, 4, drop_last=True) == steps[:2]


@pytest.mark.parametrize(
    ("samples", "global_batch", "drop_last"),
    [(5, 9, False), *((s, b, d) for s, b in ((10, 4), (12, 4), (7, 7), (23, 3)) for d in (False, True))],
)
def test_samples_before_is_the_running_sum_of_steps(samples: int, global_batch: int, drop_last: bool) -> None:
    sizes = [step.samples for _ in range(3) for step in epoch_steps(samples, global_batch, drop_last)]
    for step in range(len(sizes) + 1):
        assert samples_before(step, samples, global_batch, drop_last) == sum(sizes[:step])
