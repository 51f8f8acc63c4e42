"""Local SGD: workers step alone and average what they have learnt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import Compress
from runner.sync.averaging import FlatTensors, WeightedAverage
from runner.sync.optimizers import Moments, OuterSGD
from runner.sync.protocol import LocalPhase, StepFacts, SyncPolicy
from runner.sync.telemetry import SyncHistory, SyncRecord, SyncStats, norm


class LocalSGD(SyncPolicy):
    """Local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little") and its variants.

    Every worker steps alone. After each step in `due`, and at the end, the workers' updates since the last
    synchronisation are averaged, weighted by the loss terms each has trained on, and added to the common weights.
    Running statistics in `buffers` and `moments` are averaged as well.

    `make_outer`: makes an optimizer of the common weights that steps with the average instead of adding it.
    `accumulate`: weights stay the common ones during a local phase, and updates are added up, as accumulation does with
    gradients. `delay`: optimizer steps during which an average is in flight (Wang et al. 2020, "Overlap Local-SGD");
    they stay on top of the new common weights. 0: workers wait for it.

    Vectors are laid out as [weights | buffers | moments].
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: Sequence[Tensor],
        backend: Backend,
        compress: Compress,
        due: Collection[int],
        make_outer: Callable[[Tensor], OuterSGD] | None = None,
        accumulate: bool = False,
        delay: int = 0,
        moments: Moments | None = None,
    ) -> None:
        self.forward_model, self.overlaps = model, delay > 0
        self._backend, self._due, self._delay, self._moments = backend, due, delay, moments
        parameters = [p for p in model.parameters() if p.requires_grad]
        averaged = [*parameters, *buffers, *(moments.tensors if moments is not None else [])]
        self._flat = FlatTensors(averaged, shared=not backend.compiles)
        weights_end = self._flat.bounds[len(parameters)]
        self._weights = slice(0, weights_end)
        self._buffers = slice(weights_end, self._flat.bounds[len(parameters) + len(buffers)])
        replica = self._flat.pack()
        self._common_weights, self._common_buffers = replica[self._weights].clone(), replica[self._buffers].clone()
        self._common_norm = norm(self._common_weights)
        self._outer = make_outer(self._common_weights) if make_outer is not None else None
        self._accumulated = torch.zeros_like(self._common_weights) if accumulate else None
        # Workers that wait average in the replica's own memory; those that train on need a vector to send, and a copy
        # of what they have sent.
        self._vector = torch.zeros_like(replica) if self.overlaps else replica
        self._sent_weights = self._common_weights.clone() if self.overlaps and not accumulate else None
        self._sent_buffers = self._common_buffers.clone() if self.overlaps else None
        self._average = WeightedAverage(backend, compress, self._vector, self.overlaps)
        self._phase = LocalPhase()
        self._history = SyncHistory()

    @property
    def equal_parts(self) -> tuple[str, ...]:
        # With overlap each replica is ahead of the common weights by its own steps.
        return () if self.overlaps else ("model", "policy")

    @torch.no_grad()
    def after_step(self, facts: StepFacts) -> bool:
        self._phase.add(facts)
        if self._accumulated is not None and facts.local_count > 0:
            self._accumulate_update(self._accumulated)
        synchronised = False
        if self._average.phase is not None and facts.step == self._average.phase.last + self._delay:
            self._finish_average()
            synchronised = True
        if facts.step in self._due:
            self._start_average()
            if not self.overlaps:
                self._finish_average()
                synchronised = True
        return synchronised

    def _accumulate_update(self, accumulated: Tensor) -> None:
        """Move the update that this worker has just made from its weights to the sum."""
        weights = self._flat.pack()[self._weights]
        accumulated.add_(weights).sub_(self._common_weights)
        weights.copy_(self._common_weights)
        self._flat.unpack()
        self._backend.mark_step()

    def _start_average(self) -> None:
        if self._moments is not None:
            self._moments.collect()
        replica, update = self._flat.pack(), self._vector
        if self.overlaps:
            update.copy_(replica)
            if self._sent_weights is not None:
                self._sent_weights.copy_(replica[self._weights])
            if self._sent_buffers is not None:
                self._sent_buffers.copy_(replica[self._buffers])
        if self._accumulated is not None:
            update[self._weights].copy_(self._accumulated)
            self._accumulated.zero_()
        else:
            update[self._weights].sub_(self._common_weights)
        update[self._buffers].sub_(self._common_buffers)
        self._average.start(self._phase, norm(update[self._weights]) / self._common_norm)
        self._phase = LocalPhase()

    def _finish_average(self) -> None:
        replica = self._flat.pack() if self.overlaps else self._flat.memory
        mean, phase = self._average.finish()
        self._history.add(self._average.record(phase, norm(mean[self._weights]) / self._common_norm))
        self._common_buffers.add_(mean[self._buffers])
        if self._outer is not None:
            self._outer.step(mean[self._weights], phase.mean_lr)
        else:
            self._common_weights.add_(mean[self._weights])
        self._common_norm = norm(self._common_weights)
        _move(replica[self._weights], self._common_weights, self._sent_weights)
        _move(replica[self._buffers], self._common_buffers, self._sent_buffers)
        self._flat.unpack()
        if self._moments is not None:
            self._moments.set_step_count(phase.last + 1)
        self._backend.mark_step()

    @torch.no_grad()
    def finish(self) -> bool:
        changed = self._average.phase is not None or self._phase.steps > 0
        if self._average.phase is not None:
            self._finish_average()
        if self._phase.steps > 0:
            self._start_average()
            self._finish_average()
        return changed

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        if not self.overlaps:  # replicas are equal right after a synchronisation
            yield
            return
        with torch.no_grad():
            replica = self._flat.pack()
            own = replica.clone()
            replica[self._weights].copy_(self._common_weights)
            replica[self._buffers].copy_(self._common_buffers)
            self._flat.unpack()
            self._backend.mark_step()
        yield
        with torch.no_grad():
            replica.copy_(own)
            self._flat.unpack()
            self._backend.mark_step()

    def stats(self) -> SyncStats:
        return self._history.stats

    def take_records(self) -> list[SyncRecord]:
        return self._history.take_records()

    def close(self) -> None:
        self._flat.release()

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase": dataclasses.asdict(self._phase),
            "average": self._average.state_dict(),
            "tensors": self._state_tensors(),
            "outer": self._outer.state_dict() if self._outer is not None else None,
            "history": self._history.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._phase = LocalPhase(**state["phase"])
        self._average.load_state_dict(state["average"])
        for name, tensor in self._state_tensors().items():
            tensor.copy_(state["tensors"][name])
        self._common_norm = norm(self._common_weights)
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
        self._history.load_state_dict(state["history"])

    def _state_tensors(self) -> dict[str, Tensor]:
        tensors = {
            "common_weights": self._common_weights,
            "common_buffers": self._common_buffers,
            "accumulated": self._accumulated,
            "sent_weights": self._sent_weights,
            "sent_buffers": self._sent_buffers,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _move(replica: Tensor, common: Tensor, sent: Tensor | None) -> None:
    """Set a replica to the common values, plus its own progress since it sent its values, if it did not wait."""
    if sent is None:
        replica.copy_(common)
    else:
        replica.sub_(sent).add_(common)
