"""Which policy a configuration comes to."""

from __future__ import annotations

import pytest

from runner.backends import Backend
from tests.pool import WorkerPool
from tests.replicas import make_loop


def kind(backend: Backend, overrides: list[str]) -> tuple[str, str]:
    """The policy's class, and what its forward passes go through."""
    loop = make_loop(backend, overrides)
    names = type(loop.policy).__name__, type(loop.policy.forward_model).__name__
    loop.policy.close()
    return names


@pytest.mark.parametrize(
    ("overrides", "workers", "policy", "wrapped"),
    [
        ("sync.k=1", 2, "Synchronous", True),
        ("sync.k=4", 2, "LocalPhases", False),
        ("sync=outer sync.k=4", 2, "LocalPhases", False),
        ("sync=outer sync.k=1", 2, "LocalPhases", False),
        ("sync=accumulated sync.k=4", 2, "LocalPhases", False),
        ("sync=gradients sync.k=4", 2, "PeriodicGradients", False),
        ("sync=gradients sync.k=1", 2, "Synchronous", True),
        ("sync.k=4 sync.schedule=post_local", 2, "PostLocal", True),
        ("sync.schedule=qsr", 2, "LocalPhases", False),
        ("sync=gradients sync.k=1 sync.schedule=qsr", 2, "PeriodicGradients", False),
        ("sync=outer sync.k=4", 1, "Synchronous", False),
        ("sync.k=4 sync.schedule=qsr sync.overlap=true", 1, "Synchronous", False),
    ],
)
def test_which_policy(pool: WorkerPool, overrides: str, workers: int, policy: str, wrapped: bool) -> None:
    """Gradients in every step go through torch's DDP; one worker has nobody to synchronise with."""
    for name, model in pool.run(workers, kind, overrides.split()):
        assert name == policy
        assert (model == "DistributedDataParallel") is wrapped
