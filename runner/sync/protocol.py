"""What the loop asks of a sync policy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True)
class SyncStats:
    """What one worker put into collectives for training so far, and the seconds in which one was under way.

    `seconds`: None where the host cannot tell, because they are part of a compiled program.
    """

    synchronisations: int
    bytes: int
    seconds: float | None


class SyncPolicy(Protocol):
    """Brings replicas together. It knows models and optimizer steps, and nothing of recipes or data.

    Counts are of loss terms: labelled samples, or labelled tokens.
    """

    #: What forward passes of training go through: the model itself, or a wrapper that averages gradients.
    forward_model: nn.Module

    def loss_divisor(self, local_count: int, global_count: int) -> float:
        """What this worker divides its loss sum by, given the counts of its share and of the whole global batch."""
        ...

    def backward_pass(self, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch; `last`: of this worker's optimizer step."""
        ...

    def takes_part(self, local_count: int) -> bool:
        """Whether a worker with this many loss terms runs the optimizer step at all."""
        ...

    def before_optimizer_step(self) -> None:
        """Called after the last backward pass of a step that this worker takes part in, before gradients are used."""
        ...

    def after_step(self, step: int, local_count: int, global_count: int) -> bool:
        """Called on every worker after optimizer step `step` (from 0); True if replicas are equal now."""
        ...

    def finish(self) -> None:
        """Make all replicas equal at the end of training."""
        ...

    def agree_on_scale(self, scale: float) -> float:
        """The fp16 loss scale to go on with after a synchronisation."""
        ...

    def stats(self) -> SyncStats: ...

    def close(self) -> None:
        """Let go of wrappers that hold on to the process group."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
