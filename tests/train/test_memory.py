"""A step for which a worker has too little memory: what is repeated, what is undone, and what cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from runner.backends import Backend
from runner.errors import OutOfMemory
from tests.pool import WorkerPool
from tests.replicas import make_loop, outcome

EXACT = ["equivalence=exact", "recipe.model.dropout=0.1", "precision=fp64", "log_every=2"]


def train_with_little_memory(
    backend: Backend, overrides: list[str], limits: list[int], from_step: int = 0, where: str = "forward"
) -> dict[str, Any] | str:
    """Train on workers whose forward or backward passes fail above so many samples of a micro-batch, from a step on.

    `limits`: of each worker. `where`: also `buffer`, a forward pass that has changed a buffer before. What is returned
    is the error of a worker that cannot go on alone.
    """
    loop = make_loop(backend, overrides)
    loss, buffer, limit = loop.replica.recipe.loss, torch.zeros(1), limits[backend.rank]
    loop.retry._buffers.append(buffer)

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def limited(model: Any, batch: Any) -> Any:
        result = loss(model, batch)  # which draws its random numbers
        if loop.model.training and loop.optimizer_step >= from_step and len(batch["input_ids"]) > limit:
            if where == "backward":
                result[0].register_hook(no_memory)
            else:
                if where == "buffer":
                    buffer.add_(1)
                no_memory()
        return result

    object.__setattr__(loop.replica.recipe, "loss", limited)  # a frozen dataclass
    try:
        loop.train()
    except OutOfMemory as error:
        return f"{error} ({error.accumulation_steps})"
    loop.finish()
    result = {
        **outcome(loop),
        "tokens": dataclasses.astuple(loop.tokens)[:2],
        "smaller": [dataclasses.astuple(one) for one in loop.retry.smaller_micro_batches],
        "accumulation_steps": loop.order.accumulation_steps,
    }
    loop.policy.close()
    return result


ENOUGH = 1000


@pytest.mark.parametrize("settings", [["sync.k=1"], ["sync.k=4"], ["sync.k=4", "sync.overlap=true"]], ids=" ".join)
def test_workers_agree_on_smaller_micro_batches(pool: WorkerPool, settings: list[str]) -> None:
    """One of them has too little memory from the fourth step on; the next losses that are reduced tell the others."""
    expected = pool.run(2, train_with_little_memory, [*EXACT, *settings], [ENOUGH, ENOUGH])
    found = pool.run(2, train_with_little_memory, [*EXACT, *settings], [ENOUGH, 4], 3)
    for own, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(own["weights"], reference["weights"], rtol=0, atol=1e-12)
        assert (own["ledger"], own["tokens"]) == (reference["ledger"], reference["tokens"])
        assert (own["accumulation_steps"], own["smaller"]) == (4, [(3, 4)])


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_random_numbers_of_a_failed_pass_are_drawn_again(pool: WorkerPool, where: str, precision: str) -> None:
    """With standard dropout, and fp16's loss scale, too the run is that of an accumulation which was planned."""
    settings = ["recipe.model.dropout=0.1", f"precision={precision}"]
    (expected,) = pool.run(1, train_with_little_memory, [*settings, "accumulation.steps=2"], [ENOUGH])
    (found,) = pool.run(1, train_with_little_memory, settings, [12], 0, where)
    assert all(torch.equal(tensor, expected["weights"][name]) for name, tensor in found["weights"].items())
    assert found["ledger"] == expected["ledger"]
    assert found["accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("settings", "limit", "where", "accumulation_steps"),
    [
        ([], 12, "buffer", 1),  # running statistics would be updated twice
        (["accumulation.steps=24"], 0, "forward", 24),  # nothing is smaller
        (["equivalence=identical"], 1, "forward", 8),  # the micro-batches are shards
    ],
)
def test_a_step_that_cannot_be_repeated(
    pool: WorkerPool, settings: list[str], limit: int, where: str, accumulation_steps: int
) -> None:
    (error,) = pool.run(1, train_with_little_memory, settings, [limit], 0, where)
    assert "step 1: worker 0 has too little memory" in error
    assert error.endswith(f"({accumulation_steps})")
