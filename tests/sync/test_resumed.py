"""Stop, reload and go on, under every policy: not one bit may differ from a run that was not stopped."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.backends import Backend
from tests.pool import WorkerPool
from tests.replicas import make_loop, outcome, train
from tests.sync.batch_norm_recipe import BATCH_NORM
from tests.sync.reference import ADAMW, SGD, largest_difference
from tests.sync.simulation import DILOCO, SLOWMO, Sync

#: Nothing here has to be computed by hand: dropout from the workers' own generators, and arithmetic as usual.
USUAL = ["precision=fp32", "recipe.model.dropout=0.1"]
#: Steps 1 to 4 of ten are fully synchronous.
LATE = Sync(k=3, schedule="post_local", synchronous_share=0.4)


def train_in_parts(backend: Backend, overrides: list[str], stops: tuple[int, ...]) -> dict[str, Any]:
    """Stop after each of these optimizer steps, build everything anew, load the state, and go on."""
    loop = make_loop(backend, overrides)
    for stop in stops:
        loop.train(until=stop)
        saved = io.BytesIO()
        torch.save(loop.state_dict(), saved)
        saved.seek(0)
        loop.policy.close()
        torch.manual_seed(999)  # nothing may depend on what the generators happen to hold
        loop = make_loop(backend, overrides)
        # weights_only: the state is made of plain data and tensors, so that loading it runs no code.
        loop.load_state_dict(torch.load(saved, weights_only=True))
    loop.train()
    loop.finish()
    result = outcome(loop)
    loop.policy.close()
    return result


def train_both_ways(backend: Backend, overrides: list[str], stops: tuple[int, ...]) -> tuple[Any, Any]:
    return train(backend, overrides), train_in_parts(backend, overrides, stops)


@pytest.mark.parametrize(
    ("sync", "overrides", "stops"),
    [
        (Sync(k=4), [*ADAMW, "accumulation.steps=2"], (3, 5)),
        (Sync(k=4, average="weights_and_moments", compress="bf16"), ADAMW, (2, 6, 8)),
        (Sync("accumulated", k=4), ADAMW, (3, 6, 8)),
        (replace(DILOCO, k=3), ADAMW, (4, 6)),
        (Sync("gradients", k=3, compress="fp16"), ADAMW, (4, 6)),
        (replace(LATE, average="weights_and_moments"), ADAMW, (2, 4, 5)),
        (replace(LATE, policy="outer", overlap=True, delay=2), ADAMW, (3, 4, 7, 8, 9)),
        (replace(LATE, policy="gradients"), SGD, (2, 4, 5)),
        (LATE, [*SGD, *BATCH_NORM], (2, 4, 6)),
        (Sync("accumulated", k=2, schedule="qsr"), [*SGD, "schedule.warmup_share=0.3"], (3, 5, 8)),
        (Sync(k=4, overlap=True, delay=2, compress="bf16"), ADAMW, (4, 5, 6)),
        (Sync("accumulated", k=3, overlap=True, delay=3), SGD, (4, 6, 9, 10)),
        (replace(SLOWMO, k=3, overlap=True, delay=3, schedule="qsr"), SGD, (2, 4, 7, 10)),
    ],
    ids=lambda value: "-".join(value.overrides()) if isinstance(value, Sync) else None,
)
def test_a_resumed_run_ends_with_the_same_weights(
    pool: WorkerPool, sync: Sync, overrides: list[str], stops: tuple[int, ...]
) -> None:
    """Stopped within a window, right after a synchronisation and with a snapshot in flight, dropout on, in fp32."""
    for whole, parts in pool.run(2, train_both_ways, [*overrides, *USUAL, *sync.overrides()], stops):
        assert largest_difference(whole["weights"], parts["weights"]) == 0
        assert whole["metrics"] == parts["metrics"]
        assert whole["ledger"] == parts["ledger"]
