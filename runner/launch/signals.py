"""Signals: Ctrl-C and a closed terminal end a run, SIGTERM and SIGUSR1 ask it to save its state and end (preemption).

A handler raises an exception, unless somebody looks for the request: the parent while it waits for its workers, and a
worker while it trains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from runner.errors import Preempted

#: Exit codes of processes that were interrupted, and preempted: EX_TEMPFAIL of sysexits.h, "try again later".
EXIT_INTERRUPTED, EXIT_PREEMPTED = 130, 75

INTERRUPTIONS, PREEMPTIONS = (signal.SIGINT, signal.SIGHUP), (signal.SIGTERM, signal.SIGUSR1)
#: Seconds in which a repeated signal is the same request: torchrun sends each twice, Slurm to every process of a job,
#: and srun passes it on. On a busy machine seconds lie between them.
_SAME_REQUEST_S = 10.0


@dataclass
class Requests:
    """The requests to this process by signals.

    `exits`: handlers exit, because there is nothing to close. `waiting`, `training`: who looks for requests, so that
    handlers need not raise. `grace_s`: seconds that it has to save and end. `at_once`: to end without saving.
    `preempted_at`: when it was first asked to save and end, on the monotonic clock.
    """

    exits: bool = False
    waiting: bool = False
    training: bool = False
    grace_s: float = 0.0
    at_once: bool = False
    preempted_at: float | None = None

    def preempted(self) -> bool:
        return self.preempted_at is not None

    def raise_pending(self) -> None:
        """Raise Preempted if that was asked for."""
        if self.preempted():
            raise Preempted

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Only note requests in this block. Raises Preempted if that was asked for before."""
        self.raise_pending()
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False


#: The requests to this process; signals are per process, too.
requests = Requests()


def handle_signals(exits: bool = False) -> None:
    """Let signals raise KeyboardInterrupt, or Preempted, which is one; `exits`: let them end the process."""
    requests.exits = exits
    for number in INTERRUPTIONS:
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:  # nohup ignores SIGHUP
            _set(number, _interrupt)
    for number in PREEMPTIONS:
        _set(number, _preempt)


def _interrupt(number: int, frame: object) -> None:
    if not requests.waiting:
        _end(KeyboardInterrupt(), EXIT_INTERRUPTED)
    requests.at_once = True


def _preempt(number: int, frame: object) -> None:
    now, first = time.monotonic(), requests.preempted_at
    if first is None:
        requests.preempted_at = now
        if not (requests.waiting or requests.training):
            _end(Preempted(), EXIT_PREEMPTED)
    elif now - first > _SAME_REQUEST_S:
        if not requests.waiting:
            _end(Preempted(), EXIT_PREEMPTED)
        requests.at_once = True


def _end(error: KeyboardInterrupt, code: int) -> NoReturn:
    if requests.exits:
        os._exit(code)
    raise error


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """After the block signals are handled as before it, and what they asked for in it is forgotten."""
    numbers = (*INTERRUPTIONS, *PREEMPTIONS)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            _set(number, handler)
        requests.at_once, requests.preempted_at = False, None


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Finish the block whatever the user presses."""
    handlers = {number: _set(number, signal.SIG_IGN) for number in (*INTERRUPTIONS, *PREEMPTIONS)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            _set(number, handler)


def _set(number: signal.Signals, handler: Any) -> Any:
    """Set a signal's handler and return the previous one. Python allows it in the main thread only."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(number, handler)
    return None
