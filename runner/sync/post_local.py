"""Synchronous training first, local steps later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from runner.sync.protocol import StepFacts, SyncPolicy
from runner.sync.telemetry import SyncRecord, SyncStats


class PostLocal(SyncPolicy):
    """Post-local SGD (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD"): synchronous first, local later.

    `make_local` is called before step `first_local`, when weights and moments of all replicas are equal.
    """

    def __init__(self, synchronous: SyncPolicy, make_local: Callable[[], SyncPolicy], first_local: int) -> None:
        self._make_local, self._first_local = make_local, first_local
        self._is_local = False
        self._earlier_stats = SyncStats()
        self._use(synchronous)

    def _use(self, policy: SyncPolicy) -> None:
        self._policy = policy
        self.forward_model, self.overlaps = policy.forward_model, policy.overlaps
        self.averages_gradients, self.resolved_settings = policy.averages_gradients, policy.resolved_settings

    def _become_local(self) -> None:
        self._earlier_stats = self._policy.stats()
        self._policy.close()
        self._use(self._make_local())
        self._is_local = True

    @property
    def replicated_keys(self) -> tuple[str, ...]:
        return self._policy.replicated_keys

    def loss_divisor(self, facts: StepFacts) -> float:
        return self._policy.loss_divisor(facts)

    def backward_pass(self, facts: StepFacts, number: int) -> AbstractContextManager[Any]:
        context = self._policy.backward_pass(facts, number)
        self.collective_backward = self._policy.collective_backward
        return context

    def before_backward(self) -> None:
        self._policy.before_backward()

    def before_optimizer_step(self, facts: StepFacts) -> bool:
        return self._policy.before_optimizer_step(facts)

    def own_gradient(self) -> Tensor | None:
        return self._policy.own_gradient()

    def after_step(self, facts: StepFacts) -> bool:
        synchronised = self._policy.after_step(facts)
        if not self._is_local and facts.step + 1 >= self._first_local:  # above: resumed there, from one worker
            self._policy.finish()
            self._become_local()
        return synchronised

    def common_weights(self) -> AbstractContextManager[Any]:
        return self._policy.common_weights()

    def finish(self) -> bool:
        return self._policy.finish()

    def stats(self) -> SyncStats:
        return self._earlier_stats + self._policy.stats()

    def take_records(self) -> list[SyncRecord]:
        return self._policy.take_records()

    def close(self) -> None:
        self._policy.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "is_local": self._is_local,
            "earlier_stats": dataclasses.asdict(self._earlier_stats),
            "policy": self._policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["is_local"] and not self._is_local:
            self._become_local()
        self._earlier_stats = SyncStats(**state["earlier_stats"])
        self._policy.load_state_dict(state["policy"])
