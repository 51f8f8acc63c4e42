"""Run both setups at once: two groups of workers in one launch, whose rank 0s exchange snapshots after every step."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.backends import Backend, World
from runner.launch.local import WorkerContext
from runner.launch.worker import connect, rendezvous_store
from runner.tools.verify.mismatch import Mismatch, SnapshotComparison
from runner.tools.verify.snapshot import Snapshot, snapshots
from runner.train.build import build_loop
from runner.train.hooks import Hooks
from runner.train.job import Job
from runner.train.ledger import LedgerError
from runner.train.loop import Loop

#: How long one setup waits for the other: for a slower step, or while it prepares its data.
_TIMEOUT = datetime.timedelta(hours=2)

#: What a setup shows next: a step, a mismatch that its own ledger found, or None after its last step.
Frame = Snapshot | Mismatch | None

#: Called on rank 0 with a frame of its setup and the frame's number; whether to continue.
Exchange = Callable[[int, Frame], bool]

_PROGRESS = "progress"


def run_launched(pair: dict[str, Any], context: WorkerContext) -> dict[str, Any] | None:
    """The entry point of a worker of either setup. Rank 0 of the launch, which is rank 0 of a, returns the comparison.

    `pair`: the jobs `a` and `b`, the number of `steps`, and a `folder` for progress and exchanged snapshots.
    """
    jobs = {side: Job.from_json(pair[side]) for side in ("a", "b")}
    workers_of_a = jobs["a"].plan.world_size
    side, rank = ("a", context.rank) if context.rank < workers_of_a else ("b", context.rank - workers_of_a)
    job, store = jobs[side], rendezvous_store(context)
    store.set_timeout(_TIMEOUT)
    # With its own prefix in the common store each setup is a separate world.
    world = World(rank, job.plan.world_size, rank, job.local_workers, dist.PrefixStore(side, store))
    backend = connect(job, world)
    log: list[tuple[int, dict[str, float]]] = []
    loop = build_loop(job, backend, Hooks(log=lambda step, metrics: log.append((step, metrics))))
    link = Link(store, Path(pair["folder"]))
    configs = [one.config for one in jobs.values()]
    precisions = [config.precision.name for config in configs]
    bits = all(config.equivalence.is_identical for config in configs) and len(set(precisions)) == 1
    comparer = Comparer(link, SnapshotComparison.of(*precisions, bits=bits))
    run_side(frames(loop, log, pair["steps"], side), comparer if side == "a" else link.send, backend)
    loop.policy.close()
    backend.close()
    return comparer.result() if context.rank == 0 else None


def frames(loop: Loop, log: list[tuple[int, dict[str, float]]], steps: int, side: str) -> Iterator[Frame]:
    """The snapshots of a setup, then what its ledger found. Every worker has to iterate."""
    try:
        yield from snapshots(loop, log, steps)
    except LedgerError:
        yield Mismatch(loop.optimizer_step, "ledger", f"the ledger of {side}: {loop.ledger.failures[0]}")
    else:
        yield None


def run_side(frames: Iterator[Frame], exchange: Exchange, backend: Backend) -> None:
    """Iterate over a setup's frames on all its workers until rank 0's exchange returns False."""
    for number, frame in enumerate(frames):
        go_on = exchange(number, frame) if backend.rank == 0 else None
        if not backend.broadcast_object(go_on):
            return


class Link:
    """Sends frames from b's rank 0 to a's: frames in files, signals in the store."""

    def __init__(self, store: dist.Store, folder: Path) -> None:
        self._store = store
        self._folder = folder

    def send(self, number: int, frame: Frame) -> bool:
        """b's exchange: send a frame and wait for the reply."""
        kind = type(frame).__name__
        torch.save((kind, vars(frame) if frame else {}), self._file(number))
        self._store.set(f"frame {number}", kind)
        return bool(self._store.get(f"reply {number}") == b"continue")

    def receive(self, number: int) -> Frame:
        self._store.get(f"frame {number}")  # waits for it
        kind, fields = torch.load(self._file(number), weights_only=True)
        self._file(number).unlink()
        return {"Snapshot": Snapshot, "Mismatch": Mismatch}[kind](**fields) if fields else None

    def reply(self, number: int, go_on: bool) -> None:
        self._store.set(f"reply {number}", "continue" if go_on else "stop")
        (self._folder / _PROGRESS).write_text(str(number))

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.pt"


@dataclass
class Comparer:
    """a's exchange: receive b's frame, compare it with a's, and reply. `mismatch`: the one that ended it, if any."""

    link: Link
    comparison: SnapshotComparison
    mismatch: Mismatch | None = None

    def __call__(self, number: int, frame: Frame) -> bool:
        self.mismatch = compare_frames(frame, self.link.receive(number), self.comparison)
        go_on = self.mismatch is None and frame is not None
        self.link.reply(number, go_on)
        return go_on

    def result(self) -> dict[str, Any]:
        """JSON data."""
        mismatch = dataclasses.asdict(self.mismatch) if self.mismatch else None
        return {"finding": mismatch, **self.comparison.as_json()}


def frames_compared(folder: Path) -> int | None:
    """The number of the last frame that was compared, for another process; None before the first."""
    try:
        return int((folder / _PROGRESS).read_text())
    except (FileNotFoundError, ValueError):  # not there yet, or being written
        return None


def compare_frames(a: Frame, b: Frame, comparison: SnapshotComparison) -> Mismatch | None:
    """Compare two frames of the same number. A mismatch found by a setup's own ledger takes precedence."""
    if isinstance(a, Snapshot) and isinstance(b, Snapshot):
        return comparison.add(a, b)
    found = [frame for frame in (a, b) if isinstance(frame, Mismatch)]
    # Both setups run the same number of steps, so that without a mismatch both end here.
    assert found or (a is None and b is None), (a, b)
    return Mismatch(found[0].step, "ledger", "; ".join(one.sentence for one in found)) if found else None
