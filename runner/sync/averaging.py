"""Weighted averages over workers: one collective on a vector, in a format for the wire, blocking or overlapped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.choices import Compress
from runner.sync.protocol import StepFacts
from runner.sync.telemetry import SyncRecord, UpdateSpread

#: dtype on the wire, and a factor that lifts updates of 1e-5 above fp16's smallest numbers; bf16 has fp32's range.
_WIRE_FORMATS = {
    Compress.none: (None, 1.0),
    Compress.bf16: (torch.bfloat16, 1.0),
    Compress.fp16: (torch.float16, 1024.0),
}


def wire_dtype(compress: Compress) -> torch.dtype | None:
    """The dtype of what is all-reduced; None: no compression."""
    return _WIRE_FORMATS.get(compress, (None, 1.0))[0]


@dataclass
class LocalPhase:
    """The optimizer steps since the last synchronisation.

    `last`: the latest step, counted from 0. `count`, `global_count`: loss terms of this worker and of all workers.
    """

    steps: int = 0
    last: int = -1
    count: int = 0
    global_count: int = 0
    lr_sum: float = 0.0

    def add(self, facts: StepFacts) -> None:
        self.steps += 1
        self.last = facts.step
        self.count += facts.local_count
        self.global_count += facts.global_count
        self.lr_sum += facts.lr

    def weight(self, world_size: int) -> float:
        """This worker's weight in an average. No communication: the data order fixes every worker's count."""
        return self.count / self.global_count if self.global_count else 1 / world_size

    @property
    def mean_lr(self) -> float:
        return self.lr_sum / self.steps


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
    """Average by one all-reduce, in the memory of `vector` or in a format of 16 bits."""

    def __init__(self, backend: Backend, compress: Compress, vector: Tensor, overlapped: bool) -> None:
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
    """The average over workers of vectors that they `put` times their `weight`, in two calls: `start` and `finish`.

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

    def put(self, place: slice, values: Tensor) -> None:
        """Set a part of this worker's vector, its values times its weight."""
        self._sum.put(place, values)

    def get(self, place: slice) -> Tensor:
        """A part of the latest average."""
        return self._sum.get(place)

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
        """The state with the average in flight, if there is one: this waits for it."""
        self._wait_until_done()
        phase = dataclasses.asdict(self.phase) if self.phase is not None else None
        waited = {"seconds": self._seconds, "stall_seconds": self._stall_seconds}
        return {"sum": self._sum.state_dict(phase is not None), "norms": self._norms, "phase": phase, **waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum.load_state_dict(state["sum"])
        self._norms = state["norms"].to(self._backend.device)
        self.phase = LocalPhase(**state["phase"]) if state["phase"] is not None else None
        self._wait, self._seconds, self._stall_seconds = None, state["seconds"], state["stall_seconds"]
