"""What ends a run from outside: Ctrl-C, SIGTERM, and a terminal that is closed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle_signals() -> None:
    """Let each of them end a run in good order: KILLED, with its books closed."""
    _set(signal.SIGINT, signal.default_int_handler)
    _set(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        _set(signal.SIGHUP, _terminated)


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt  # treated like Ctrl-C


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """For what has to be done to its end, whatever is pressed meanwhile; torchrun passes every signal on twice, too."""
    handlers = {number: _set(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            _set(number, handler)


def _set(number: signal.Signals, handler: Any) -> Any:
    """Set a signal's handler where Python allows it, in the main thread; the one before."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(number, handler)
    return None
