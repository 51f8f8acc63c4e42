"""What the loop asks of a device and of the links between workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from runner.data.recipe import Batch


@dataclass(frozen=True)
class Compilations:
    """Programs that a process has compiled so far, the seconds it took, and those it found in a cache on disk."""

    count: int
    seconds: float
    from_cache: int


class Backend(Protocol):
    """One worker's device and its collectives. Every collective is called by all workers, in the same order."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    #: Where a computation can be tried once without compiling it: the device itself, or the CPU.
    eager_device: torch.device

    #: Whether whole steps are compiled, anew for every new shape: torch's fused kernels are not for such a device, and
    #: two tensors never share their memory.
    compiles: bool

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor`, on the device, over all workers, in place; returns it."""
        ...

    def start_all_reduce(self, tensor: Tensor, beside: bool) -> Callable[[], float | None]:
        """Start to sum `tensor`, on the device, in place; what is returned waits for it and says its seconds.

        `beside`: other collectives and compute go on meanwhile, where the device can. None where seconds are unknown.
        """
        ...

    def sum_numbers(self, numbers: Sequence[Tensor]) -> list[float]:
        """Each of these scalars, on the device or the CPU, summed over all workers in fp64. Waits for the device."""
        ...

    def start_sum_numbers(self, numbers: Sequence[Tensor]) -> Callable[[], list[float]]:
        """`sum_numbers` without making the workers wait for each other, where the device can; wait by the call."""
        ...

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Every worker's rows on the CPU, by rank; the number of rows may differ from worker to worker."""
        ...

    def share(self, value: Any) -> Any:
        """Rank 0's JSON-ready value, on every worker."""
        ...

    def data_parallel(self, model: nn.Module, wire: torch.dtype | None) -> nn.Module:
        """The model wrapped so that backward averages gradients over workers; itself where the next method does.

        `wire`: the dtype in which they travel, None for their own.
        """
        ...

    def average_gradients(self, parameters: Sequence[nn.Parameter], wire: torch.dtype | None) -> None:
        """Average gradients over workers after the last backward pass, unless the wrapper has done so already."""
        ...

    def feed(self, batches: Iterable[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        """The same batches on the device, sent there ahead of their use where that is possible."""
        ...

    def number(self, value: float, dtype: torch.dtype) -> Tensor | float:
        """A number that changes from step to step, in the form that leaves a step the same program."""
        ...

    def forward_pass(self) -> AbstractContextManager[object]:
        """The context of a forward pass, in which a model is told if it must not look at its tensors' values."""
        ...

    def mark_step(self) -> None:
        """What was asked of the device so far is a program of its own, which comes back in other steps."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done what came before `mark_step`: a clock read afterwards means something."""
        ...

    def stamp(self) -> Any:
        """The device's time when it will have come to this point; None where that is no point in time."""
        ...

    def seconds_between(self, start: Any, end: Any) -> float:
        """Between two stamps, once the device has been waited for."""
        ...

    def compilations(self) -> Compilations | None:
        """What this process has compiled so far; None on a device whose programs are not compiled while training."""
        ...

    def seed(self, seed: int) -> None:
        """Seed what random numbers the device draws by itself, if torch.manual_seed does not reach it."""
        ...

    def random_state(self) -> Tensor | int | None:
        """The state of the device's own generator, if it has one."""
        ...

    def restore_random_state(self, state: Tensor | int | None) -> None:
        """The inverse of `random_state`."""
        ...

    def barrier(self) -> None: ...

    def close(self) -> None:
        """Leave the world. No data-parallel wrapper may be alive any more."""
        ...
