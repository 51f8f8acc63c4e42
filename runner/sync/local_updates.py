"""Workers that step alone from common weights, and bring together what they have learnt."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from runner.backends import Backend
from runner.sync.books import smallest
from runner.sync.exchange import Exchange
from runner.sync.moments import Moments
from runner.sync.outer import Rule
from runner.sync.protocol import StepFacts, SyncStats
from runner.sync.replica import Replica
from runner.sync.telemetry import SyncRecord
from runner.sync.window import Window
from runner.sync.wire import Wire


class LocalUpdates:
    """Local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little"), and what others made of it.

    Every worker steps alone; after the steps `due`, and at the end, the updates of all workers since the last time are
    averaged, weighted by the loss terms that each has trained on, and `rule` moves the common weights by the mean. To
    assign the mean is local SGD itself.

    `delay`: optimizer steps that run while an average travels (Wang et al. 2020, "Overlap Local-SGD"): what they have
    learnt is kept, on top of the new common weights. 0: everybody waits. `moments`: averaged with the weights.
    """

    communicates_in_backward = False

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        wire: Wire,
        due: Collection[int],
        rule: Rule,
        delay: int = 0,
        moments: Moments | None = None,
    ) -> None:
        self.forward_model = model
        self._backend, self._due, self._rule, self._delay, self._moments = backend, due, rule, delay, moments
        self._replica = Replica(model, backend, moments.tensors if moments is not None else [])
        self._exchange = Exchange(backend, wire, self._replica.weights_end, self._replica.tail)
        self._window = Window()
        # What travels while the weights move on, and where they were when it left.
        self._payload = torch.zeros_like(self._replica.pack()) if delay else None
        self._left_at = self._replica.state().clone() if delay else None
        if delay:
            wire.open()

    def loss_divisor(self, facts: StepFacts) -> float:
        return max(facts.local_count, 1)

    def backward_pass(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def takes_part(self, facts: StepFacts) -> bool:
        return facts.local_count > 0  # no sample, no step: neither decay nor moments may move

    def before_optimizer_step(self, facts: StepFacts) -> None:
        pass

    def after_step(self, facts: StepFacts) -> bool:
        self._window.add(facts)
        since = self._exchange.departed_after
        arrived = since is not None and facts.step == since + self._delay
        if arrived:
            self._arrive()
        if facts.step in self._due:
            if self._delay:
                self._depart()
            else:
                self._meet()
                arrived = True
        return arrived

    def finish(self) -> bool:
        changed = False
        if self._exchange.departed_after is not None:
            self._arrive()
            changed = True
        if self._window.steps:
            self._meet()
            changed = True
        return changed

    @torch.no_grad()
    def _meet(self) -> None:
        """Average, and wait for it. The collective works on the memory of the weights itself."""
        if self._moments is not None:
            self._moments.collect()
        replica = self._replica
        vector = replica.pack()
        replica.subtract_common(vector)
        self._exchange.depart(vector, self._window, replica.length, wait=True)
        self._window = Window()
        _, window = self._exchange.arrive()
        replica.move_common(self._rule, vector, window.mean_lr)
        replica.take_common(vector)
        replica.unpack()
        if self._moments is not None:
            self._moments.note_steps(window.last + 1)
        self._backend.mark_step()

    @torch.no_grad()
    def _depart(self) -> None:
        assert self._payload is not None
        assert self._left_at is not None
        state = self._replica.state()
        self._left_at.copy_(state)
        self._payload[: len(state)].copy_(state)
        self._replica.subtract_common(self._payload)
        self._exchange.depart(self._payload, self._window, self._replica.length, wait=False)
        self._window = Window()

    @torch.no_grad()
    def _arrive(self) -> None:
        assert self._left_at is not None
        mean, window = self._exchange.arrive()
        replica = self._replica
        replica.move_common(self._rule, mean, window.mean_lr)
        state = replica.state()
        state.sub_(self._left_at)
        replica.add_common(state)
        replica.unpack()
        self._backend.mark_step()

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        if not self._delay:
            yield  # replicas are equal right after they met
            return
        with self._replica.showing_common():
            yield

    def agree_on_scale(self, scale: float) -> float:
        return smallest(scale, self._backend)

    def stats(self) -> SyncStats:
        return self._exchange.books.stats

    def take_records(self) -> list[SyncRecord]:
        return self._exchange.books.take()

    def close(self) -> None:
        self._replica.release()

    def state_dict(self) -> dict[str, Any]:
        return {
            "exchange": self._exchange.state_dict(),
            "window": self._window.as_plain(),
            "common": self._replica.common,
            "left_at": self._left_at,
            "rule": self._rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exchange.load_state_dict(
            state["exchange"], self._payload if self._payload is not None else torch.empty(0)
        )
        self._window = Window(**state["window"])
        self._replica.load_common(state["common"])
        if self._left_at is not None:
            self._left_at.copy_(state["left_at"])
        self._rule.load_state_dict(state["rule"])
