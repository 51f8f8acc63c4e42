"""Local SGD that does not stop: averages in fragments, while training continues, or in int8."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.choices import Compress
from runner.config.schema import Sync
from runner.sync.averaging import AllReduceSum, LocalPhase, VectorSum, WeightedAverage
from runner.sync.local_sgd import Chunk, CommonWeights
from runner.sync.protocol import LocalPolicy, StepFacts
from runner.sync.quantised import OrderedExecutor, QuantisedSum
from runner.sync.replica_vector import ReplicaVector
from runner.sync.vectors import ALIGNMENT

#: With `sync.fragments=auto` a fragment is not smaller, so that bandwidth and not latency decides how long its
#: all-reduce takes.
_SMALLEST_FRAGMENT_BYTES = 2**20


class Fragment(CommonWeights):
    """A part of the weights, with its part of the buffers, that is averaged on its own.

    With `sync.overlap` the worker trains on while an average is in flight, and these steps stay on top of the new
    common weights.
    """

    def __init__(self, replica: ReplicaVector, parts: Sequence[slice], average: WeightedAverage, sync: Sync) -> None:
        super().__init__(replica, parts, average, sync)
        #: The replica's weights and buffers when the average in flight was started.
        self._sent = torch.zeros_like(self._common) if sync.overlap else None
        self.phase = LocalPhase()
        #: The optimizer step after which the average in flight is applied; None: none is in flight.
        self.applied_after: int | None = None

    def _update(self, chunk: Chunk, values: Tensor) -> Tensor:
        if self._sent is not None:
            self._sent[chunk.place].copy_(values)
        return super()._update(chunk, values)

    def _replace(self, chunk: Chunk, values: Tensor) -> None:
        if self._sent is None:
            super()._replace(chunk, values)
        else:
            values.sub_(self._sent[chunk.place]).add_(self._common[chunk.place])

    def set_common(self, vector: Tensor) -> None:
        """Give a replica's vector the common weights and buffers."""
        for part, common in zip(self._parts, (self._weights, self._buffers), strict=True):
            vector[part].copy_(common)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | ({"sent": self._sent} if self._sent is not None else {})

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase": dataclasses.asdict(self.phase),
            "average": self._average.state_dict(),
            "applied_after": self.applied_after,
            "tensors": self.tensors(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phase, self.applied_after = LocalPhase(**state["phase"]), state["applied_after"]
        self._average.load_state_dict(state["average"])
        self.load(state["tensors"])


class StreamingSGD(LocalPolicy):
    """Local SGD whose weights are synchronised in fragments, late, or in int8.

    In each round of local steps, which ends with a step that is `due`, all fragments are averaged once, one after the
    other (Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"). With `sync.overlap` an average is
    applied `sync.delay` steps after it has started (Wang et al. 2020, "Overlap Local-SGD").
    """

    fragment_type: type[Fragment] = Fragment

    def __init__(self, replica: ReplicaVector, backend: Backend, sync: Sync, due: Collection[int]) -> None:
        super().__init__(replica.model)
        self.overlaps, self._delay = sync.overlap, sync.delay_steps
        self._replica, self._backend, self._due = replica, backend, sorted(due)
        self._executor = OrderedExecutor(backend, sync.overlap) if sync.compress is Compress.int8 else None
        count = _fragments(sync, replica.weight_bytes)
        self._fragments = [
            self.fragment_type(replica, parts, self._average(parts, sync), sync)
            for parts in zip(*(cut(part, count) for part in replica.parts), strict=True)
        ]
        self.resolved_settings = {"fragments": count} | ({"delay": self._delay} if sync.overlap else {})
        #: The first and the last step of the current round; None after the last one.
        self._round: tuple[int, int] | None = None

    def _average(self, parts: Sequence[slice], sync: Sync) -> WeightedAverage:
        vector = self._replica.vector.new_empty(sum(part.stop - part.start for part in parts))
        vector_sum: VectorSum
        if self._executor is not None:
            vector_sum = QuantisedSum(self._backend, self._executor, vector)
        else:
            vector_sum = AllReduceSum(self._backend, sync.compress, vector, sync.overlap)
        return WeightedAverage(self._backend, vector_sum, sync.overlap)

    @property
    def replicated_keys(self) -> tuple[str, ...]:
        # Otherwise each replica is ahead of the common weights by its own steps.
        if not self._replicas_are_common:
            return ()
        return ("model", "policy") if self._executor is None else ("model",)  # what rounding took is each worker's

    @property
    def _replicas_are_common(self) -> bool:
        """True if replicas are equal right after a round."""
        return not self.overlaps and len(self._fragments) == 1

    @torch.no_grad()
    def after_step(self, facts: StepFacts) -> bool:
        for fragment in self._fragments:
            fragment.phase.add(facts)
        synchronised = self._apply_due(facts.step)
        for fragment in self._due_fragments(facts.step):
            self._start(fragment, facts.step + self._delay)
        return self._apply_due(facts.step) or synchronised

    def _due_fragments(self, step: int) -> list[Fragment]:
        """The fragments whose average starts after this step: spread over a round, which the last one ends."""
        if self._round is None or step > self._round[1]:
            number = bisect.bisect_left(self._due, step)
            self._round = (step, self._due[number]) if number < len(self._due) else None
        if self._round is None:
            return []
        (first, last), count = self._round, len(self._fragments)
        ends = [last - (count - 1 - n) * (last + 1 - first) // count for n in range(count)]
        return [fragment for fragment, end in zip(self._fragments, ends, strict=True) if end == step]

    def _apply_due(self, step: int) -> bool:
        """Apply the averages that are due after this step; True if that ends a round."""
        due = [fragment for fragment in self._fragments if fragment.applied_after == step]
        for fragment in due:
            self._apply(fragment)
        return self._fragments[-1] in due

    def _start(self, fragment: Fragment, applied_after: int) -> None:
        if fragment.applied_after is not None:  # rounds are long enough, except the first after a resumption
            self._apply(fragment)
        fragment.start_average(self._replica.pack(), fragment.phase)
        fragment.phase, fragment.applied_after = LocalPhase(), applied_after

    def _apply(self, fragment: Fragment) -> None:
        record = fragment.apply_average(self._replica.pack())
        fragment.applied_after = None
        self._replica.unpack()
        self.history.add(record)

    @torch.no_grad()
    def finish(self) -> bool:
        open_phases = [fragment for fragment in self._fragments if fragment.phase.steps > 0]
        in_flight = [fragment for fragment in self._fragments if fragment.applied_after is not None]
        for fragment in in_flight:
            self._apply(fragment)
        for fragment in open_phases:
            self._start(fragment, fragment.phase.last)
            self._apply(fragment)
        return bool(in_flight or open_phases)

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        if self._replicas_are_common:
            yield
            return
        with torch.no_grad():
            vector = self._replica.pack()
            own = vector.clone()
            for fragment in self._fragments:
                fragment.set_common(vector)
            self._replica.unpack()
        yield
        with torch.no_grad():
            vector.copy_(own)
            self._replica.unpack()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        self._replica.release()

    def state_dict(self) -> dict[str, Any]:
        return {
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "round": self._round,
            "history": self.history.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for fragment, own in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(own)
        self._round = state["round"]
        self.history.load_state_dict(state["history"])


def _fragments(sync: Sync, weight_bytes: int) -> int:
    if isinstance(sync.fragments, int):
        return sync.fragments
    return max(1, min(sync.k, weight_bytes // _SMALLEST_FRAGMENT_BYTES))


def cut(part: slice, fragments: int) -> list[slice]:
    """A part of a vector in pieces of equal size, up to the alignment of tensors."""
    blocks = (part.stop - part.start) // ALIGNMENT
    bounds = [part.start + blocks * n // fragments * ALIGNMENT for n in range(fragments + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]
