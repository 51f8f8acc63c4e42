"""Sharded training: FSDP2 gathers weights and sums gradients inside of the forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from runner.backends import Backend
from runner.sync.protocol import StepFacts, SyncPolicy
from runner.sync.running_statistics import RunningStatistics
from runner.sync.telemetry import SyncStats


class FullySharded(SyncPolicy):
    """k = 1 for a model whose weights are sharded over the workers.

    Gradients are averaged in every micro-batch, since whole ones would need the memory of a whole model until the last.
    `bytes_per_pass`: that one micro-batch moves.
    """

    collective_forward = True

    def __init__(self, model: nn.Module, buffers: Sequence[Tensor], backend: Backend, bytes_per_pass: int) -> None:
        self.forward_model = model
        self._backend, self._bytes_per_pass = backend, bytes_per_pass
        self._statistics = RunningStatistics(buffers, backend)
        self._steps = self._passes = 0

    @property
    def replicated_keys(self) -> tuple[str, ...]:
        return ("model", "optimizer", "best")

    def loss_divisor(self, facts: StepFacts) -> float:
        return facts.averaging_divisor(self._backend.world_size)

    def backward_pass(self, facts: StepFacts, number: int) -> AbstractContextManager[Any]:
        self._passes += 1
        return nullcontext()

    def before_optimizer_step(self, facts: StepFacts) -> bool:
        return True  # each worker has its part of the averaged gradients

    def after_step(self, facts: StepFacts) -> bool:
        self._steps += 1
        return True

    def common_weights(self) -> AbstractContextManager[Any]:
        return self._statistics.averaged()

    def finish(self) -> bool:
        self._statistics.average()
        return False

    def stats(self) -> SyncStats:
        if self._backend.world_size == 1:
            return SyncStats()
        return SyncStats(self._steps, self._passes * self._bytes_per_pass, None, None)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "passes": self._passes, "initial_buffers": self._statistics.initial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._passes = state["steps"], state["passes"]
        self._statistics.load(state["initial_buffers"])
