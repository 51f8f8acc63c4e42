"""The interface between the training loop and a device with its links to other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from runner.data.recipe import Batch
from runner.folder.record import Compilations


@dataclass(frozen=True)
class World:
    """A worker's place among `world_size` workers, which find each other through `store`.

    `local_rank`, `local_workers`: its number on its machine, and how many are there.
    """

    rank: int
    world_size: int
    local_rank: int
    local_workers: int
    store: dist.Store


class Event(Protocol):
    """A point in the device's time; torch.cuda.Event is one."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to a later event, once the device has been waited for."""
        ...


class Backend(Protocol):
    """One worker's device and its collectives. All workers call the same collectives in the same order."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    #: True if the device compiles whole steps, anew for every new shape. Then fused kernels are not available, tensors
    #: cannot share memory, and a number that changes from step to step must be a tensor (see `scalar`).
    compiles: bool = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor`, on the device, over all workers, in place; returns it."""
        ...

    def start_all_reduce(self, tensors: Sequence[Tensor], async_op: bool) -> Callable[[], float | None]:
        """Start to sum tensors on the device in place. The returned function waits, and returns the seconds it took.

        `async_op`: compute and other collectives continue meanwhile if the device can. Seconds it cannot measure are
        None.
        """
        ...

    def start_sum(self, numbers: Sequence[Tensor], async_op: bool) -> Callable[[], list[float]]:
        """Sum these numbers, in tensors on the device or the CPU, over all workers in fp64; the function waits for it.

        Waits for the device. `async_op`: workers do not wait for each other, if the device can do that.
        """
        ...

    def new_group(self) -> dist.ProcessGroup:
        """A process group of all workers, for collectives that must not wait for others. A collective.

        torch_xla has none.
        """
        ...

    def start_host_sum(self, numbers: Sequence[float], async_op: bool) -> Callable[[], list[float]]:
        """Sum numbers of the host over all workers; the function waits for it. Does not wait for the device.

        `async_op`: workers do not wait for each other before that.
        """
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all workers, by rank; tensors have to be on the CPU."""
        ...

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every worker."""
        ...

    def feed(self, batches: Iterable[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield the batches on the device, copied ahead of their use where that is possible."""
        ...

    def scalar(self, value: float, dtype: torch.dtype) -> Tensor | float:
        """A number that changes from step to step, in a form with which a step stays the same program."""
        return value

    def forward_pass(self) -> AbstractContextManager[object]:
        """The context of a forward pass. On a device that compiles, models must not branch on tensor values in it."""
        return nullcontext()

    def mark_step(self) -> None:
        """End a program here, so that the same program comes back in other steps."""
        return

    def synchronize(self) -> None:
        """Wait until the device has done all work queued before `mark_step`, so that it can be timed."""
        return

    def record_event(self) -> Event | None:
        """The device's current point in time; None if operations of a step cannot be told apart."""
        ...

    def compilations(self) -> Compilations | None:
        """Totals of this process; None if the device does not compile."""
        return None

    def peak_memory_bytes(self) -> int | None:
        """The most memory that this worker has needed at once on its device; None if unknown."""
        return None

    def seed(self, seed: int) -> None:
        """Seed the device's own random generator, unless torch.manual_seed does."""
        return

    def random_state(self) -> Tensor | int | None:
        """The state of the device's own random generator, if it has one."""
        return None

    def restore_random_state(self, state: Tensor | int | None) -> None:
        """The inverse of `random_state`."""
        return

    def wait_for_all(self, value: Any) -> list[Any]:
        """The values of all workers, by rank, some of which may take far longer than a collective may last."""
        ...

    def close(self) -> None:
        """Leave the process group. Every DistributedDataParallel wrapper has to be gone."""
        ...
