"""Tensors as one flat vector, and work on a vector chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements to whose multiples each tensor is aligned, so that kernels read whole vector registers.
ALIGNMENT = 16

#: Numbers that are processed together, by the type of the device; others process a whole vector. On a CPU they stay in
#: its caches from one operation to the next, on a GPU they limit the memory for intermediate results.
_CHUNK = {"cpu": 2**18, "cuda": 2**24}


class FlatLayout:
    """The places of tensors of one dtype, one after the other in a vector. `bounds`: where each begins, and the end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.bounds = [0]
        for tensor in tensors:
            assert tensor.dtype is tensors[0].dtype, (tensor.dtype, tensors[0].dtype)
            self.bounds.append(self.bounds[-1] + -(-tensor.numel() // ALIGNMENT) * ALIGNMENT)

    def views(self, vector: Tensor) -> list[Tensor]:
        """The vector in pieces with the shapes and strides of the tensors."""
        return [self._view(vector, start, like) for start, like in zip(self.bounds, self._tensors, strict=False)]

    def _view(self, vector: Tensor, start: int, like: Tensor) -> Tensor:
        if like.is_contiguous():
            return vector[start : start + like.numel()].view(like.shape)
        # The strides of a new tensor like it have no gaps between elements. An optimizer's moments have the same.
        return vector.as_strided(like.shape, torch.empty_like(like).stride(), vector.storage_offset() + start)


class FlatTensors:
    """Tensors of one dtype and device, one after the other in the vector `memory`, with zeros as padding.

    `shared`: the tensors become views of the vector, so that a collective on it needs no copy. Otherwise `pack` copies
    them into it and `unpack` back: on torch_xla tensors cannot share memory.
    """

    def __init__(self, tensors: Sequence[Tensor], shared: bool) -> None:
        first, self._layout = tensors[0], FlatLayout(tensors)
        self.bounds = self._layout.bounds
        self._tensors = list(tensors)
        self._shared = shared
        self.memory = torch.zeros(self.bounds[-1], dtype=first.dtype, device=first.device)
        if shared:
            self._copy_in()
            for tensor, view in zip(self._tensors, self.views(), strict=True):
                tensor.data = view

    def views(self) -> list[Tensor]:
        """The vector in pieces with the shapes and strides of the tensors."""
        return self._layout.views(self.memory)

    def pack(self) -> Tensor:
        """The vector with the tensors' current values."""
        if not self._shared:
            self._copy_in()
        return self.memory

    def unpack(self) -> None:
        """Set the tensors to the vector's values."""
        if not self._shared:
            torch._foreach_copy_(self._tensors, self.views())

    def release(self) -> None:
        """Give each tensor its own memory again."""
        if self._shared:
            for tensor in self._tensors:
                tensor.data = tensor.data.clone()
            self._shared = False

    def _copy_in(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.views(), [tensor.detach() for tensor in self._tensors])


def chunks(part: slice, device: torch.device) -> list[slice]:
    """A part of a vector in pieces, each of which is processed together; at least one."""
    size = _CHUNK.get(device.type, max(part.stop - part.start, 1))
    starts = range(part.start, part.stop, size) or [part.start]
    return [slice(start, min(start + size, part.stop)) for start in starts]


def norm(vector: Tensor) -> Tensor:
    """The L2 norm."""
    own = [vector[chunk] for chunk in chunks(slice(0, len(vector)), vector.device)]
    return norm_of_squares([torch.dot(chunk, chunk) for chunk in own])


def norm_of_squares(squares: Sequence[Tensor]) -> Tensor:
    """The L2 norm from the sums of squares of all chunks: one fp32 sum over 20 million squares would be wrong in the
    fourth digit."""
    return torch.stack(tuple(squares)).sum().sqrt()
