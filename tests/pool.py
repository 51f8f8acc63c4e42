"""A pool of worker processes that stay alive between tests, and meet anew in a gloo group for each."""

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
    from runner.backends import build_backend

    torch.set_num_threads(1)
    while True:
        task = connection.recv()
        if task is None:
            return
        module, function, arguments, rank, world_size, meeting = task
        try:
            store = dist.FileStore(meeting, world_size)
            place = {"local_workers": world_size, "cache": Path(meeting).parent, "threads": 1}
            backend = build_backend(device_type, rank, world_size, rank, store, **place)
            result = getattr(importlib.import_module(module), function)(backend, *arguments)
            backend.close()
            connection.send((True, result))
        except BaseException:  # noqa: BLE001 - the test, in another process, has to see it
            connection.send((False, traceback.format_exc()))
            return  # the process group may be in any state: this worker is of no further use


class WorkerPool:
    """Runs `function(backend, *arguments)` on `world_size` workers and gives their results by rank.

    `device_type`: of the workers' backend, `cpu` or `xla`. `patience`: seconds that a worker may take to answer.
    """

    def __init__(self, device_type: str = "cpu", patience: float = 120) -> None:
        self._device_type = device_type
        self._patience = patience
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
            meeting = str(Path(folder) / "store")
            for rank in range(world_size):
                task = (function.__module__, function.__name__, arguments, rank, world_size, meeting)
                self._workers[rank][1].send(task)
            answers = [self._answer(rank) for rank in range(world_size)]
        failed = [f"rank {rank}: {answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        if failed:
            self.close()
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        connection = self._workers[rank][1]
        if not connection.poll(self._patience):
            return False, f"no answer within {self._patience:.0f} s"
        try:
            answer: tuple[bool, Any] = connection.recv()
        except EOFError:
            return False, "the worker died"
        return answer

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.terminate()
            process.join()
        self._workers = []
