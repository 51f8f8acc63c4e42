"""What the loop asks of a device and of the links between workers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Backend(Protocol):
    """One worker's device and its collectives. Every collective is called by all workers, in the same order."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all workers, in place; returns it."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's `tensor` into every worker's, in place; returns it."""
        ...

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Every worker's rows on the CPU, by rank; the number of rows may differ from worker to worker."""
        ...

    def share(self, value: Any) -> Any:
        """Rank 0's JSON-ready value, on every worker."""
        ...

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """The model wrapped so that backward averages gradients over workers."""
        ...

    def barrier(self) -> None: ...

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that a clock read afterwards means something."""
        ...

    def close(self) -> None:
        """Leave the world. No data-parallel wrapper may be alive any more."""
        ...
