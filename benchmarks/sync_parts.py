"""What does a synchronisation cost the processor, and in chunks of which size?

    python -m benchmarks.sync_parts [--rounds 15] [--chunks 0,65536,262144]

Two workers with one core each synchronise a part of 22.7 million fp32 weights (MiniLM) over gloo on this machine, with
the classes that training uses and with overlap: each call applies the average that the previous one started, and starts
the next. Chunks of several sizes (numbers that are processed together, `_CHUNK` in `runner/sync/vectors.py`; 0: all
of them) take turns within a round. Prints medians with ranges over rounds, as results/sync-parts.md has them:
processor time, since other processes may use the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.slow_link.surroundings import surroundings
from runner.backends import TorchBackend, World
from runner.config.choices import Compress, SyncPolicyName
from runner.config.schema import Sync
from runner.sync import StepFacts, vectors
from runner.sync.replica_vector import ReplicaVector
from runner.sync.streaming import StreamingSGD

SIZE = 22_713_216
PARTS = (16, 4, 1)
WORKERS = 2
FORMS = (Compress.none, Compress.bf16, Compress.fp16, Compress.int8)
CHUNKS = "0,65536,262144"
#: Seconds that a call waits for the collective of the whole vector, which other threads process.
_PAUSE = 0.2
#: What training has in the cache meanwhile.
_OTHER = torch.zeros(2**25)


class Synchronisations:
    """Of a vector of `size` weights, in chunks of `chunk`."""

    def __init__(self, backend: TorchBackend, compress: Compress, size: int, chunk: int) -> None:
        self._chunk, self._step, self._pause = chunk or size, 0, _PAUSE * size / SIZE
        self._model = nn.Linear(size, 1, bias=False)
        with self._cut():
            replica = ReplicaVector(self._model, [], backend)
            sync = Sync(SyncPolicyName.periodic, 2, compress=compress, overlap=True)
            self._policy = StreamingSGD(replica, backend, sync, range(2**16))

    @contextlib.contextmanager
    def _cut(self) -> Iterator[None]:
        with mock.patch.dict(vectors._CHUNK, cpu=self._chunk):
            yield

    def __call__(self) -> tuple[float, float]:
        """Milliseconds of processor time: of this thread, and of the others, which communicate."""
        started, own = time.process_time(), time.thread_time()
        with self._cut():
            self._policy.after_step(StepFacts(self._step, 2, 1, 1, 2, 0.1))
        own = time.thread_time() - own
        time.sleep(self._pause)
        cost = 1e3 * own, 1e3 * (time.process_time() - started - own)
        self._step += 1
        _OTHER.mul_(1.0)
        return cost


def work(rank: int, folder: str, rounds: int, sizes: Sequence[int]) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    backend = TorchBackend("cpu", World(rank, WORKERS, rank, WORKERS, dist.FileStore(f"{folder}/store", WORKERS)))
    if rank == 0:
        print("| part | wire | chunk | the worker's thread, ms | other threads, ms |")
        print("| --- | --- | --- | --- | --- |")
    for part in PARTS:
        for compress in FORMS:
            arms = {chunk: Synchronisations(backend, compress, SIZE // part // 16 * 16, chunk) for chunk in sizes}
            measured: dict[int, list[tuple[float, float]]] = {chunk: [] for chunk in sizes}
            for turn in range(rounds + 1):
                for chunk in sizes if turn % 2 else reversed(sizes):
                    cost = arms[chunk]()
                    if turn:  # the first turn starts an average and applies none
                        measured[chunk].append(cost)
            if rank == 0:
                for chunk, costs in measured.items():
                    own, others = (spread(column) for column in zip(*costs, strict=True))
                    print(f"| 1/{part} | {compress.value} | {chunk or 'all'} | {own} | {others} |", flush=True)
    backend.close()


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", default=CHUNKS, help="sizes, separated by commas; 0: all numbers")
    found = parser.parse_args()
    print(surroundings())
    sizes = [int(size) for size in found.chunks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (str(Path(folder)), found.rounds, sizes), nprocs=WORKERS)


if __name__ == "__main__":
    main()
