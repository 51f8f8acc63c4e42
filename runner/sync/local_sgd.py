"""Local SGD: workers step alone for k steps, and then average their weights."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.schema import Sync
from runner.sync.averaging import AllReduceSum, LocalPhase, WeightedAverage
from runner.sync.optimizers import outer_optimizer
from runner.sync.protocol import LocalPolicy, StepFacts
from runner.sync.replica_vector import ReplicaVector
from runner.sync.telemetry import SyncRecord
from runner.sync.vectors import chunks, norm, norm_of_squares


class LocalSGD(LocalPolicy):
    """Local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little").

    Every worker steps alone. After the steps `due`, and at the end, all replicas become the average of the workers'
    weights. With `sync.policy=outer` an outer optimizer makes the step to the average.
    """

    replicated_keys = ("model", "policy")

    def __init__(self, replica: ReplicaVector, backend: Backend, sync: Sync, due: Collection[int]) -> None:
        super().__init__(replica.model)
        self._replica, self._due = replica, due
        # The sum is computed in the memory of the weights, unless it is compressed.
        vector_sum = AllReduceSum(backend, sync.compress, replica.vector, overlapped=False)
        average = WeightedAverage(backend, vector_sum, overlapped=False)
        self._common = CommonWeights(replica, replica.parts, average, sync)
        self._phase = LocalPhase()

    @torch.no_grad()
    def after_step(self, facts: StepFacts) -> bool:
        self._phase.add(facts)
        if facts.step not in self._due:
            return False
        self._synchronise()
        return True

    @torch.no_grad()
    def finish(self) -> bool:
        if self._phase.steps == 0:
            return False
        self._synchronise()
        return True

    def _synchronise(self) -> None:
        phase, self._phase = self._phase, LocalPhase()
        vector = self._replica.pack()
        self._common.start_average(vector, phase)
        record = self._common.apply_average(vector)
        self._replica.unpack()
        self.history.add(record)

    def close(self) -> None:
        self._replica.release()

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase": dataclasses.asdict(self._phase),
            "tensors": self._common.tensors(),
            "history": self.history.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._phase = LocalPhase(**state["phase"])
        self._common.load(state["tensors"])
        self.history.load_state_dict(state["history"])


class Chunk(NamedTuple):
    """Neighbouring numbers that are processed together.

    `part`: 0 for weights, 1 for buffers. `own`: their place in the replica's vector; `place`: in the vectors of what
    is averaged.
    """

    part: int
    own: slice
    place: slice


class CommonWeights:
    """The weights and buffers that all workers had in common after the latest synchronisation, and the way to new ones.

    With x_i the values of worker i, w_i its share of the loss terms and a the common values, these become
    a + Σ w_i (x_i − a): updates are averaged and not weights, so that a wire of 16 bits rounds only updates.
    `parts`: slices of the replica's vector: weights, buffers.
    """

    def __init__(self, replica: ReplicaVector, parts: Sequence[slice], average: WeightedAverage, sync: Sync) -> None:
        sizes = [part.stop - part.start for part in parts]
        starts = itertools.accumulate(sizes, initial=0)
        self._parts, self._average = parts, average
        self._chunks = [
            Chunk(number, own, slice(own.start - part.start + start, own.stop - part.start + start))
            for number, (part, start) in enumerate(zip(parts, starts, strict=False))
            for own in chunks(part, replica.vector.device)
        ]
        self._common = torch.cat([replica.vector[part] for part in self._parts])
        self._weights, self._buffers = self._common.split(sizes)
        self._norm = norm(self._weights)
        self._outer = outer_optimizer(sync, self._weights)

    def start_average(self, vector: Tensor, phase: LocalPhase) -> None:
        """Start to average what workers have learnt in a local phase. A collective."""
        weight, squares = self._average.weight(phase, vector.dtype), []
        for chunk in self._chunks:
            update = self._update(chunk, vector[chunk.own])
            if chunk.part == 0:
                squares.append(torch.dot(update, update))
            self._average.put(chunk.place, update.mul_(weight))
        self._average.start(phase, weight, norm_of_squares(squares) / self._norm)

    def apply_average(self, vector: Tensor) -> SyncRecord:
        """Wait for the average, make it the common values, and give these to the replica's `vector`."""
        phase = self._average.finish()
        squares, common_squares = [], []
        for chunk in self._chunks:
            mean, common = self._average.get(chunk.place), self._common[chunk.place]
            if chunk.part == 0:
                squares.append(torch.dot(mean, mean))
            if chunk.part == 0 and self._outer is not None:
                self._outer.step(chunk.place, mean, phase.mean_lr)
            else:
                common.add_(mean)
            if chunk.part == 0:
                common_squares.append(torch.dot(common, common))
            self._replace(chunk, vector[chunk.own])
        record = self._average.record(phase, norm_of_squares(squares) / self._norm)
        self._norm = norm_of_squares(common_squares)
        return record

    def _update(self, chunk: Chunk, values: Tensor) -> Tensor:
        """Return the difference between the replica's `values` and the common ones, as a new tensor."""
        return values - self._common[chunk.place]

    def _replace(self, chunk: Chunk, values: Tensor) -> None:
        """Give the replica's `values` the new common ones."""
        values.copy_(self._common[chunk.place])

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint keeps."""
        return {"common": self._common} | ({"momentum": self._outer.momentum} if self._outer is not None else {})

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore `tensors`."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self._norm = norm(self._weights)
