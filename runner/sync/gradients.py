"""The published proof of concept of synchronising every k batches, kept to reproduce what it did."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.config.choices import Compress
from runner.sync.books import Books, smallest
from runner.sync.flat import FlatTensors
from runner.sync.protocol import StepFacts, SyncStats
from runner.sync.telemetry import Spread, SyncRecord, relative, slots, tell
from runner.sync.window import Window
from runner.sync.wire import Wire

#: At most about so many weights travel along, to tell how far replicas are apart: nothing else ever compares them.
_SAMPLE = 16_384


class PeriodicGradients:
    """Gradients are averaged in the steps `due` alone; in all others, and with its moments, each worker is by itself.

    Replicas drift apart and are never made equal; the run's weights are worker 0's, as they were in the experiment.
    """

    communicates_in_backward = False
    overlaps = False

    def __init__(
        self, model: nn.Module, buffers: Sequence[Tensor], backend: Backend, compress: Compress, due: Collection[int]
    ) -> None:
        self.forward_model = model
        self._backend, self._due = backend, due
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = buffers
        self._stride = -(-sum(p.numel() for p in self._parameters) // _SAMPLE)
        self._start = self._sample()
        room = torch.zeros(slots(backend.world_size), dtype=self._start.dtype, device=self._start.device)
        # The parameters and the sample lend their shapes only: gradients are new tensors in every step.
        self._flat = FlatTensors([*self._parameters, self._start, room, room], live=False)
        self._whole = slice(0, len(self._flat.memory))
        self._wire = Wire(backend, compress, self._flat.memory, in_place=True)
        self._steps = 0
        self._books = Books()

    def loss_divisor(self, facts: StepFacts) -> float:
        return max(facts.local_count, 1)

    def backward_pass(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def takes_part(self, facts: StepFacts) -> bool:
        return (facts.global_count if facts.step in self._due else facts.local_count) > 0

    @torch.no_grad()
    def before_optimizer_step(self, facts: StepFacts) -> None:
        if facts.step not in self._due:
            return
        window = Window(self._steps + 1, facts.step, facts.local_count, facts.global_count)
        weight = self._backend.number(window.weight(self._backend.world_size), self._start.dtype)
        memory, (*gradients, sample, told, told_of_sample) = self._flat.memory, self._flat.views()
        own = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        torch._foreach_copy_(gradients, own)
        sample.copy_(self._sample()).sub_(self._start)
        one, length = torch.ones_like(self._start[0]), torch.linalg.vector_norm(self._start)
        end = self._flat.bounds[len(gradients)]
        share, share_of_sample = relative(memory[:end], one), relative(sample, length)
        memory[: self._flat.bounds[-3]].mul_(weight)
        tell(told, self._backend.rank, weight, share)
        tell(told_of_sample, self._backend.rank, weight, share_of_sample)
        self._wire.part(self._whole).copy_(memory)
        self._wire.put(self._whole, self._wire.part(self._whole))
        transfer = self._wire.send(wait=True)
        memory.copy_(self._wire.get(self._whole))
        cosine_of = Spread(told.clone(), relative(memory[:end], one))
        self._books.enter(transfer, window, Spread(told_of_sample.clone(), relative(sample, length)), cosine_of)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(gradient)
        self._backend.mark_step()

    def _sample(self) -> Tensor:
        """Every so-many-th weight."""
        return torch.cat([p.detach().reshape(-1)[:: self._stride] for p in self._parameters])

    def after_step(self, facts: StepFacts) -> bool:
        due = facts.step in self._due
        self._steps = 0 if due else self._steps + 1
        return due

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        own = [tensor.detach().clone() for tensor in self._tensors()]
        self._take_from_worker_0()
        yield
        with torch.no_grad():
            torch._foreach_copy_(self._tensors(), own)
        self._backend.mark_step()

    def finish(self) -> bool:
        self._take_from_worker_0()
        return self._steps > 0

    @torch.no_grad()
    def _take_from_worker_0(self) -> None:
        flat = FlatTensors(self._tensors(), live=False)
        memory = flat.pack()
        if self._backend.rank != 0:
            memory.zero_()
        self._backend.mark_step()
        self._backend.all_reduce(memory)
        flat.unpack()
        self._backend.mark_step()

    def _tensors(self) -> list[Tensor]:
        return [*(p.detach() for p in self._parameters), *self._buffers]

    def agree_on_scale(self, scale: float) -> float:
        return smallest(scale, self._backend)

    def stats(self) -> SyncStats:
        return self._books.stats

    def take_records(self) -> list[SyncRecord]:
        return self._books.take()

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "start": self._start, "books": self._books.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._start = state["start"].to(self._start.device)
        self._books.load_state_dict(state["books"])
