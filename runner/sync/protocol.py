"""What the loop asks of a sync policy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from runner.sync.telemetry import SyncRecord


@dataclass(frozen=True)
class SyncStats:
    """What one worker put into collectives for training so far.

    `seconds`: in which one was under way; `stall_seconds`: in which compute stood still for one. None where the host
    cannot tell, because they are part of a compiled program.
    """

    synchronisations: int
    bytes: int
    seconds: float | None
    stall_seconds: float | None

    def __add__(self, other: SyncStats) -> SyncStats:
        def total(a: float | None, b: float | None) -> float | None:
            return None if a is None or b is None else a + b

        return SyncStats(
            self.synchronisations + other.synchronisations,
            self.bytes + other.bytes,
            total(self.seconds, other.seconds),
            total(self.stall_seconds, other.stall_seconds),
        )


@dataclass(frozen=True)
class StepFacts:
    """What a policy is told of an optimizer step (counted from 0), on every worker.

    `local_count`, `global_count`: loss terms (labelled samples, or labelled tokens) of this worker's share and of the
    whole global batch; `lr`: the learning rate.
    """

    step: int
    local_count: int
    global_count: int
    lr: float


class SyncPolicy(Protocol):
    """Brings replicas together. It knows models and optimizer steps, and nothing of recipes or data."""

    @property
    def communicates_in_backward(self) -> bool:
        """Whether collectives run within the backward pass, which may have to wait for them."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether workers go on while an average travels: nothing else should make them wait for each other, then."""
        ...

    @property
    def forward_model(self) -> nn.Module:
        """What forward passes of training go through: the model itself, or a wrapper that averages gradients."""
        ...

    def loss_divisor(self, facts: StepFacts) -> float:
        """What this worker divides its loss sum by."""
        ...

    def backward_pass(self, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch; `last`: of this worker's optimizer step."""
        ...

    def takes_part(self, facts: StepFacts) -> bool:
        """Whether this worker runs the optimizer step at all."""
        ...

    def before_optimizer_step(self, facts: StepFacts) -> None:
        """Called after the last backward pass of a step that this worker takes part in, before gradients are used."""
        ...

    def after_step(self, facts: StepFacts) -> bool:
        """Called on every worker after an optimizer step; True if common weights were reached just now."""
        ...

    def common_weights(self) -> AbstractContextManager[Any]:
        """Within it the model has the weights that all share since `after_step` last said True. A collective."""
        ...

    def finish(self) -> bool:
        """Make all replicas equal at the end of training; True if that changed what the common weights are."""
        ...

    def agree_on_scale(self, scale: float) -> float:
        """The fp16 loss scale to go on with after a synchronisation."""
        ...

    def stats(self) -> SyncStats: ...

    def take_records(self) -> list[SyncRecord]:
        """The synchronisations of local phases that ended since the last time."""
        ...

    def close(self) -> None:
        """Let go of wrappers that hold on to the process group, and give tensors storages of their own."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
