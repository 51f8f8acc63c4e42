"""Averages of updates over workers, weighted by what each was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.choices import Compress
from runner.sync.books import Books
from runner.sync.flat import parts
from runner.sync.replica import Replica
from runner.sync.telemetry import Spread, slots, tell
from runner.sync.window import Window
from runner.sync.wire import Transfer, Wire

#: Called with each part of a vector, and with where it is to be written, or what was received of it.
Work = Callable[[slice, Tensor], None]


@dataclass
class _Travelling:
    transfer: Transfer
    window: Window
    length: Tensor


class Exchange:
    """Averages one vector of a replica's layout at a time, and books it.

    The vector is made, weighted, compressed and taken apart again in parts that stay in the cache: memory is read once
    where one operation after the other would read it five times. `beside`: it travels while training goes on.
    """

    def __init__(self, backend: Backend, compress: Compress, replica: Replica, beside: bool) -> None:
        memory = replica.pack()
        self._backend, self._beside = backend, beside
        self._wire = Wire(backend, compress, memory, in_place=not beside)
        self._tail = slice(replica.tail, replica.tail + slots(backend.world_size))
        # No part lies in two regions, since these are treated differently. Drift is told of the first: the weights.
        self._parts = [
            (part, start == 0) for start, stop in replica.regions for part in parts(start, stop, memory.device)
        ]
        self._travelling: _Travelling | None = None
        self.books = Books()
        if beside:
            self._wire.open()

    @property
    def departed_after(self) -> int | None:
        """The step after which the vector under way left; None if none is."""
        return self._travelling.window.last if self._travelling is not None else None

    @torch.no_grad()
    def depart(self, write: Work, window: Window, length: Tensor) -> None:
        """Start to average what `write` writes, over what `window` was; `length`: the norm that drift is a share of."""
        assert self._travelling is None
        weight = self._backend.number(window.weight(self._backend.world_size), length.dtype)
        squared = torch.zeros_like(length)
        for part, measured in self._parts:
            numbers = self._wire.part(part)
            write(part, numbers)
            if measured:
                squared += torch.dot(numbers, numbers)
            self._wire.put(part, numbers.mul_(weight))
        told = self._wire.part(self._tail)
        tell(told, self._backend.rank, weight, squared.sqrt() / length)
        self._wire.put(self._tail, told)
        self._travelling = _Travelling(self._wire.send(wait=not self._beside), window, length)

    @torch.no_grad()
    def arrive(self, read: Work) -> Window:
        """Wait for the average, give it to `read`; the window it is of."""
        assert self._travelling is not None
        transfer, window, length = self._travelling.transfer, self._travelling.window, self._travelling.length
        self._travelling = None
        transfer.arrive()
        told = self._wire.get(self._tail).clone()
        squared = torch.zeros_like(length)
        for part, measured in self._parts:
            numbers = self._wire.get(part)
            if measured:
                squared += torch.dot(numbers, numbers)
            read(part, numbers)
        spread = Spread(told, squared.sqrt() / length)
        self.books.enter(transfer, window, drift_of=spread, cosine_of=spread)
        return window

    def state_dict(self) -> dict[str, Any]:
        """With what is under way, for which this waits."""
        there = None
        if self._travelling is not None:
            self._travelling.transfer.arrive()
            there = {
                "vector": self._wire.buffer,
                "bytes": self._travelling.transfer.bytes,
                "window": self._travelling.window.as_plain(),
                "length": self._travelling.length,
            }
        return {"books": self.books.state_dict(), "travelling": there}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.books.load_state_dict(state["books"])
        self._travelling = None
        if (there := state["travelling"]) is not None:
            self._wire.buffer.copy_(there["vector"])
            window, length = Window(**there["window"]), there["length"].to(self._wire.buffer.device)
            self._travelling = _Travelling(Transfer.ended(there["bytes"], self._backend), window, length)
