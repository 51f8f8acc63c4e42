"""Steps, tails and the samples seen before each step."""

from __future__ import annotations

import pytest

from runner.plan import epoch_steps, total_steps
from runner.plan.steps import Step, epoch_length, samples_before


@pytest.mark.parametrize(
    ("samples", "global_batch", "drop_last", "length"),
    [
        (100, 10, False, 10),
        (100, 10, True, 10),
        (101, 10, False, 11),
        (101, 10, True, 10),
        (109, 10, False, 11),
        (109, 10, True, 10),
        (9, 10, False, 1),
        (9, 10, True, 0),
        (8000, 48, False, 167),
        (8000, 48, True, 166),
    ],
)
def test_epoch_length(samples: int, global_batch: int, drop_last: bool, length: int) -> None:
    """The short global batch at an epoch's end is a step of its own, unless it is dropped."""
    assert epoch_length(samples, global_batch, drop_last) == length
    assert len(list(epoch_steps(samples, global_batch, drop_last))) == length


def test_steps_of_an_epoch_with_a_tail() -> None:
    """Steps lie end to end, and the tail is as short as the samples that are left."""
    steps = list(epoch_steps(10, 4, drop_last=False))
    assert steps == [Step(0, 0, 4), Step(1, 4, 8), Step(2, 8, 10)]
    assert [step.samples for step in steps] == [4, 4, 2]


def test_steps_of_an_epoch_without_its_tail() -> None:
    """With drop_last the tail's samples belong to no step."""
    assert list(epoch_steps(10, 4, drop_last=True)) == [Step(0, 0, 4), Step(1, 4, 8)]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "drop_last", "steps"),
    [
        (1, None, False, 3),
        (3, None, False, 9),
        (3, None, True, 6),
        (3, 4, False, 4),
        (3, 9, False, 9),
        (3, 10, False, 9),  # no more than there is
        (3, 1, True, 1),
        (3, 7, True, 6),
    ],
)
def test_steps_of_a_run(epochs: int, max_steps: int | None, drop_last: bool, steps: int) -> None:
    """Epochs multiply the steps of one, and max_steps can only shorten the run."""
    assert total_steps(10, 4, drop_last, epochs, max_steps) == steps


@pytest.mark.parametrize(
    ("drop_last", "seen"),
    [(False, [0, 4, 8, 10, 14, 18, 20, 24]), (True, [0, 4, 8, 12, 16, 20, 24, 28])],
)
def test_samples_before_each_step_over_epochs(drop_last: bool, seen: list[int]) -> None:
    """A tail counts with its own samples, a dropped one not at all, and the next epoch goes on from there."""
    assert [samples_before(step, 10, 4, drop_last) for step in range(8)] == seen


@pytest.mark.parametrize(
    ("samples", "global_batch", "drop_last"),
    [(5, 9, False), *((s, b, d) for s, b in ((10, 4), (12, 4), (7, 7), (23, 3), (64, 48)) for d in (False, True))],
)
def test_samples_before_is_the_running_sum_of_steps(samples: int, global_batch: int, drop_last: bool) -> None:
    """The closed form agrees with adding up the samples of every step, over three epochs."""
    sizes = [step.samples for _ in range(3) for step in epoch_steps(samples, global_batch, drop_last)]
    for step in range(len(sizes) + 1):
        assert samples_before(step, samples, global_batch, drop_last) == sum(sizes[:step])
