"""Both setups at once: two worlds of workers in one launch, whose first workers meet after every optimizer step."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runner.backends import Backend
from runner.launch.worker import launched
from runner.train.build import Job, build_loop, connect
from runner.train.ledger import LedgerError
from runner.train.loop import Loop
from runner.verify.compare import Comparison, Finding
from runner.verify.snapshot import Snapshot, snapshots

#: How long one setup waits for the other: for a step of the slower one, or while it tokenises its data.
_PATIENCE = datetime.timedelta(hours=2)

#: What a setup has to show next: a step, what its own ledger found, or None when it has done all its steps.
Frame = Snapshot | Finding | None

_PROGRESS = "progress"

#: Rank 0's part in a step, given its number and its setup's frame: whether to go on.
Exchange = Callable[[int, Frame], bool]


def run_launched(pair: dict[str, Any], meeting: str) -> dict[str, Any] | None:
    """The entry point of a worker of either setup; the launch's first worker, a's rank 0, returns the comparison.

    `pair`: the jobs `a` and `b`, how many `steps`, and a `folder` for progress and for what the two have to exchange.
    """
    with launched(meeting) as place:
        jobs = {side: Job.from_json(pair[side]) for side in ("a", "b")}
        workers_of_a = jobs["a"].plan.world_size
        side, rank = ("a", place.rank) if place.rank < workers_of_a else ("b", place.rank - workers_of_a)
        job = jobs[side]
        place.store.set_timeout(_PATIENCE)
        # Under a name of its own in the common store each setup is a world of its own.
        backend = connect(job, rank, job.plan.world_size, rank, dist.PrefixStore(side, place.store))
        log: list[tuple[int, dict[str, float]]] = []
        loop = build_loop(job, backend, lambda step, metrics: log.append((step, metrics)))
        link = Link(place.store, Path(pair["folder"]))
        lead = Lead(link, Comparison.of(*(one.config.precision.name for one in jobs.values())))
        run_side(frames(loop, log, pair["steps"], side), lead if side == "a" else link.follow, backend)
        loop.policy.close()
        backend.close()
        return lead.result() if place.rank == 0 else None


def frames(loop: Loop, log: list[tuple[int, dict[str, float]]], steps: int, side: str) -> Iterator[Frame]:
    """The snapshots of a setup, then what its ledger has to say. Every worker has to iterate."""
    try:
        yield from snapshots(loop, log, steps)
    except LedgerError:
        yield Finding(loop.optimizer_step, "ledger", f"the ledger of {side}: {loop.ledger.failures[-1]}")
    else:
        yield None


def run_side(frames: Iterator[Frame], exchange: Exchange, backend: Backend) -> None:
    """Go through a setup's frames on all its workers, until rank 0's exchange says that it is enough."""
    for number, frame in enumerate(frames):
        go_on = exchange(number, frame) if backend.rank == 0 else None
        if not backend.share(go_on):
            return


class Link:
    """Carries frames from b's rank 0 to a's, and the answers back: announcements in a store, tensors in files."""

    def __init__(self, store: dist.Store, folder: Path) -> None:
        self._store = store
        self._folder = folder

    def follow(self, number: int, frame: Frame) -> bool:
        """b's exchange: show a frame and wait for the answer."""
        if isinstance(frame, Snapshot):
            frame.save(self._file(number))
        finding = dataclasses.asdict(frame) if isinstance(frame, Finding) else None
        self._store.set(f"frame {number}", json.dumps({"more": isinstance(frame, Snapshot), "finding": finding}))
        return bool(self._store.get(f"answer {number}") == b"go on")

    def receive(self, number: int) -> Frame:
        said = json.loads(self._store.get(f"frame {number}"))
        if not said["more"]:
            return Finding(**said["finding"]) if said["finding"] else None
        frame = Snapshot.load(self._file(number))
        self._file(number).unlink()
        return frame

    def answer(self, number: int, go_on: bool) -> None:
        self._store.set(f"answer {number}", "go on" if go_on else "stop")

    def note_progress(self, number: int) -> None:
        (self._folder / _PROGRESS).write_text(str(number))

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.safetensors"


class Lead:
    """a's exchange: take b's frame, compare, and answer."""

    def __init__(self, link: Link, comparison: Comparison) -> None:
        self._link = link
        self._comparison = comparison
        self._finding: Finding | None = None

    def __call__(self, number: int, frame: Frame) -> bool:
        theirs = self._link.receive(number)
        self._finding = judge(frame, theirs, self._comparison)
        go_on = self._finding is None and frame is not None
        self._link.answer(number, go_on)
        self._link.note_progress(number)
        return go_on

    def result(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "finding": dataclasses.asdict(self._finding) if self._finding else None,
            **self._comparison.as_json(),
        }


def frames_compared(folder: Path) -> int | None:
    """The number of the frame that was compared last, as seen from outside; None before the first."""
    try:
        return int((folder / _PROGRESS).read_text())
    except (FileNotFoundError, ValueError):  # not there yet, or being written
        return None


def judge(a: Frame, b: Frame, comparison: Comparison) -> Finding | None:
    """What two frames of the same number say about the setups."""
    if isinstance(a, Snapshot) and isinstance(b, Snapshot):
        return comparison.add(a, b)
    said = [frame for frame in (a, b) if isinstance(frame, Finding)]
    # Both were asked for as many steps: one without more and without a finding stands beside one that is done as well.
    assert said or (a is None and b is None), (a, b)
    if len(said) == 2:
        return Finding(said[0].step, "ledger", f"{said[0].sentence}; {said[1].sentence}")
    return said[0] if said else None
