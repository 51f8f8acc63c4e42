"""Collectives of objects and of several tensors."""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist

from runner.backends import Backend
from runner.backends.torch_distributed import long_collectives
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


def late_all_reduce(backend: Backend) -> list[float]:
    """Worker 1 comes later than the group's time-out allows."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
    with long_collectives(600.0):
        if backend.rank == 1:
            time.sleep(2)
        vector = backend.all_reduce(torch.ones(2))
    result: list[float] = vector.tolist()
    return result


def test_collectives_outlast_a_pause(pool: WorkerPool) -> None:
    assert pool.run(2, late_all_reduce) == [[2.0, 2.0]] * 2
