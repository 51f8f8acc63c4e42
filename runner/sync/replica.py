"""One worker's weights as a vector, and the common weights that they set out from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.sync.flat import FlatTensors
from runner.sync.outer import Rule
from runner.sync.telemetry import slots


class Replica:
    """The vector is [weights | floating-point buffers | further tensors | room for telemetry].

    Weights and buffers are its *state*: running statistics (of batch norm, say) are part of what replicas have to agree
    on. `common`: the state that all workers shared last, weights and buffers apart; `length`: the norm of its weights.
    """

    def __init__(self, model: nn.Module, backend: Backend, further: Sequence[Tensor] = ()) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        room = torch.zeros(slots(backend.world_size), dtype=parameters[0].dtype, device=parameters[0].device)
        self._flat = FlatTensors([*parameters, *buffers, *further, room], live=not backend.compiles)
        bounds = self._flat.bounds
        self.weights_end = bounds[len(parameters)]
        self._state_end = bounds[len(parameters) + len(buffers)]
        self.tail = bounds[-2]
        state = self.state()
        self.common = [state[: self.weights_end].clone(), state[self.weights_end :].clone()]
        self.length = torch.linalg.vector_norm(self.common[0])

    def pack(self) -> Tensor:
        """The whole vector: the memory of the weights itself where tensors can share it."""
        return self._flat.pack()

    def state(self) -> Tensor:
        return self._flat.pack()[: self._state_end]

    def unpack(self) -> None:
        """Give the model what the vector holds."""
        self._flat.unpack()

    def subtract_common(self, vector: Tensor) -> None:
        """Turn the state at the beginning of `vector` into an update."""
        for part, common in zip(self._parts(vector), self.common, strict=True):
            part.sub_(common)

    def add_common(self, vector: Tensor) -> None:
        for part, common in zip(self._parts(vector), self.common, strict=True):
            part.add_(common)

    def take_common(self, vector: Tensor) -> None:
        """Let `vector` begin with the common state."""
        for part, common in zip(self._parts(vector), self.common, strict=True):
            part.copy_(common)

    def move_common(self, rule: Rule, mean: Tensor, mean_lr: float) -> None:
        """Move the common state by the mean update that `mean` begins with: weights by the rule, buffers by its all."""
        weights, buffers = self._parts(mean)
        rule.apply(self.common[0], weights, mean_lr)
        self.common[1].add_(buffers)
        self.length = torch.linalg.vector_norm(self.common[0])

    def load_common(self, common: Sequence[Tensor]) -> None:
        for own, saved in zip(self.common, common, strict=True):
            own.copy_(saved)
        self.length = torch.linalg.vector_norm(self.common[0])

    @contextmanager
    def showing_common(self) -> Iterator[None]:
        """Within it the model has the common state; afterwards its own again."""
        with torch.no_grad():
            own = self.state().clone()
            self.take_common(self._flat.memory)
            self.unpack()
        yield
        with torch.no_grad():
            self._flat.memory[: self._state_end].copy_(own)
            self.unpack()

    def release(self) -> None:
        """Give the model's tensors memory of their own again."""
        self._flat.release()

    def _parts(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        return vector[: self.weights_end], vector[self.weights_end : self._state_end]
