"""Says which worker the others wait for, and ends a launch in which one does not come back."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from runner.log import LOG
from runner.train.loop import Loop

#: Seconds between two looks; without progress, until a worker looks for the others; and in which they have to answer.
_LOOK_S, _QUIET_S, _ANSWER_S = 5.0, 45.0, 15.0
#: Seconds between two looks, at most, if this process was not stopped meanwhile.
_LONGEST_LOOK_S = 10.0
#: The phases in which a worker may be waiting for the others; with sharded weights also the others of these.
_WAITING = ("backward", "communication", "evaluation")
_WAITING_SHARDED = (*_WAITING, "forward", "optimizer")


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a worker. `number`: of its sign; `progress_count`: how much progress its training has made."""

    number: int
    progress_count: int
    step: int
    phase: str


class Watchdog:
    """Two threads of one worker, while it trains. Used as a context.

    One leaves a sign of life in the store every few seconds, and while the worker makes no progress it looks at those
    of the others: a worker that is stopped or cannot be reached leaves none. The other thread watches the clock: the
    store may be on the host that is gone, and then does not answer.

    Only the time counts in which this process runs: all processes may be stopped, by Ctrl-Z or because a job is
    suspended.
    """

    def __init__(self, loop: Loop, store: dist.Store, timeout_s: float, give_up: Callable[[str], None]) -> None:
        """`store`: of the workers. `give_up`: ends the process with a sentence, after `timeout_s` without progress."""
        self._loop, self._timer, self._store, self._give_up = loop, loop.meter.timer, store, give_up
        self._rank, self._workers = loop.backend.rank, loop.backend.world_size
        self._timeout_s = timeout_s
        self._scale = min(1.0, timeout_s / 100)
        self._ended = threading.Event()
        #: Seconds that this process has run: the clock of this class.
        self._now = 0.0
        #: Since when there is no progress.
        self._since = 0.0
        #: The signs of all workers that were seen since then, each with its time.
        self._seen: list[tuple[float, dict[int, Heartbeat]]] = []
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._exchange_signs, self._watch)]

    def __enter__(self) -> Watchdog:
        if self._workers > 1:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _pause(self) -> bool:
        return self._ended.wait(self._scale * _LOOK_S)

    def _exchange_signs(self) -> None:
        number = 0
        while not self._pause():
            number += 1
            sign = (number, self._timer.progress_count, self._loop.optimizer_step + 1, self._timer.phase)
            with contextlib.suppress(RuntimeError):  # a store that is gone
                self._store.set(f"alive/{self._rank}", json.dumps(sign))
                if self._now - self._since > self._scale * _QUIET_S:
                    self._seen.append((self._now, self._signs()))

    def _signs(self) -> dict[int, Heartbeat]:
        """The latest sign of each worker that has left one."""
        ranks = [rank for rank in range(self._workers) if self._store.check([f"alive/{rank}"])]
        return {rank: Heartbeat(*json.loads(self._store.get(f"alive/{rank}"))) for rank in ranks}

    def _watch(self) -> None:
        progress_count, said, looked_at = self._timer.progress_count, False, time.monotonic()
        while not self._pause():
            before, looked_at = looked_at, time.monotonic()
            self._now += min(looked_at - before, self._scale * _LONGEST_LOOK_S)
            if self._timer.progress_count != progress_count:
                progress_count, said, self._since, self._seen = self._timer.progress_count, False, self._now, []
                continue
            quiet = self._now - self._since
            if quiet > self._timeout_s:
                what = self._blame()[0] or f"no worker made progress in step {self._loop.optimizer_step + 1}"
                self._give_up(f"{what} for {quiet:.0f} s (launch.timeout_s={self._timeout_s:g})")
            elif quiet > self._scale * (_QUIET_S + _ANSWER_S) and not said:
                blame, speaker = self._blame()
                said = blame is not None
                if blame is not None and speaker == self._rank:
                    LOG.warning(f"{blame}; after launch.timeout_s={self._timeout_s:g} seconds the run ends")

    def _blame(self) -> tuple[str | None, int]:
        """The workers that the others wait for, as the start of a sentence if known, and the rank that says so."""
        seen = list(self._seen)
        if not seen or self._now - seen[-1][0] > self._scale * _ANSWER_S:
            step = self._loop.optimizer_step + 1
            return f"the host of rank 0 did not answer in step {step} (stopped, or the link is gone)", self._rank
        earlier, now = seen[0][1], seen[-1][1]
        gone = silent(earlier, now, self._workers)
        waiting = _WAITING_SHARDED if self._loop.policy.collective_forward else _WAITING
        return waited_for(earlier, now, self._workers, waiting), min(set(now) - set(gone), default=self._rank)


def silent(earlier: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat], workers: int) -> list[int]:
    """The workers without a new sign of life."""
    return [rank for rank in range(workers) if rank not in now or earlier.get(rank) == now[rank]]


def waited_for(
    earlier: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat], workers: int, waiting: Sequence[str] = _WAITING
) -> str | None:
    """The workers that the others wait for, as the start of a sentence; None if they only take their time.

    `waiting`: the phases in which a worker may be waiting for the others.
    """
    step = max((sign.step for sign in now.values()), default=0)
    if gone := silent(earlier, now, workers):
        return f"{_named(gone)} did not answer in step {step} (stopped, or the link is gone)"
    if any(rank not in earlier or earlier[rank].progress_count != sign.progress_count for rank, sign in now.items()):
        return None
    late = [rank for rank, sign in now.items() if sign.phase not in waiting]
    if not late or len(late) == workers:
        return None
    phases = ", ".join(sorted({now[rank].phase for rank in late}))
    return f"{_named(late)} did not come to the end of step {now[late[0]].step} (phase: {phases})"


def _named(ranks: Sequence[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
