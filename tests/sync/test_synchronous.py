"""k = 1 through torch's DDP: a parameter without a gradient is an error; rows of embeddings; gradients of low rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from runner.backends import Backend
from tests.pool import WorkerPool
from tests.replicas import make_loop, refusal, train
from tests.sync.reference import largest_difference

HALF_USED = ["recipe._target_=tests.odd_recipe.HalfUsed", "trusted_packages=[recipes,tests]", "max_steps=3"]


def test_a_parameter_without_a_gradient_is_named(pool: WorkerPool) -> None:
    """DDP would leave other gradients unaveraged."""
    for message in pool.run(2, refusal, HALF_USED):
        assert "unread.weight" in message
        assert "sync.k" in message


def test_a_gradient_of_an_earlier_micro_batch_is_not_enough(pool: WorkerPool) -> None:
    """DDP averages in the last backward pass of a step."""
    sometimes = ["recipe._target_=tests.odd_recipe.SometimesUsed", *HALF_USED[1:]]
    for message in pool.run(2, refusal, [*sometimes, "accumulation.steps=2"]):
        assert "unread.weight" in message
    assert set(pool.run(2, refusal, [*sometimes, "accumulation.steps=3", "max_steps=1"])) == {""}


def test_other_policies_leave_such_a_parameter_as_it_is(pool: WorkerPool) -> None:
    """A single worker, and workers that average weights."""
    (alone,) = pool.run(1, train, HALF_USED)
    two, _ = pool.run(2, train, [*HALF_USED, "sync.k=2"])
    for name in ("unread.weight", "unread.bias"):
        assert torch.equal(alone["weights"][name], two["weights"][name])


def train_with_rows(backend: Backend, overrides: list[str], least_bytes: int) -> dict[str, Any]:
    """`least_bytes`: of embeddings of which rows are sent."""
    with mock.patch("runner.sync.synchronous._SENT_AS_ROWS_BYTES", least_bytes):
        return train(backend, overrides)


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        (["accumulation.steps=3"], 2),
        (["sync.k=2", "sync.schedule=post_local"], 2),
        (["equivalence=exact", "recipe.model.dropout=0.1"], 2),
        (["recipe._target_=tests.odd_recipe.Penalised", "trusted_packages=[recipes,tests]"], 2),
        ([], 8),
    ],
    ids=["accumulation", "then local", "exact", "used as a whole", "without samples"],
)
def test_rows_of_embeddings_give_the_same_training(pool: WorkerPool, overrides: list[str], workers: int) -> None:
    """Also for workers that have no samples in the last step of an epoch, and after DDP has gone."""
    rows, other, *_ = pool.run(workers, train_with_rows, overrides, 0)
    whole, *_ = pool.run(workers, train_with_rows, overrides, 2**40)
    assert largest_difference(rows["weights"], other["weights"]) == 0
    assert largest_difference(rows["weights"], whole["weights"]) < (1e-15 if workers == 2 else 1e-12)
    assert rows["stats"].bytes != whole["stats"].bytes


def test_a_model_of_embeddings_alone_is_averaged(pool: WorkerPool) -> None:
    """DDP would refuse to have none of its weights."""
    alone = ["recipe._target_=tests.odd_recipe.OnlyAnEmbedding", "trusted_packages=[recipes,tests]"]
    rows, other = pool.run(2, train_with_rows, alone, 0)
    assert largest_difference(rows["weights"], other["weights"]) == 0


def test_seconds_of_a_run_that_is_continued(pool: WorkerPool) -> None:
    """They stay those of the steps in which they were measured."""
    for before, loaded, after in pool.run(2, seconds_of_a_continued_run, ["sync.k=1"]):
        assert loaded == before
        assert all(0 <= now - earlier < 1 for now, earlier in zip(after, loaded, strict=True))


def seconds_of_a_continued_run(backend: Backend, overrides: list[str]) -> list[tuple[float, float]]:
    """Of communication and of stalls: saved, loaded by a new run, and after one more step."""
    first = make_loop(backend, overrides)
    first.train(until=3)
    state = first.state_dict()
    state["policy"] = {**state["policy"], "steps": 3, "ddp_seconds": (7.0, 2.0)}
    first.policy.close()
    found = [(7.0, 2.0)]
    second = make_loop(backend, overrides)
    second.load_state_dict(state)
    for until in (3, 4):
        second.train(until=until)
        stats = second.policy.stats()
        assert stats.seconds is not None
        found.append((stats.seconds, stats.backward_stall_seconds))
    second.policy.close()
    return found
