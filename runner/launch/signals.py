"""Signals that end a run: Ctrl-C, SIGTERM, and a terminal that is closed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle_signals() -> None:
    """End a run by KeyboardInterrupt, so that its folder and its tracking run are closed as KILLED."""
    _set(signal.SIGINT, signal.default_int_handler)
    _set(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        _set(signal.SIGHUP, _terminated)


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Finish the block whatever the user presses. (torchrun forwards every signal twice.)"""
    handlers = {number: _set(number, signal.SIG_IGN) for number in ENDING}
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
