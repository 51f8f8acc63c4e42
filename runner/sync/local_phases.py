"""Workers that step alone, and bring together what they have learnt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import Compress
from runner.sync.books import smallest
from runner.sync.exchange import Exchange
from runner.sync.moments import Moments
from runner.sync.outer import Assign
from runner.sync.protocol import StepFacts, SyncStats
from runner.sync.replica import MakeRule, Replica
from runner.sync.telemetry import SyncRecord
from runner.sync.updates import MovingUpdates, Updates
from runner.sync.window import Window

MakeUpdates = Callable[[Replica, Backend, bool], Updates]


class LocalPhases:
    """Local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little"), and what others made of it.

    Every worker steps alone; after the steps `due`, and at the end, the updates of all workers since the last time are
    averaged, weighted by the loss terms that each has trained on, and a rule moves the common weights by the mean. To
    assign the mean is local SGD itself.

    `delay`: optimizer steps that run while an average travels (Wang et al. 2020, "Overlap Local-SGD"): what they have
    learnt is kept, on top of the new common weights. 0: everybody waits. `buffers` and `moments` are averaged, too.
    """

    communicates_in_backward = False

    def __init__(
        self,
        model: nn.Module,
        buffers: Sequence[Tensor],
        backend: Backend,
        compress: Compress,
        due: Collection[int],
        make_rule: MakeRule = Assign,
        make_updates: MakeUpdates = MovingUpdates,
        delay: int = 0,
        moments: Moments | None = None,
    ) -> None:
        self.forward_model = model
        self._backend, self._due, self._delay, self._moments = backend, due, delay, moments
        parameters = [p for p in model.parameters() if p.requires_grad]
        further = moments.tensors if moments is not None else []
        self._replica = Replica(parameters, buffers, backend, make_rule, further)
        self._updates = make_updates(self._replica, backend, delay > 0)
        self._exchange = Exchange(backend, compress, self._replica, beside=delay > 0)
        self._window = Window()

    @property
    def overlaps(self) -> bool:
        return self._delay > 0

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
        if self.takes_part(facts):
            self._updates.after_step()
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
    def _depart(self) -> None:
        if self._moments is not None:
            self._moments.collect()
        self._replica.pack()
        self._exchange.depart(self._updates.write, self._window, self._replica.length)
        self._updates.depart()
        self._window = Window()

    @torch.no_grad()
    def _arrive(self) -> None:
        replica = self._replica
        if self._delay:
            replica.pack()
        window = self._exchange.arrive(replica.receive)
        replica.rule.step(window.mean_lr)
        replica.take_common(self._updates.left)
        if self._moments is not None:
            self._moments.note_steps(window.last + 1)
        self._backend.mark_step()

    def common_weights(self) -> AbstractContextManager[Any]:
        # Replicas are equal right after they met, unless they have gone on meanwhile.
        return self._replica.showing_common() if self._delay else nullcontext()

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
            "updates": self._updates.state_dict(),
            "window": self._window.as_plain(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exchange.load_state_dict(state["exchange"])
        self._replica.load_state_dict(state["replica"])
        self._updates.load_state_dict(state["updates"])
        self._window = Window(**state["window"])
