"""Sums over workers, in the form in which numbers travel."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.choices import Compress

#: The dtype on the way, and the factor that lifts updates of 1e-5 out of fp16's coarse end; bf16 has fp32's range.
_FORMS = {Compress.none: (None, 1.0), Compress.bf16: (torch.bfloat16, 1.0), Compress.fp16: (torch.float16, 1024.0)}


def wire_dtype(compress: Compress) -> torch.dtype | None:
    """None: as they are."""
    return _FORMS[compress][0]


@dataclass
class Transfer:
    """A sum under way, and what it cost so far."""

    bytes: int
    _backend: Backend = field(repr=False)
    _wait: Callable[[], float | None] = field(repr=False)
    seconds: float | None = None
    stall_seconds: float = 0.0
    arrived: bool = False

    def arrive(self) -> None:
        """Wait for the sum, unless it is here."""
        if self.arrived:
            return
        if not self._backend.compiles:  # whose host waits for nothing here
            self._backend.synchronize()
        start = time.perf_counter()
        self.seconds = self._wait()
        self.stall_seconds += time.perf_counter() - start
        self.arrived = True

    @staticmethod
    def ended(size: int, backend: Backend) -> Transfer:
        """One of `size` bytes that arrived before the training was interrupted."""
        return Transfer(size, backend, lambda: 0.0, seconds=0.0, arrived=True)


class Wire:
    """A vector that is summed over all workers, and filled and read part by part.

    `memory`: a vector of the same length, in the form in which numbers are worked with. It is itself what travels if
    it may (`in_place`) and need not be compressed.
    """

    def __init__(self, backend: Backend, compress: Compress, memory: Tensor, in_place: bool) -> None:
        dtype, self._scale = _FORMS[compress]
        self._backend = backend
        self._compressed = dtype is not None and dtype is not memory.dtype
        travels_itself = in_place and not self._compressed
        self.buffer = memory if travels_itself else torch.zeros_like(memory, dtype=dtype or memory.dtype)
        self._scratch = torch.empty(0, dtype=memory.dtype, device=memory.device)

    def part(self, part: slice) -> Tensor:
        """Where this part's numbers are to be written, before `put`."""
        if not self._compressed:
            return self.buffer[part]
        length = part.stop - part.start
        if len(self._scratch) < length:
            self._scratch = torch.empty(length, dtype=self._scratch.dtype, device=self._scratch.device)
        return self._scratch[:length]

    def put(self, part: slice, numbers: Tensor) -> None:
        """Send these numbers, which are in what `part` returned, in this part of the vector."""
        if self._compressed:
            self.buffer[part].copy_(numbers if self._scale == 1.0 else numbers.mul_(self._scale))

    def get(self, part: slice) -> Tensor:
        """This part of the sum, until another is asked for."""
        if not self._compressed:
            return self.buffer[part]
        numbers = self.part(part).copy_(self.buffer[part])
        return numbers if self._scale == 1.0 else numbers.div_(self._scale)

    def open(self) -> None:
        """Make the connections over which sums travel beside compute, before there is one to send. A collective."""
        self._backend.start_all_reduce(torch.zeros(1, device=self.buffer.device), beside=True)()

    def send(self, wait: bool) -> Transfer:
        """Start to sum the vector, which is to be left alone until the sum has arrived; `wait` for it."""
        size = self.buffer.numel() * self.buffer.element_size()
        self._backend.mark_step()
        self._backend.synchronize()  # what was asked of the device before is no communication
        start = time.perf_counter()
        arrival = self._backend.start_all_reduce(self.buffer, beside=not wait)
        transfer = Transfer(size, self._backend, arrival, stall_seconds=time.perf_counter() - start)
        if wait:
            transfer.arrive()
        return transfer
