"""The weights that a worker trains, as one vector that can be averaged over workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from runner.backends import Backend
from runner.sync.optimizers import Moments
from runner.sync.vectors import FlatTensors


class ReplicaVector:
    """A model's trainable weights, `buffers`, and the optimizer's `moments` if these are averaged, as one `vector`.

    `parts`: where weights, buffers and each moment are in it. The vector is the memory of the tensors themselves,
    except on torch_xla: there `pack` copies into it, and `unpack` back.
    """

    def __init__(self, model: nn.Module, buffers: Sequence[Tensor], moments: Moments | None, backend: Backend) -> None:
        self.model = model
        self._moments, self._backend = moments, backend
        weights = [p for p in model.parameters() if p.requires_grad]
        groups: list[Sequence[Tensor]] = [weights, buffers, *(moments.by_name() if moments is not None else [])]
        self._flat = FlatTensors(list(itertools.chain(*groups)), shared=not backend.compiles)
        ends = itertools.accumulate(map(len, groups), initial=0)
        self.parts = [slice(*pair) for pair in itertools.pairwise(self._flat.bounds[end] for end in ends)]
        self.weight_bytes = sum(p.nbytes for p in weights)
        self.vector = self._flat.pack()

    def pack(self) -> Tensor:
        """The vector with the current weights and buffers."""
        return self._flat.pack()

    def pack_with_moments(self) -> Tensor:
        """The vector with all current values."""
        if self._moments is not None:
            self._moments.collect()
        return self._flat.pack()

    def unpack(self) -> None:
        """Set weights, buffers and moments to the vector's values."""
        self._flat.unpack()
        self._backend.mark_step()

    def unpack_average(self, steps: int) -> None:
        """Set them to an average over workers that have made `steps` optimizer steps."""
        self._flat.unpack()
        if self._moments is not None:
            self._moments.set_step_count(steps)
        self._backend.mark_step()

    def release(self) -> None:
        """Give each tensor its own memory again."""
        self._flat.release()
