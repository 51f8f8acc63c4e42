"""A pool of worker processes that stay alive between tests and join a new gloo group for each call."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _serve(connection: Connection, device_type: str) -> None:
    from runner.backends import World, build_backend

    torch.set_num_threads(1)
    while True:
        task = connection.recv()
        if task is None:
            return
        module, function, arguments, rank, world_size, rendezvous = task
        try:
            store = dist.FileStore(rendezvous, world_size)
            world = World(rank, world_size, rank, world_size, store)
            backend = build_backend(device_type, world, cache=Path(rendezvous).parent, threads=1, timeout_s=600.0)
            result = getattr(importlib.import_module(module), function)(backend, *arguments)
            backend.close()
            connection.send((True, result))
        except BaseException:  # noqa: BLE001 - reported by the test, in another process
            connection.send((False, traceback.format_exc()))
            return  # the process group may be in any state, so this worker cannot be used again


class WorkerPool:
    """Runs `function(backend, *arguments)` on `world_size` workers and returns their results by rank.

    `device_type`: of the workers' backend, `cpu` or `xla`. `timeout_s`: for each worker's result.
    """

    def __init__(self, device_type: str = "cpu", timeout_s: float = 300) -> None:
        self._device_type = device_type
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[tuple[Any, Connection]] = []

    def _grow(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._device_type), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, world_size: int, function: Any, *arguments: Any) -> list[Any]:
        """`function`: defined at the top level of an importable module. Fails with the worker's traceback."""
        self._grow(world_size)
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = str(Path(folder) / "store")
            for rank in range(world_size):
                task = (function.__module__, function.__name__, arguments, rank, world_size, rendezvous)
                self._workers[rank][1].send(task)
            results = [self._result(rank) for rank in range(world_size)]
        failed = [f"rank {rank}: {result}" for rank, (ok, result) in enumerate(results) if not ok]
        if failed:
            self.close()
        assert not failed, "\n".join(failed)
        return [result for _, result in results]

    def _result(self, rank: int) -> tuple[bool, Any]:
        connection = self._workers[rank][1]
        if not connection.poll(self._timeout_s):
            return False, f"no result within {self._timeout_s:.0f} s"
        try:
            result: tuple[bool, Any] = connection.recv()
        except EOFError:
            return False, "the worker died"
        return result

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()  # one that waits for others in gloo does not answer SIGTERM
            process.join()
        self._workers = []
