"""Updates that are collected before anybody moves."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.choices import Compress
from runner.sync.books import smallest
from runner.sync.exchange import Exchange
from runner.sync.flat import parts
from runner.sync.outer import Assign
from runner.sync.protocol import StepFacts, SyncStats
from runner.sync.replica import Replica, State
from runner.sync.telemetry import SyncRecord
from runner.sync.window import Window


class Accumulated:
    """What accumulation does with gradients, done with updates.

    Every worker's optimizer turns each batch into an update, as in local SGD, but the weights stay the common ones: the
    updates are added up, and after the steps `due` their mean over workers, weighted by loss terms, is applied. (If
    workers moved by their updates in between, this would be `LocalUpdates`: the two averages are the same sum.)

    `delay`: optimizer steps that run while an average travels; 0: everybody waits.
    """

    communicates_in_backward = False

    def __init__(
        self, model: nn.Module, backend: Backend, compress: Compress, due: Collection[int], delay: int = 0
    ) -> None:
        self.forward_model = model
        self._backend, self._due, self._delay = backend, due, delay
        self._replica = Replica(model, backend, Assign)
        self._exchange = Exchange(backend, compress, self._replica, beside=delay > 0)
        self._window = Window()
        self._updates = torch.zeros_like(self._replica.rule.weights)
        # Nobody's weights move while an average travels, but running statistics do.
        self._left: State = (None, self._replica.buffers().clone()) if delay else (None, None)

    @property
    def overlaps(self) -> bool:
        return self._delay > 0

    def loss_divisor(self, facts: StepFacts) -> float:
        return max(facts.local_count, 1)

    def backward_pass(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def takes_part(self, facts: StepFacts) -> bool:
        return facts.local_count > 0

    def before_optimizer_step(self, facts: StepFacts) -> None:
        pass

    def after_step(self, facts: StepFacts) -> bool:
        self._window.add(facts)
        if facts.local_count > 0:
            self._collect()
        arrived = self._exchange.departed_after == facts.step - self._delay
        if arrived:
            self._arrive()
        if facts.step in self._due:
            self._depart()
            if not self._delay:
                self._arrive()
                arrived = True
        return arrived

    def finish(self) -> bool:
        changed = False
        if self._exchange.departed_after is not None:
            self._arrive()
            changed = True
        if self._window.steps:
            self._depart()
            self._arrive()
            changed = True
        return changed

    @torch.no_grad()
    def _collect(self) -> None:
        """Take the update just made off the weights."""
        weights = self._replica.pack()
        for part in parts(0, self._replica.weights_end, weights.device):
            common = self._replica.common(part)
            self._updates[part].add_(weights[part]).sub_(common)
            weights[part].copy_(common)
        self._replica.unpack()
        self._backend.mark_step()

    @torch.no_grad()
    def _depart(self) -> None:
        self._replica.pack()
        self._replica.note(self._left)
        self._exchange.depart(self._write, self._window, self._replica.length)
        self._window = Window()
        self._updates.zero_()

    def _write(self, part: slice, where: Tensor) -> None:
        if part.start < self._replica.weights_end:
            where.copy_(self._updates[part])
        else:  # running statistics are no sums of updates: they go on by themselves, and are averaged as they are
            self._replica.write_update(part, where)

    @torch.no_grad()
    def _arrive(self) -> None:
        self._exchange.arrive(self._replica.receive)
        self._replica.take_common(self._left)
        self._backend.mark_step()

    def common_weights(self) -> AbstractContextManager[Any]:
        return nullcontext()  # nobody has any other

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
            "replica": self._replica.state_dict(),
            "window": self._window.as_plain(),
            "updates": self._updates,
            "left": self._left[1],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exchange.load_state_dict(state["exchange"])
        self._replica.load_state_dict(state["replica"])
        self._window = Window(**state["window"])
        self._updates.copy_(state["updates"])
        if self._left[1] is not None:
            self._left[1].copy_(state["left"])
