"""Fully synchronous training first, local phases later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from runner.sync.protocol import StepFacts, SyncPolicy, SyncStats
from runner.sync.telemetry import SyncRecord


class PostLocal:
    """Post-local SGD (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD").

    `first` serves the steps before `first_local`, and what `make_second` makes serves the rest: it is made at the
    change, when all replicas and their moments are equal.
    """

    def __init__(self, first: SyncPolicy, make_second: Callable[[], SyncPolicy], first_local: int) -> None:
        self._policy, self._make_second, self._first_local = first, make_second, first_local
        self._changed = False
        self._before = SyncStats(0, 0, 0.0, 0.0)

    @property
    def communicates_in_backward(self) -> bool:
        return self._policy.communicates_in_backward

    @property
    def overlaps(self) -> bool:
        return self._policy.overlaps

    @property
    def forward_model(self) -> nn.Module:
        return self._policy.forward_model

    def _change(self) -> None:
        self._before = self._policy.stats()
        self._policy.close()
        self._policy = self._make_second()
        self._changed = True

    def loss_divisor(self, facts: StepFacts) -> float:
        return self._policy.loss_divisor(facts)

    def backward_pass(self, last: bool) -> AbstractContextManager[Any]:
        return self._policy.backward_pass(last)

    def takes_part(self, facts: StepFacts) -> bool:
        return self._policy.takes_part(facts)

    def before_optimizer_step(self, facts: StepFacts) -> None:
        self._policy.before_optimizer_step(facts)

    def after_step(self, facts: StepFacts) -> bool:
        common = self._policy.after_step(facts)
        if facts.step + 1 == self._first_local:
            self._policy.finish()
            self._change()
        return common

    def common_weights(self) -> AbstractContextManager[Any]:
        return self._policy.common_weights()

    def finish(self) -> bool:
        return self._policy.finish()

    def agree_on_scale(self, scale: float) -> float:
        return self._policy.agree_on_scale(scale)

    def stats(self) -> SyncStats:
        return self._before + self._policy.stats()

    def take_records(self) -> list[SyncRecord]:
        return self._policy.take_records()

    def close(self) -> None:
        self._policy.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "changed": self._changed,
            "before": dataclasses.astuple(self._before),
            "policy": self._policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["changed"] and not self._changed:
            self._change()
        self._before = SyncStats(*state["before"])
        self._policy.load_state_dict(state["policy"])
