"""Something that goes on in a thread beside a block of code, and ends with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Background:
    """A thread for as long as a `with` block lasts. `work` is given the event that says that the block has ended."""

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=work, args=(self._done,), name=name, daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
