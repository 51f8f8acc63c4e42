"""The weights that a worker trains, as one vector that can be averaged over workers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runner.backends import Backend
from runner.sync.vectors import FlatTensors


class ReplicaVector:
    """A model's trainable weights and `buffers` as one `vector`.

    `parts`: where weights and buffers are in it. The vector is the memory of the tensors themselves,
    except on torch_xla: there `pack` copies into it, and `unpack` back.
    """

    def __init__(self, model: nn.Module, buffers: Sequence[Tensor], backend: Backend) -> None:
        self.model = model
        self._backend = backend
        weights = [p for p in model.parameters() if p.requires_grad]
        self._flat = FlatTensors([*weights, *buffers], shared=not backend.compiles)
        end = self._flat.bounds[len(weights)]
        self.parts = [slice(0, end), slice(end, self._flat.bounds[-1])]
        self.weight_bytes = sum(p.nbytes for p in weights)
        self.vector = self._flat.pack()

    def pack(self) -> Tensor:
        """The vector with the current weights and buffers."""
        return self._flat.pack()

    def unpack(self) -> None:
        """Set weights and buffers to the vector's values."""
        self._flat.unpack()
        self._backend.mark_step()

    def release(self) -> None:
        """Give each tensor its own memory again."""
        self._flat.release()
