"""Policies of a published experiment, kept to reproduce its results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import Compress
from runner.config.schema import Sync
from runner.sync.averaging import AllReduceSum, LocalPhase, WeightedAverage
from runner.sync.local_sgd import Chunk
from runner.sync.protocol import LocalPolicy, StepFacts
from runner.sync.replica_vector import ReplicaVector
from runner.sync.streaming import Fragment, StreamingSGD
from runner.sync.vectors import FlatTensors, norm

#: Weights sent along to measure the drift, at most about this many: replicas are never compared otherwise.
_SAMPLE_SIZE = 16_384


class AccumulatedFragment(Fragment):
    """A fragment whose weights stay the common ones in a local phase: updates are set aside, and averaged later."""

    def __init__(self, replica: ReplicaVector, parts: Sequence[slice], average: WeightedAverage, sync: Sync) -> None:
        super().__init__(replica, parts, average, sync)
        self._accumulated = torch.zeros_like(self._weights)

    def set_aside(self, vector: Tensor) -> None:
        """Move the update that this worker has just made out of its weights."""
        weights = vector[self._parts[0]]
        self._accumulated.add_(weights).sub_(self._weights)
        weights.copy_(self._weights)

    def _update(self, chunk: Chunk, values: Tensor) -> Tensor:
        update = super()._update(chunk, values)
        if chunk.part == 0:
            update.copy_(self._accumulated[chunk.place])
            self._accumulated[chunk.place].zero_()
        return update

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"accumulated": self._accumulated}


class AccumulatedUpdates(StreamingSGD):
    """Updates are added up without being applied, as gradient accumulation does with gradients, and then averaged."""

    fragment_type = AccumulatedFragment

    @torch.no_grad()
    def after_step(self, facts: StepFacts) -> bool:
        if facts.local_count > 0:
            vector = self._replica.pack()
            for fragment in self._fragments:
                assert isinstance(fragment, AccumulatedFragment)
                fragment.set_aside(vector)
            self._replica.unpack()
        return super().after_step(facts)


class PeriodicGradients(LocalPolicy):
    """Gradients are averaged only in the steps `due`; in all others every worker uses its own.

    Replicas drift apart and are never made equal; the run's weights are those of worker 0, as in the experiment.
    """

    def __init__(
        self, model: nn.Module, buffers: Sequence[Tensor], backend: Backend, compress: Compress, due: Collection[int]
    ) -> None:
        super().__init__(model)
        self._backend, self._due = backend, due
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = buffers
        self._stride = -(-sum(p.numel() for p in self._parameters) // _SAMPLE_SIZE)
        self._start = self._sample()
        # Not shared with parameters and sample, which only have the right shapes: gradients are new in every step.
        self._flat = FlatTensors([*self._parameters, self._start], shared=False)
        vector_sum = AllReduceSum(backend, compress, self._flat.memory, overlapped=False)
        self._average = WeightedAverage(backend, vector_sum, overlapped=False)
        self._steps = 0

    def before_optimizer_step(self, facts: StepFacts) -> bool:
        if facts.step not in self._due:
            return facts.local_count > 0
        if facts.global_count > 0:
            self._average_gradients(facts)
        return facts.global_count > 0

    @torch.no_grad()
    def _average_gradients(self, facts: StepFacts) -> None:
        *gradients, sample = self._flat.views()
        own = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        torch._foreach_copy_(gradients, own)
        sample.copy_(self._sample()).sub_(self._start)
        vector, weights_end, sample_norm = self._flat.memory, self._flat.bounds[-2], norm(self._start)
        everything = slice(0, len(vector))
        phase = LocalPhase(self._steps + 1, facts.step, facts.local_count, facts.global_count)
        norms = norm(vector[:weights_end]), norm(sample) / sample_norm
        weight = self._average.weight(phase, vector.dtype)
        self._average.put(everything, vector * weight)
        self._average.start(phase, weight, *norms)
        self._average.finish()
        vector.copy_(self._average.get(everything))
        self.history.add(self._average.record(phase, norm(vector[:weights_end]), norm(sample) / sample_norm))
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(gradient)
        self._backend.mark_step()

    def _sample(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1)[:: self._stride] for p in self._parameters])

    def after_step(self, facts: StepFacts) -> bool:
        due = facts.step in self._due
        self._steps = 0 if due else self._steps + 1
        return due

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        own = [tensor.detach().clone() for tensor in self._replica()]
        self._copy_from_worker_0()
        yield
        with torch.no_grad():
            torch._foreach_copy_(self._replica(), own)
        self._backend.mark_step()

    def finish(self) -> bool:
        self._copy_from_worker_0()
        return self._steps > 0

    @torch.no_grad()
    def _copy_from_worker_0(self) -> None:
        flat = FlatTensors(self._replica(), shared=False)
        vector = flat.pack()
        if self._backend.rank != 0:
            vector.zero_()
        self._backend.mark_step()
        self._backend.all_reduce(vector)
        flat.unpack()
        self._backend.mark_step()

    def _replica(self) -> list[Tensor]:
        return [*(p.detach() for p in self._parameters), *self._buffers]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "start": self._start, "history": self.history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._start = state["start"].to(self._start.device)
        self.history.load_state_dict(state["history"])
