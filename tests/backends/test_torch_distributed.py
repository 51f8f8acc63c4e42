"""Collectives of objects and of several tensors."""

from __future__ import annotations

from typing import Any

import torch

from runner.backends import Backend
from tests.pool import WorkerPool


def collectives(backend: Backend) -> dict[str, Any]:
    rank = backend.rank
    vector, scalar = torch.full((3,), 1.0 + rank), torch.tensor(10.0 * rank)
    seconds = backend.start_all_reduce([vector, scalar], async_op=True)()
    return {
        "objects": backend.all_gather_object(torch.arange(rank)),
        "broadcast": backend.broadcast_object({"rank": rank}),
        "sum": backend.start_sum([torch.tensor(rank), torch.tensor(0.5)], async_op=False)(),
        "all_reduce": (vector.tolist(), scalar.item()),
        "timed": seconds is not None and seconds > 0,
    }


def test_collectives(pool: WorkerPool) -> None:
    """Two workers; gathered tensors may differ in length."""
    for result in pool.run(2, collectives):
        assert [rows.tolist() for rows in result["objects"]] == [[], [0]]
        assert result["broadcast"] == {"rank": 0}
        assert result["sum"] == [1.0, 1.0]
        assert result["all_reduce"] == ([3.0, 3.0, 3.0], 10.0)
        assert result["timed"]
