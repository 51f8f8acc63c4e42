"""Which policy a configuration builds."""

from __future__ import annotations

import pytest

from runner.backends import Backend
from tests.pool import WorkerPool
from tests.replicas import make_loop


def kinds(backend: Backend, settings: list[str]) -> list[tuple[str, str]]:
    """The class of the policy, and of the model that it runs forward passes through, for each of these settings."""
    names = []
    for overrides in settings:
        loop = make_loop(backend, overrides.split())
        names.append((type(loop.policy).__name__, type(loop.policy.forward_model).__name__))
        loop.policy.close()
    return names


@pytest.mark.parametrize(
    ("workers", "policies"),
    [
        (
            2,
            {
                "sync.k=1": "Synchronous",
                "sync=outer sync.k=1": "LocalSGD",
                "sync.k=4 sync.compress=bf16": "LocalSGD",
                "sync.k=4 sync.overlap=true": "StreamingSGD",
                "sync.k=4 sync.fragments=2": "StreamingSGD",
                "sync.k=4 sync.compress=int8": "StreamingSGD",
                "sync=accumulated sync.k=4": "AccumulatedUpdates",
                "sync=gradients sync.k=4": "PeriodicGradients",
                "sync=gradients sync.k=1": "Synchronous",
                "sync.k=4 sync.schedule=post_local": "PostLocal",
                "sync=gradients sync.k=1 sync.schedule=qsr": "PeriodicGradients",
            },
        ),
        (1, {"sync=outer sync.k=4": "Synchronous", "sync.k=4 sync.overlap=true": "Synchronous"}),
    ],
)
def test_policies(pool: WorkerPool, workers: int, policies: dict[str, str]) -> None:
    """Gradients of every step are averaged by torch's DDP; a single worker synchronises with nobody."""
    for found in pool.run(workers, kinds, list(policies)):
        assert [name for name, _ in found] == list(policies.values())
        for name, model in found:
            wrapped = workers > 1 and name in ("Synchronous", "PostLocal")
            assert (model == "_DataParallel") is wrapped
