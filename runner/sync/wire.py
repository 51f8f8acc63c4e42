"""Sums over workers, in the form in which numbers travel."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runner.backends import Backend
from runner.choices import Compress

#: The dtype on the way, and the factor that lifts updates of 1e-5 out of fp16's coarse end; bf16 has fp32's range.
_FORMS = {Compress.none: (None, 1.0), Compress.bf16: (torch.bfloat16, 1.0), Compress.fp16: (torch.float16, 1024.0)}


def wire_dtype(compress: Compress) -> torch.dtype | None:
    """None: as they are."""
    return _FORMS[compress][0]


@dataclass
class Transfer:
    """A sum under way. `vector` holds it once `arrive` has returned."""

    vector: Tensor
    bytes: int
    _wait: Callable[[], float | None] = field(repr=False)
    _unpack: Callable[[], None] = field(repr=False)
    seconds: float | None = None
    stall_seconds: float = 0.0
    arrived: bool = False

    def arrive(self) -> None:
        """Wait for the sum, unless it is here."""
        if self.arrived:
            return
        start = time.perf_counter()
        self.seconds = self._wait()
        self.stall_seconds += time.perf_counter() - start
        self._unpack()
        self.arrived = True


class Wire:
    """Sums vectors of one length and dtype over all workers, compressed on the way if asked for."""

    def __init__(self, backend: Backend, compress: Compress) -> None:
        self._backend = backend
        self._dtype, self._scale = _FORMS[compress]
        self._buffer: Tensor | None = None

    def open(self) -> None:
        """Make the connections over which sums travel beside compute, before there is one to send. A collective."""
        self._backend.start_all_reduce(torch.zeros(1, device=self._backend.device), beside=True)()

    def send(self, vector: Tensor, wait: bool) -> Transfer:
        """Start to sum `vector`, which must be left alone until the sum has arrived in its place; `wait` for it."""
        travelling = self._compressed(vector)

        def unpack() -> None:
            if travelling is not vector:
                vector.copy_(travelling)
                if self._scale != 1.0:
                    vector.div_(self._scale)

        size = travelling.numel() * travelling.element_size()
        start = time.perf_counter()
        arrival = self._backend.start_all_reduce(travelling, beside=not wait)
        transfer = Transfer(vector, size, arrival, unpack, stall_seconds=time.perf_counter() - start)
        if wait:
            transfer.arrive()
        return transfer

    def _compressed(self, vector: Tensor) -> Tensor:
        if self._dtype is None or self._dtype == vector.dtype:
            return vector
        if self._buffer is None:
            self._buffer = torch.empty_like(vector, dtype=self._dtype)
        scaled = vector if self._scale == 1.0 else vector * self._scale
        return self._buffer.copy_(scaled)


def already_here(vector: Tensor, size: int) -> Transfer:
    """A sum, of `size` bytes on its way, that arrived before the training was interrupted."""
    return Transfer(vector, size, lambda: 0.0, lambda: None, seconds=0.0, arrived=True)
