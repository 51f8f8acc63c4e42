"""Averages of updates over workers, weighted by what each was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.backends import Backend
from runner.sync.books import Books
from runner.sync.telemetry import Spread, relative, slots, tell
from runner.sync.window import Window
from runner.sync.wire import Transfer, Wire, already_here


@dataclass
class _Travelling:
    transfer: Transfer
    window: Window
    length: Tensor


class Exchange:
    """Averages vectors, one at a time, and books them.

    A vector ends with room for a few numbers, from `tail` on, by which drift is told; its first `measured` elements are
    what it is told of.
    """

    def __init__(self, backend: Backend, wire: Wire, measured: int, tail: int) -> None:
        self._backend, self._wire, self._measured, self._tail = backend, wire, measured, tail
        self._travelling: _Travelling | None = None
        self.books = Books()

    @property
    def departed_after(self) -> int | None:
        """The step after which the vector under way left; None if none is."""
        return self._travelling.window.last if self._travelling is not None else None

    @torch.no_grad()
    def depart(self, vector: Tensor, window: Window, length: Tensor, wait: bool) -> None:
        """Start to average `vector`, in place, over what `window` was; `length`: the norm that drift is a share of."""
        assert self._travelling is None
        weight = self._backend.number(window.weight(self._backend.world_size), vector.dtype)
        share = relative(vector[: self._measured], length)
        vector[: self._tail].mul_(weight)
        tell(self._slots(vector), self._backend.rank, weight, share)
        self._travelling = _Travelling(self._wire.send(vector, wait), window, length)

    @torch.no_grad()
    def arrive(self) -> tuple[Tensor, Window]:
        """Wait for the average: the vector, and the window it is of."""
        assert self._travelling is not None
        transfer, window, length = self._travelling.transfer, self._travelling.window, self._travelling.length
        self._travelling = None
        transfer.arrive()
        vector = transfer.vector
        spread = Spread(self._slots(vector).clone(), relative(vector[: self._measured], length))
        self.books.enter(transfer, window, drift_of=spread, cosine_of=spread)
        return vector, window

    def _slots(self, vector: Tensor) -> Tensor:
        return vector[self._tail : self._tail + slots(self._backend.world_size)]

    def state_dict(self) -> dict[str, Any]:
        """With what is under way, for which this waits."""
        there = None
        if self._travelling is not None:
            transfer = self._travelling.transfer
            transfer.arrive()
            there = {
                "vector": transfer.vector,
                "bytes": transfer.bytes,
                "window": self._travelling.window.as_plain(),
                "length": self._travelling.length,
            }
        return {"books": self.books.state_dict(), "travelling": there}

    def load_state_dict(self, state: dict[str, Any], vector: Tensor) -> None:
        """`vector`: that is to hold what was under way, if anything was."""
        self.books.load_state_dict(state["books"])
        self._travelling = None
        if (there := state["travelling"]) is not None:
            vector.copy_(there["vector"])
            transfer = already_here(vector, there["bytes"])
            self._travelling = _Travelling(transfer, Window(**there["window"]), there["length"].to(vector.device))
