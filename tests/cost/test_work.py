"""What workers compute in the steps of a plan, against counting it from the data order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from runner.cost import work as work_module
from runner.cost.work import Shapes, evaluation_work, planned_work
from runner.plan.order import DataOrder
from tests.plan.test_order import lengths, plan

SAMPLES = 53


def shapes(padded: bool = False, bucket: int = 1) -> Shapes:
    return Shapes(lengths(SAMPLES), lambda longest: -(-longest // bucket) * bucket, padded)


def test_a_micro_batch() -> None:
    own = np.array([3, 5, 2])
    assert Shapes(own, lambda longest: longest, padded=False).of([0, 1]) == (8, 50)
    assert Shapes(own, lambda longest: longest, padded=True).of([0, 1]) == (10, 50)
    assert Shapes(own, lambda longest: 8, padded=True).of([0, 1]) == (16, 128)
    assert Shapes(own, lambda longest: longest, padded=False).of([]) == (2, 4), "one filler, the shortest row"


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_of_a_whole_run(padded: bool) -> None:
    """Every sample of each epoch is counted once, on the worker and in the step that trains on it."""
    planned, shape = plan(world_size=2, accumulation_steps=3, epochs=2), shapes(padded, bucket=4)
    work = planned_work(planned, 7, True, shape, None)
    assert work.tokens.shape == (planned.optimizer_steps, 2)
    assert (work.steps, work.share, work.synchronisations) == (planned.optimizer_steps, 1.0, 0)
    orders = [DataOrder(planned, 7, rank, shape.lengths) for rank in (0, 1)]
    step = orders[0].step(1)
    for rank, order in enumerate(orders):
        each = [shape.of(ids) for ids in order.micro_batches(1, step)]
        row = planned.steps_per_epoch + 1
        assert work.micro_batches[row, rank] == len(each)
        assert (work.tokens[row, rank], work.squares[row, rank]) == tuple(map(sum, zip(*each, strict=True)))
    real = 2 * shape.lengths.sum()
    assert work.tokens.sum() == pytest.approx(real / (1 - work.padding_share))
    assert (work.padding_share > 0) is padded
    assert (work.largest >= (work.tokens.max() / 3, work.squares.max() / 3)).all()


def test_local_phases() -> None:
    """Workers wait for each other after the steps that are due, and at the end."""
    planned = plan(world_size=2, epochs=3)
    assert planned.optimizer_steps == 9
    work = planned_work(planned, 0, True, shapes(), [3, 7])
    assert work.phase_starts.tolist() == [0, 4, 8]
    assert work.synchronisations == 2
    assert planned_work(planned, 0, True, shapes(), None).phase_starts.tolist() == list(range(9))


def test_long_runs_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some local phases stand for the others."""
    planned = plan(world_size=2, epochs=41)
    due = range(3, planned.optimizer_steps, 4)
    whole = planned_work(planned, 0, True, shapes(), due)
    monkeypatch.setattr(work_module, "_STEPS", 40)
    some = planned_work(planned, 0, True, shapes(), due)
    assert some.steps == whole.steps == planned.optimizer_steps
    assert 0.2 < some.share < 0.5
    assert (np.diff(some.phase_starts) <= 4).all()
    assert some.tokens.sum() / some.share == pytest.approx(whole.tokens.sum(), rel=0.1)


def test_evaluation() -> None:
    """Sorted by length, dealt, and cut into micro-batches no larger than a worker's share."""
    some = dataclasses.replace(shapes(), lengths=np.array([4, 1, 3, 2]))
    assert evaluation_work(some, 2, 1).tolist() == [[2, 10, 2 * 2**2 + 2 * 4**2]]
    assert evaluation_work(some, 64, 2).tolist() == [[1, 4, 2 * 3**2], [1, 6, 2 * 4**2]]
