"""The interface between the training loop and a sync policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.sync.telemetry import SyncHistory, SyncRecord, SyncStats


@dataclass(frozen=True)
class StepFacts:
    """One optimizer step (counted from 0), as every worker knows it in advance.

    `samples`: of the global batch; `micro_batches`: that this worker computes, at least one; `local_count`,
    `global_count`: loss terms (labelled samples, or labelled tokens) of this worker's share and of the whole global
    batch; `lr`: the learning rate; `compares_gradients`: whether the noise of the gradient is measured in this step.
    """

    step: int
    samples: int
    micro_batches: int
    local_count: int
    global_count: int
    lr: float
    compares_gradients: bool = False


class SyncPolicy(Protocol):
    """Decides when and how replicas synchronise. It knows models and optimizer steps, but not recipes or data."""

    #: The module for forward passes in training: the model, or a wrapper that averages gradients.
    forward_model: nn.Module

    #: True if workers train on while a collective is in flight: nothing else should make them wait for each other then.
    overlaps: bool = False

    #: Settings whose value follows from others, or from the size of the model, by name.
    resolved_settings: Mapping[str, int] = MappingProxyType({})

    #: True if this step's gradients are averaged by DDP, which can compare each worker's own with the average.
    averages_gradients: bool = False

    #: True if a forward pass is a collective, so that all workers need the same number of them.
    collective_forward: bool = False

    #: True if the backward pass in the latest `backward_pass` is a collective, which one worker cannot repeat alone.
    collective_backward: bool = False

    @property
    def replicated_keys(self) -> tuple[str, ...]:
        """The parts of a loop's state that are the same on all workers right after a synchronisation.

        Those of a sharded model are: each worker has its shards of the same tensors.
        """
        return ()

    def loss_divisor(self, facts: StepFacts) -> float:
        """The number by which this worker divides its loss sum."""
        return max(facts.local_count, 1)

    def backward_pass(self, facts: StepFacts, number: int) -> AbstractContextManager[Any]:
        """The context of the forward and backward pass of this worker's micro-batch `number`, counted from 0."""
        return nullcontext()

    def before_backward(self) -> None:
        """Called in that context, between the forward and the backward pass."""
        return

    def loss_sum(self, facts: StepFacts, losses: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """This worker's part of the sum of all micro-batches' losses, given those of its own; a scalar of `dtype`.

        May be a collective.
        """
        total = torch.zeros((), dtype=dtype, device=losses[0].device)
        for loss in losses:
            total += loss
        return total

    def before_optimizer_step(self, facts: StepFacts) -> bool:
        """Called after the last backward pass of a step; False if this worker skips the optimizer step."""
        return facts.local_count > 0  # without a gradient neither weight decay nor moments may change anything

    def own_gradient(self) -> Tensor | None:
        """|g|² of this worker's gradient before it was averaged, in a step that compares gradients; None if unknown."""
        return None

    def after_step(self, facts: StepFacts) -> bool:
        """Called on every worker after an optimizer step, also a skipped one; True if workers just synchronised."""
        ...

    def common_weights(self) -> AbstractContextManager[Any]:
        """Within it the model has the weights of the latest synchronisation, the same on all workers. A collective."""
        return nullcontext()

    def finish(self) -> bool:
        """Make all replicas equal at the end of training; True if that changed the common weights. A collective."""
        ...

    def stats(self) -> SyncStats:
        """Totals over the run so far."""
        ...

    def take_records(self) -> list[SyncRecord]:
        """The synchronisations of local phases that have finished since the last call."""
        return []

    def close(self) -> None:
        """Release wrappers that hold the process group, and shared memory. Only `stats` may be called afterwards."""
        return

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LocalPolicy(SyncPolicy):
    """A policy whose workers step alone; `history` has its synchronisations."""

    def __init__(self, model: nn.Module) -> None:
        self.forward_model = model
        self.history = SyncHistory()

    def stats(self) -> SyncStats:
        return self.history.stats

    def take_records(self) -> list[SyncRecord]:
        return self.history.take_records()
