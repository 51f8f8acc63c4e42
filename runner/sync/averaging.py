"""Averages over workers of many tensors by one collective: one flat vector, a wire format, optional overlap.

Below: the running statistics of workers that average only gradients.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.choices import Compress
from runner.sync.protocol import LocalPhase
from runner.sync.telemetry import SyncRecord, UpdateSpread

#: Elements to whose multiples each tensor is aligned, so that kernels read whole vector registers.
ALIGNMENT = 16

#: dtype on the wire, and a factor that lifts updates of 1e-5 above fp16's smallest numbers; bf16 has fp32's range.
_WIRE_FORMATS = {
    Compress.none: (None, 1.0),
    Compress.bf16: (torch.bfloat16, 1.0),
    Compress.fp16: (torch.float16, 1024.0),
}


def wire_dtype(compress: Compress) -> torch.dtype | None:
    """Of an all-reduce; None: no compression."""
    return _WIRE_FORMATS.get(compress, (None, 1.0))[0]


class FlatLayout:
    """The places of tensors of one dtype, one after the other in a vector. `bounds`: where each begins, and the end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.bounds = [0]
        for tensor in tensors:
            assert tensor.dtype is tensors[0].dtype, (tensor.dtype, tensors[0].dtype)
            self.bounds.append(self.bounds[-1] + -(-tensor.numel() // ALIGNMENT) * ALIGNMENT)

    def views(self, vector: Tensor) -> list[Tensor]:
        """The vector in pieces with the shapes and strides of the tensors."""
        return [self._view(vector, start, like) for start, like in zip(self.bounds, self._tensors, strict=False)]

    def _view(self, vector: Tensor, start: int, like: Tensor) -> Tensor:
        if like.is_contiguous():
            return vector[start : start + like.numel()].view(like.shape)
        # The strides of a new tensor like it have no gaps between elements. An optimizer's moments have the same.
        return vector.as_strided(like.shape, torch.empty_like(like).stride(), vector.storage_offset() + start)


class FlatTensors:
    """Tensors of one dtype and device, one after the other in the vector `memory`, with zeros as padding.

    `shared`: the tensors become views of the vector, so that a collective on it needs no copy. Otherwise `pack` copies
    them into it and `unpack` back: on torch_xla tensors cannot share memory.
    """

    def __init__(self, tensors: Sequence[Tensor], shared: bool) -> None:
        first, self._layout = tensors[0], FlatLayout(tensors)
        self.bounds = self._layout.bounds
        self._tensors = list(tensors)
        self._shared = shared
        self.memory = torch.zeros(self.bounds[-1], dtype=first.dtype, device=first.device)
        if shared:
            self._copy_in()
            for tensor, view in zip(self._tensors, self.views(), strict=True):
                tensor.data = view

    def views(self) -> list[Tensor]:
        """The vector in pieces with the shapes and strides of the tensors."""
        return self._layout.views(self.memory)

    def pack(self) -> Tensor:
        """The vector with the tensors' current values."""
        if not self._shared:
            self._copy_in()
        return self.memory

    def unpack(self) -> None:
        """Set the tensors to the vector's values."""
        if not self._shared:
            torch._foreach_copy_(self._tensors, self.views())

    def release(self) -> None:
        """Give each tensor its own memory again."""
        if self._shared:
            for tensor in self._tensors:
                tensor.data = tensor.data.clone()
            self._shared = False

    def _copy_in(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.views(), [tensor.detach() for tensor in self._tensors])


class VectorSum(Protocol):
    """The sum over all workers of a vector that each of them `put`s, and `get`s back in parts after `start`."""

    #: Size in bytes of the all-reduce in which a worker sends as much as in this sum.
    nbytes: int

    def put(self, place: slice, values: Tensor) -> None:
        """Set a part of this worker's vector."""
        ...

    def start(self, norms: Tensor) -> Callable[[], float | None]:
        """Start to sum over all workers, `norms` as well, in place and as they are. A collective.

        Returns a function that waits until it is done, and returns its seconds if the host knows them.
        """
        ...

    def get(self, place: slice) -> Tensor:
        """A part of the sum."""
        ...

    def state_dict(self, in_flight: bool) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class AllReduceSum:
    """By one all-reduce, in the memory of `vector` or in a format of 16 bits."""

    def __init__(self, backend: Backend, compress: Compress, overlapped: bool, vector: Tensor) -> None:
        dtype, self._scale = _WIRE_FORMATS[compress]
        self._backend, self._dtype, self._overlapped = backend, vector.dtype, overlapped
        compressed = dtype is not None and dtype is not vector.dtype
        self._wire = torch.zeros_like(vector, dtype=dtype) if compressed else vector
        self.nbytes = self._wire.nbytes

    def put(self, place: slice, values: Tensor) -> None:
        self._wire[place].copy_(values if self._scale == 1.0 else values * self._scale)

    def start(self, norms: Tensor) -> Callable[[], float | None]:
        return self._backend.start_all_reduce([self._wire, norms], async_op=self._overlapped)

    def get(self, place: slice) -> Tensor:
        values = self._wire[place].to(self._dtype)
        return values if self._scale == 1.0 else values / self._scale

    def state_dict(self, in_flight: bool) -> dict[str, Any]:
        return {"wire": self._wire if in_flight else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["wire"] is not None:
            self._wire.copy_(state["wire"])


class WeightedAverage:
    """The average of what workers put into `vector_sum` times their `weight`, in two calls: `start` and `finish`.

    `overlapped`: compute continues while the collective is in flight.
    """

    def __init__(self, backend: Backend, vector_sum: VectorSum, overlapped: bool) -> None:
        self._backend, self._sum, self._overlapped = backend, vector_sum, overlapped
        #: Row by worker: its weight, and the norms it passed to `start`.
        self._norms = torch.zeros(0)
        #: The phase whose average is in flight; None between `finish` and the next `start`.
        self.phase: LocalPhase | None = None
        self._wait: Callable[[], float | None] | None = None
        self._seconds: float | None = None
        self._stall_seconds = 0.0
        if overlapped:  # connect the workers now: it takes time, and later they would have to wait for it
            backend.start_all_reduce([torch.zeros(1, device=backend.device)], async_op=True)()

    def weight(self, phase: LocalPhase, dtype: torch.dtype) -> Tensor | float:
        """This worker's share of the loss terms of a local phase."""
        return self._backend.scalar(phase.weight(self._backend.world_size), dtype)

    def start(self, phase: LocalPhase, weight: Tensor | float, *norms: Tensor) -> None:
        """Start to sum what all workers have put. A collective.

        `weight`: of this worker in `phase`, with which it has multiplied its values. `norms`: numbers of this worker
        that all workers need for telemetry.
        """
        assert self.phase is None, "an average is still in flight"
        backend = self._backend
        own = [torch.zeros_like(norms[0]) + weight, *norms]
        self._norms = norms[0].new_zeros(backend.world_size, len(own))
        self._norms[backend.rank] = torch.stack(own)
        backend.mark_step()
        backend.synchronize()  # work queued before this point is not communication
        started = time.perf_counter()
        self._wait = self._sum.start(self._norms)
        self._stall_seconds = time.perf_counter() - started
        self.phase = phase
        if not self._overlapped:
            self._wait_until_done()

    def finish(self) -> LocalPhase:
        """Wait until the average is there. Returns the phase that was passed to `start`."""
        assert self.phase is not None, "no average is in flight"
        self._wait_until_done()
        phase, self.phase = self.phase, None
        return phase

    def record(self, phase: LocalPhase, *mean_norms: Tensor) -> SyncRecord:
        """The latest average for telemetry; `mean_norms`: of the average, in the order of the norms given to `start`.

        The first is the norm of updates, the last that of weight changes; usually they are the same.
        """
        weights, *norms = self._norms.unbind(1)
        spreads = [UpdateSpread(weights, own, mean) for own, mean in zip(norms, mean_norms, strict=True)]
        size = self._sum.nbytes + self._norms.nbytes
        seconds, stalled = self._seconds, self._stall_seconds
        return SyncRecord(phase.last + 1, phase.steps, size, seconds, stalled, spreads[-1], spreads[0])

    def _wait_until_done(self) -> None:
        if self._wait is None:
            return
        if not self._backend.compiles:  # there the host does not wait for anything here
            self._backend.synchronize()
        started = time.perf_counter()
        self._seconds = self._wait()
        self._stall_seconds += time.perf_counter() - started
        self._wait = None

    def state_dict(self) -> dict[str, Any]:
        """With the average in flight, if there is one: this waits for it."""
        self._wait_until_done()
        phase = dataclasses.asdict(self.phase) if self.phase is not None else None
        waited = {"seconds": self._seconds, "stall_seconds": self._stall_seconds}
        return {"sum": self._sum.state_dict(phase is not None), "norms": self._norms, "phase": phase, **waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum.load_state_dict(state["sum"])
        self._norms = state["norms"].to(self._backend.device)
        self.phase = LocalPhase(**state["phase"]) if state["phase"] is not None else None
        # Checkpoints of earlier versions do not have the seconds.
        self._wait, self._seconds, self._stall_seconds = None, state.get("seconds"), state.get("stall_seconds", 0.0)


class RunningStatistics:
    """Floating-point buffers, such as those of batch normalisation, of workers that average gradients.

    They differ between workers during training: averaging gradients does not make them equal.
    """

    def __init__(self, buffers: Sequence[Tensor], backend: Backend) -> None:
        self._backend = backend
        self._buffers = list(buffers) if backend.world_size > 1 else []
        #: At the start. The change since is averaged, so that constant buffers keep their exact values.
        self.initial = [buffer.clone() for buffer in self._buffers]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the buffers have their average. A collective."""
        own = [buffer.clone() for buffer in self._buffers]
        self.average()
        yield
        for buffer, before in zip(self._buffers, own, strict=True):
            buffer.copy_(before)
        if own:
            self._backend.mark_step()

    @torch.no_grad()
    def average(self) -> None:
        """Average the buffers over workers, in place. A collective."""
        if not self._buffers:
            return
        torch._foreach_sub_(self._buffers, self.initial)
        flat = FlatTensors(self._buffers, shared=False)
        self._backend.mark_step()
        self._backend.all_reduce(flat.pack()).div_(self._backend.world_size)
        flat.unpack()
        torch._foreach_add_(self._buffers, self.initial)
        self._backend.mark_step()

    def load(self, initial: Sequence[Tensor]) -> None:
        """Restore what was `initial` in the run that continues."""
        for buffer, saved in zip(self.initial, initial, strict=True):
            buffer.copy_(saved)
