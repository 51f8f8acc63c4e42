"""Does it pay to synchronise a vector in cache-sized parts?

    python -m benchmarks.sync_parts [--rounds 15]

Two workers with one thread each synchronise 22.7 million fp32 weights (MiniLM) over gloo on this machine: subtract the
common weights, measure, weight, compress, all-reduce, decompress, measure, add, copy. The element-wise work is done
either on the whole vector, one operation after the other, or on parts that stay in the cache. Both ways take turns
within a round. Prints medians with ranges over rounds, as docs/results/sync-parts.md has them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.slow_link.surroundings import surroundings

SIZE = 22_713_216
PART = 2**17
WORKERS, WEIGHT = 2, 0.5
FORMS = {"none": None, "bf16": torch.bfloat16}


class WholeVector:
    """One operation on the whole vector after the other."""

    def __init__(self, weights: Tensor, common: Tensor, dtype: torch.dtype | None) -> None:
        self.weights, self.common = weights, common
        self.wire = weights if dtype is None else torch.empty_like(weights, dtype=dtype)

    def pack(self) -> Tensor:
        update = self.weights.sub_(self.common)
        norm = torch.dot(update, update)
        update.mul_(WEIGHT)
        if self.wire is not update:
            self.wire.copy_(update)
        return norm

    def unpack(self) -> Tensor:
        mean = self.weights
        if self.wire is not mean:
            mean.copy_(self.wire)
        norm = torch.dot(mean, mean)
        self.common.add_(mean)
        self.weights.copy_(self.common)
        return norm + torch.dot(self.common, self.common)


class CacheSizedParts:
    """All operations on one part before the next part."""

    def __init__(self, weights: Tensor, common: Tensor, dtype: torch.dtype | None) -> None:
        self.wire = weights if dtype is None else torch.empty_like(weights, dtype=dtype)
        self.parts = list(zip(*(vector.split(PART) for vector in (weights, common, self.wire)), strict=True))
        self.scratch = torch.empty(PART) if dtype is not None else None

    def pack(self) -> Tensor:
        norm = torch.zeros(())
        for weights, common, wire in self.parts:
            update = weights if self.scratch is None else self.scratch[: len(weights)].copy_(weights)
            update.sub_(common)
            norm += torch.dot(update, update)
            update.mul_(WEIGHT)
            if self.scratch is not None:
                wire.copy_(update)
        return norm

    def unpack(self) -> Tensor:
        norm = torch.zeros(())
        for weights, common, wire in self.parts:
            mean = wire if self.scratch is None else self.scratch[: len(weights)].copy_(wire)
            norm += torch.dot(mean, mean)
            common.add_(mean)
            norm += torch.dot(common, common)
            weights.copy_(common)
        return norm


ARMS = (CacheSizedParts, WholeVector)


def synchronise(arm: WholeVector | CacheSizedParts) -> tuple[float, float]:
    """Seconds of element-wise work and of the all-reduce."""
    start = time.thread_time()
    arm.pack()
    packed = time.thread_time() - start
    dist.barrier()
    sent = time.perf_counter()
    dist.all_reduce(arm.wire)
    received = time.perf_counter()
    start = time.thread_time()
    arm.unpack()
    return packed + time.thread_time() - start, received - sent


def work(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORKERS), rank=rank, world_size=WORKERS)
    torch.manual_seed(rank)
    if rank == 0:
        print("| wire | element-wise work: whole vector | in parts | all-reduce | parts save of a synchronisation |")
        print("| --- | --- | --- | --- | --- |")
    for name, dtype in FORMS.items():
        arms = [arm(torch.randn(SIZE), torch.randn(SIZE), dtype) for arm in ARMS]
        seconds: dict[type, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
        for turn in range(rounds + 1):
            for arm in arms if turn % 2 else reversed(arms):
                measured = synchronise(arm)
                if turn:  # the first turn warms up
                    seconds[type(arm)].append(measured)
        if rank == 0:
            report(name, seconds[CacheSizedParts], seconds[WholeVector])
    dist.destroy_process_group()


def report(name: str, parts: Sequence[tuple[float, float]], whole: Sequence[tuple[float, float]]) -> None:
    all_reduce = [reduced for _, reduced in (*parts, *whole)]
    typical = statistics.median(all_reduce)
    saved = [(w - p) / (w + typical) for (w, _), (p, _) in zip(whole, parts, strict=True)]
    cells = [*(spread([1000 * one for one in row]) for row in ([w for w, _ in whole], [p for p, _ in parts]))]
    print(f"| {name} | {cells[0]} ms | {cells[1]} ms | {spread([1000 * s for s in all_reduce])} ms |", end=" ")
    print(f"{spread([100 * share for share in saved])} % |", flush=True)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(surroundings())
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (str(Path(folder)), rounds), nprocs=WORKERS)


if __name__ == "__main__":
    main()
