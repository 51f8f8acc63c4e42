"""Stop, reload and continue, under every policy: no bit may differ from a run that was not stopped."""

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
from tests.sync.simulation import SLOWMO, Sync

#: Dropout from the workers' own generators, and fp32: nothing here is compared with a simulation.
USUAL = ["precision=fp32", "recipe.model.dropout=0.1"]
#: Steps 1 to 4 of ten are fully synchronous.
LATE = Sync(k=3, schedule="post_local", synchronous_share=0.4)


def train_in_parts(backend: Backend, overrides: list[str], stops: tuple[int, ...]) -> dict[str, Any]:
    """Stop after each of these optimizer steps, rebuild everything, load the state, and continue."""
    loop = make_loop(backend, overrides)
    for stop in stops:
        loop.train(until=stop)
        saved = io.BytesIO()
        torch.save(loop.state_dict(), saved)
        saved.seek(0)
        loop.policy.close()
        torch.manual_seed(999)  # nothing may depend on the generators' current states
        loop = make_loop(backend, overrides)
        # weights_only: the state consists of plain data and tensors, so loading it runs no code.
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
        (Sync(k=4, average="weights_and_moments", compress="bf16"), ADAMW, (2, 6, 8)),
        (Sync("gradients", k=3, compress="fp16"), ADAMW, (4, 6)),
        (replace(LATE, average="weights_and_moments"), [*ADAMW, *BATCH_NORM], (2, 4, 5)),
        (replace(LATE, policy="outer", overlap=True, delay=2), ADAMW, (3, 4, 7, 8, 9)),
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
    """Stopped within a phase, right after a synchronisation, and with an average in flight, with dropout, in fp32."""
    for whole, parts in pool.run(2, train_both_ways, [*overrides, *USUAL, *sync.overrides()], stops):
        assert largest_difference(whole["weights"], parts["weights"]) == 0
        assert whole["metrics"] == parts["metrics"]
        assert whole["ledger"] == parts["ledger"]
