"""Says which worker the others wait for, and ends a launch in which one does not come back."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from runner.errors import printable
from runner.train.loop import Loop

#: Seconds between two looks; without progress, until a worker looks for the others; and in which they have to answer.
_LOOK_S, _QUIET_S, _ANSWER_S = 5.0, 45.0, 15.0
#: The phases in which a worker may be waiting for the others.
_WAITING = ("backward", "communication", "evaluation")


@dataclass(frozen=True)
class Sign:
    """A sign of life of a worker. `number`: of its sign; `beats`: how much progress its training has made."""

    number: int
    beats: int
    step: int
    phase: str


class Watchdog:
    """A thread of one worker, while it trains. Used as a context.

    It leaves a sign of life in the store every few seconds. A worker without progress looks at the signs of the others:
    one that is stopped or cannot be reached leaves none.
    """

    def __init__(self, loop: Loop, store: dist.Store, timeout_s: float, give_up: Callable[[str], None]) -> None:
        """`store`: of the workers. `give_up`: ends the process with a sentence, after `timeout_s` without progress."""
        self._loop, self._store, self._give_up = loop, store, give_up
        self._rank, self._workers = loop.backend.rank, loop.backend.world_size
        self._timeout_s = timeout_s
        self._scale = min(1.0, timeout_s / 100)
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._workers > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        beats, since, said = self._loop.meter.beats, time.monotonic(), False
        earlier: dict[int, Sign] = {}
        while not self._pause(_LOOK_S):
            self._leave_sign()
            if self._loop.meter.beats != beats:
                beats, since, said, earlier = self._loop.meter.beats, time.monotonic(), False, {}
                continue
            quiet = time.monotonic() - since
            if quiet < self._scale * _QUIET_S:
                continue
            if not earlier:
                earlier = self._signs()
            if quiet < self._scale * (_QUIET_S + _ANSWER_S) or (said and quiet < self._timeout_s):
                continue
            signs = self._signs()
            blame = waited_for(earlier, signs, self._workers)
            if quiet >= self._timeout_s:
                what = blame or f"no worker made progress in step {self._loop.optimizer_step + 1}"
                self._give_up(f"{what} for {quiet:.0f} s (launch.timeout_s={self._timeout_s:g})")
            elif blame is not None and self._rank == min(set(signs) - set(silent(earlier, signs, self._workers))):
                warning = f"warning: {blame}; after launch.timeout_s={self._timeout_s:g} seconds the run ends\n"
                sys.stderr.write(printable(warning))
            said = True

    def _pause(self, seconds: float) -> bool:
        return self._ended.wait(self._scale * seconds)

    def _leave_sign(self) -> None:
        self._number += 1
        sign = (self._number, self._loop.meter.beats, self._loop.optimizer_step + 1, self._loop.meter.phase)
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be on the host that is gone
            self._store.set(f"alive/{self._rank}", json.dumps(sign))

    def _signs(self) -> dict[int, Sign]:
        """The latest signs of all workers that can be read."""
        found = {}
        for rank in range(self._workers):
            with contextlib.suppress(dist.DistError, RuntimeError):
                if self._store.check([f"alive/{rank}"]):
                    found[rank] = Sign(*json.loads(self._store.get(f"alive/{rank}")))
        return found


def silent(earlier: Mapping[int, Sign], now: Mapping[int, Sign], workers: int) -> list[int]:
    """The workers without a new sign of life."""
    return [rank for rank in range(workers) if rank not in now or earlier.get(rank) == now[rank]]


def waited_for(earlier: Mapping[int, Sign], now: Mapping[int, Sign], workers: int) -> str | None:
    """Which workers the others wait for, as the start of a sentence; None if they only take their time."""
    step = max((sign.step for sign in now.values()), default=0)
    if gone := silent(earlier, now, workers):
        return f"{_named(gone)} did not answer in step {step} (stopped, or the link is gone)"
    if any(rank not in earlier or earlier[rank].beats != sign.beats for rank, sign in now.items()):
        return None
    late = [rank for rank, sign in now.items() if sign.phase not in _WAITING]
    if not late or len(late) == workers:
        return None
    phases = ", ".join(sorted({now[rank].phase for rank in late}))
    return f"{_named(late)} did not come to the end of step {now[late[0]].step} (phase: {phases})"


def _named(ranks: Sequence[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
