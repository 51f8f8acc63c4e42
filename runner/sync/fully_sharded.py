"""Sharded training: FSDP2 gathers weights and sums gradients inside of the forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from runner.backends import Backend
from runner.sync.protocol import StepFacts
from runner.sync.running_statistics import AveragedGradients
from runner.sync.telemetry import SyncStats


class FullySharded(AveragedGradients):
    """k = 1 for a model whose weights are sharded over the workers.

    Gradients are averaged in every micro-batch, since whole ones would need the memory of a whole model until the last.
    `bytes_per_pass`: that one micro-batch moves.
    """

    collective_forward = True

    def __init__(self, model: nn.Module, buffers: Sequence[Tensor], backend: Backend, bytes_per_pass: int) -> None:
        super().__init__(model, buffers, backend)
        self._bytes_per_pass, self._passes = bytes_per_pass, 0

    @property
    def replicated_keys(self) -> tuple[str, ...]:
        return ("model", "optimizer", "best")

    def backward_pass(self, facts: StepFacts, number: int) -> AbstractContextManager[Any]:
        self._passes += 1
        return nullcontext()

    def stats(self) -> SyncStats:
        if self._backend.world_size == 1:
            return SyncStats()
        return SyncStats(self._steps, self._passes * self._bytes_per_pass, None, None)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "passes": self._passes, "initial_buffers": self._statistics.initial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._passes = state["steps"], state["passes"]
        self._statistics.load(state["initial_buffers"])
