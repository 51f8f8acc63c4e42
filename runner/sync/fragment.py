"""A fragment of the weights, which is synchronised on its own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.sync.averaging import ALIGNMENT, WeightedAverage
from runner.sync.optimizers import OuterSGD
from runner.sync.protocol import LocalPhase
from runner.sync.telemetry import SyncRecord, norm


class Fragment:
    """A part of the weights, with a part of the buffers and of the moments, which are averaged together.

    `parts`: their slices of the replica's vector: weights, buffers, then those of each moment. `in_place`: the fragment
    is the whole replica, and averaged in its memory. `keeps_steps`: the worker trains on while an average is in flight,
    and these steps stay on top of the new common weights.
    """

    def __init__(
        self,
        replica: Tensor,
        parts: Sequence[slice],
        make_average: Callable[[Tensor], WeightedAverage],
        make_outer: Callable[[Tensor], OuterSGD] | None,
        accumulate: bool,
        in_place: bool,
        keeps_steps: bool,
    ) -> None:
        self._parts = parts
        sizes = [part.stop - part.start for part in parts]
        self._vector = replica if in_place else torch.cat([replica[part] for part in parts])
        update, *self._moments = self._vector.split([sum(sizes[:2]), *sizes[2:]])
        #: What is averaged as a change, and its weights and buffers; the moments are averaged as they are.
        self._update, self._update_parts = update, update.split(sizes[:2])
        #: The weights and buffers after the latest synchronisation.
        self._common = update.clone()
        self._common_parts = self._common.split(sizes[:2])
        self._common_norm = norm(self._common_parts[0])
        self._sent = update.clone() if keeps_steps else None
        self._sent_parts = self._sent.split(sizes[:2]) if self._sent is not None else (None, None)
        self._outer = make_outer(self._common_parts[0]) if make_outer is not None else None
        self._accumulated = torch.zeros_like(self._common_parts[0]) if accumulate else None
        self._average = make_average(self._vector)
        self.phase = LocalPhase()
        #: The optimizer step after which the average in flight is applied; None: none is in flight.
        self.applied_after: int | None = None

    def start(self, replica: Tensor, applied_after: int, scalars: Sequence[float] = ()) -> None:
        """Start to average the updates of the local phase. `scalars`: see `WeightedAverage.start`."""
        if self._vector is not replica:
            torch.cat([replica[part] for part in self._parts], out=self._vector)
        if self._sent is not None:
            self._sent.copy_(self._update)
        self._update.sub_(self._common)
        weights = self._update_parts[0]
        if self._accumulated is not None:
            weights.copy_(self._accumulated)
            self._accumulated.zero_()
        self._average.start(self.phase, norm(weights) / self._common_norm, scalars=scalars)
        self.phase, self.applied_after = LocalPhase(), applied_after

    def finish(self, replica: Tensor) -> SyncRecord:
        """Wait for the average; apply it to the common values, and these to the replica."""
        phase = self._average.finish()
        self.applied_after = None
        weights, buffers = self._update_parts
        record = self._average.record(phase, norm(weights) / self._common_norm)
        self._common_parts[1].add_(buffers)
        if self._outer is not None:
            self._outer.step(weights, phase.mean_lr)
        else:
            self._common_parts[0].add_(weights)
        self._common_norm = norm(self._common_parts[0])
        for part, common, sent in zip(self._parts, self._common_parts, self._sent_parts, strict=False):
            if sent is None:
                replica[part].copy_(common)
            else:
                replica[part].sub_(sent).add_(common)
        if self._vector is not replica:
            for part, moment in zip(self._parts[2:], self._moments, strict=True):
                replica[part].copy_(moment)
        return record

    def scalars(self, count: int) -> list[list[float]]:
        """By worker, what was sent with the latest average. Waits for the device."""
        return self._average.scalars(count)

    def accumulate(self, replica: Tensor) -> None:
        """Move the update that this worker has just made out of its weights, to be averaged later."""
        weights, common = replica[self._parts[0]], self._common_parts[0]
        assert self._accumulated is not None
        self._accumulated.add_(weights).sub_(common)
        weights.copy_(common)

    def set_common(self, replica: Tensor) -> None:
        """Give a replica the common weights and buffers."""
        for part, common in zip(self._parts, self._common_parts, strict=False):
            replica[part].copy_(common)

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase": dataclasses.asdict(self.phase),
            "average": self._average.state_dict(),
            "applied_after": self.applied_after,
            "tensors": self._state_tensors(),
            "outer": self._outer.state_dict() if self._outer is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phase, self.applied_after = LocalPhase(**state["phase"]), state["applied_after"]
        self._average.load_state_dict(state["average"])
        for name, tensor in self._state_tensors().items():
            tensor.copy_(state["tensors"][name])
        self._common_norm = norm(self._common_parts[0])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])

    def _state_tensors(self) -> dict[str, Tensor]:
        tensors = {"common": self._common, "accumulated": self._accumulated, "sent": self._sent}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def cut(part: slice, fragments: int) -> list[slice]:
    """A part of a vector in pieces of equal size, up to the alignment of tensors."""
    blocks = (part.stop - part.start) // ALIGNMENT
    bounds = [part.start + blocks * n // fragments * ALIGNMENT for n in range(fragments + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]
