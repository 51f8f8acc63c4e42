"""A fragment of the weights, which is synchronised on its own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.backends import Backend
from runner.sync.averaging import ALIGNMENT, VectorSum, WeightedAverage
from runner.sync.optimizers import OuterSGD
from runner.sync.protocol import LocalPhase
from runner.sync.telemetry import SyncRecord, chunks, norm, norm_of_squares


class _Chunk(NamedTuple):
    """Neighbouring numbers of a fragment, which are processed together.

    `part`: 0 for weights, 1 for buffers, others for moments. `own`: their place in the replica. `place`: in the
    fragment's vectors.
    """

    part: int
    own: slice
    place: slice


class Fragment:
    """A part of the weights, with a part of the buffers and of the moments, which are averaged together.

    `parts`: their slices of the replica's vector: weights, buffers, then those of each moment. `in_place`: the fragment
    is the whole replica, and its memory can be used for what is sent. `overlapped`: the worker trains on while an
    average is in flight, and these steps stay on top of the new common weights.
    """

    def __init__(
        self,
        replica: Tensor,
        parts: Sequence[slice],
        backend: Backend,
        make_sum: Callable[[Tensor], VectorSum],
        make_outer: Callable[[Tensor], OuterSGD] | None,
        accumulate: bool,
        in_place: bool,
        overlapped: bool,
    ) -> None:
        sizes = [part.stop - part.start for part in parts]
        starts = itertools.accumulate(sizes, initial=0)
        self._parts = parts[:2]
        self._chunks = [
            _Chunk(number, own, slice(own.start - part.start + start, own.stop - part.start + start))
            for number, (part, start) in enumerate(zip(parts, starts, strict=False))
            for own in chunks(part, replica.device)
        ]
        #: The weights and buffers after the latest synchronisation. Moments are averaged as they are.
        self._common = torch.cat([replica[part] for part in self._parts])
        self._common_parts = self._common.split(sizes[:2])
        self._common_norm = norm(self._common_parts[0])
        #: The replica's weights and buffers when the average in flight was started.
        self._sent = torch.zeros_like(self._common) if overlapped else None
        self._outer = make_outer(self._common_parts[0]) if make_outer is not None else None
        self._accumulated = torch.zeros_like(self._common_parts[0]) if accumulate else None
        self._sum = make_sum(replica if in_place else replica.new_empty(sum(sizes)))
        self._average = WeightedAverage(backend, self._sum, overlapped)
        self.phase = LocalPhase()
        #: The optimizer step after which the average in flight is applied; None: none is in flight.
        self.applied_after: int | None = None

    def start(self, replica: Tensor, applied_after: int) -> None:
        """Start to average the updates of the local phase."""
        weight, squares = self._average.weight(self.phase, replica.dtype), []
        for part, own, place in self._chunks:
            values = replica[own]
            if part > 1:
                self._sum.put(place, values * weight)
                continue
            if self._sent is not None:
                self._sent[place].copy_(values)
            update = values - self._common[place]
            if part == 0:
                if self._accumulated is not None:
                    update.copy_(self._accumulated[place])
                    self._accumulated[place].zero_()
                squares.append(torch.dot(update, update))
            self._sum.put(place, update.mul_(weight))
        length = norm_of_squares(squares) / self._common_norm
        self._average.start(self.phase, weight, length)
        self.phase, self.applied_after = LocalPhase(), applied_after

    def finish(self, replica: Tensor) -> SyncRecord:
        """Wait for the average; apply it to the common values, and these to the replica."""
        phase = self._average.finish()
        self.applied_after = None
        squares, common_squares = [], []
        for part, own, place in self._chunks:
            values, mean = replica[own], self._sum.get(place)
            if part > 1:
                values.copy_(mean)
                continue
            common = self._common[place]
            if part == 0:
                squares.append(torch.dot(mean, mean))
            if part == 0 and self._outer is not None:
                self._outer.step(place, mean, phase.mean_lr)
            else:
                common.add_(mean)
            if part == 0:
                common_squares.append(torch.dot(common, common))
            if self._sent is not None:
                values.sub_(self._sent[place]).add_(common)
            else:
                values.copy_(common)
        record = self._average.record(phase, norm_of_squares(squares) / self._common_norm)
        self._common_norm = norm_of_squares(common_squares)
        return record

    def accumulate(self, replica: Tensor) -> None:
        """Move the update that this worker has just made out of its weights, to be averaged later."""
        weights, common = replica[self._parts[0]], self._common_parts[0]
        assert self._accumulated is not None
        self._accumulated.add_(weights).sub_(common)
        weights.copy_(common)

    def set_common(self, replica: Tensor) -> None:
        """Give a replica the common weights and buffers."""
        for part, common in zip(self._parts, self._common_parts, strict=True):
            replica[part].copy_(common)

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase": dataclasses.asdict(self.phase),
            "average": self._average.state_dict(),
            "applied_after": self.applied_after,
            "tensors": self._state_tensors(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phase, self.applied_after = LocalPhase(**state["phase"]), state["applied_after"]
        self._average.load_state_dict(state["average"])
        for name, tensor in self._state_tensors().items():
            tensor.copy_(state["tensors"][name])
        self._common_norm = norm(self._common_parts[0])

    def _state_tensors(self) -> dict[str, Tensor]:
        momentum = self._outer.momentum if self._outer is not None else None
        tensors = {"common": self._common, "accumulated": self._accumulated, "sent": self._sent, "momentum": momentum}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def cut(part: slice, fragments: int) -> list[slice]:
    """A part of a vector in pieces of equal size, up to the alignment of tensors."""
    blocks = (part.stop - part.start) // ALIGNMENT
    bounds = [part.start + blocks * n // fragments * ALIGNMENT for n in range(fragments + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]
