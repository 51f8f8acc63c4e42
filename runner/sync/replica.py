"""One worker's weights as a vector, and the common weights that they set out from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.sync.flat import FlatTensors, parts
from runner.sync.outer import Rule
from runner.sync.telemetry import slots

#: Makes a rule that has these common weights.
MakeRule = Callable[[Tensor], Rule]

#: Weights and buffers, as far as they matter.
State = tuple[Tensor | None, Tensor | None]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Floating-point buffers, on which replicas have to agree as on weights; not masks: infinities have no mean.

    To be asked of a new model, which is the same on all workers.
    """
    return [b for b in model.buffers() if b.is_floating_point() and bool(torch.isfinite(b).all())]


class Replica:
    """The vector is [weights | floating-point buffers | further tensors | room for telemetry].

    Weights and buffers are its *state*: running statistics (of batch norm, say) are part of what replicas have to agree
    on. The common state is what all workers shared last; `length`: the norm of its weights.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        backend: Backend,
        make_rule: MakeRule,
        further: Sequence[Tensor] = (),
    ) -> None:
        self._backend = backend
        room = torch.zeros(slots(backend.world_size), dtype=parameters[0].dtype, device=parameters[0].device)
        self._flat = FlatTensors([*parameters, *buffers, *further, room], live=not backend.compiles)
        bounds = self._flat.bounds
        self.weights_end = bounds[len(parameters)]
        self._state_end = bounds[len(parameters) + len(buffers)]
        self.tail = bounds[-2]
        memory = self.pack()
        self.rule = make_rule(memory[: self.weights_end].clone())
        self._common_buffers = self.buffers().clone()
        self.length = torch.linalg.vector_norm(self.rule.weights)

    @property
    def regions(self) -> list[tuple[int, int]]:
        """Where weights, buffers and further tensors begin and end."""
        return [(0, self.weights_end), (self.weights_end, self._state_end), (self._state_end, self.tail)]

    def pack(self) -> Tensor:
        """The whole vector: the memory of the weights itself where tensors can share it."""
        return self._flat.pack()

    def weights(self) -> Tensor:
        return self.pack()[: self.weights_end]

    def buffers(self) -> Tensor:
        return self.pack()[self.weights_end : self._state_end]

    def unpack(self) -> None:
        """Give the model what the vector holds."""
        self._flat.unpack()

    def common(self, part: slice) -> Tensor:
        """This part of the common state, which lies within the weights or within the buffers."""
        if part.start < self.weights_end:
            return self.rule.weights[part]
        return self._common_buffers[part.start - self.weights_end : part.stop - self.weights_end]

    def note(self, where: State) -> None:
        """Copy weights and buffers as they are now to where there is room. The vector has to be packed."""
        memory = self._flat.memory
        now = memory[: self.weights_end], memory[self.weights_end : self._state_end]
        for room, values in zip(where, now, strict=True):
            if room is not None:
                room.copy_(values)

    def write_update(self, part: slice, where: Tensor) -> None:
        """What became of the common state here; further tensors as they are. The vector has to be packed."""
        where.copy_(self._flat.memory[part])
        if part.start < self._state_end:
            where.sub_(self.common(part))

    def receive(self, part: slice, mean: Tensor) -> None:
        """Take this part of what all workers have on average: weights by the rule, the rest by its all."""
        if part.start < self.weights_end:
            self.rule.receive(part, mean)
        elif part.start < self._state_end:
            self.common(part).add_(mean)
        else:
            self._flat.memory[part].copy_(mean)

    def take_common(self, left: State = (None, None)) -> None:
        """Set weights and buffers to the common ones, plus what has become of them since they were `left`, if given."""
        squared = torch.zeros_like(self.length)
        memory = self._flat.memory
        for part in parts(0, self.weights_end, memory.device):
            common = self.common(part)
            squared += torch.dot(common, common)
            _set(memory[part], common, left[0][part] if left[0] is not None else None)
        _set(memory[self.weights_end : self._state_end], self._common_buffers, left[1])
        self.length = squared.sqrt()
        self.unpack()

    @contextmanager
    def showing_common(self) -> Iterator[None]:
        """Within it the model has the common state; afterwards its own again."""
        with torch.no_grad():
            own = self.pack()[: self._state_end].clone()
            self.take_common()
            self._backend.mark_step()
        yield
        with torch.no_grad():
            self._flat.memory[: self._state_end].copy_(own)
            self.unpack()
            self._backend.mark_step()

    def release(self) -> None:
        """Give the model's tensors memory of their own again."""
        self._flat.release()

    def state_dict(self) -> dict[str, Any]:
        return {"rule": self.rule.state_dict(), "buffers": self._common_buffers}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state["rule"])
        self._common_buffers.copy_(state["buffers"])
        self.length = torch.linalg.vector_norm(self.rule.weights)


def _set(state: Tensor, common: Tensor, left: Tensor | None) -> None:
    if left is None:
        state.copy_(common)
    else:
        state.sub_(left).add_(common)
