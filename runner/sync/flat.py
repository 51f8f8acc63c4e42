"""Tensors as one vector, so that one collective can carry them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Elements to whose multiples each tensor begins: kernels read whole vector registers.
_ALIGNMENT = 16

#: Elements of a part on the CPU: few enough that its cache holds them from one operation to the next.
_PART = 2**17


def parts(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """A range of a vector in the pieces in which it is best worked on."""
    step = _PART if device.type == "cpu" else max(stop - start, 1)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


class FlatTensors:
    """Some tensors of one dtype and device, one after the other in `memory`; between two of them are zeros.

    `live`: they are made views of the memory, so that it always holds their values and a collective on it is one on
    them, without a copy. Otherwise `pack` copies them there and `unpack` back: torch_xla has no memory to share.
    """

    def __init__(self, tensors: Sequence[Tensor], live: bool) -> None:
        first = tensors[0]
        self._offsets: list[int] = []
        size = 0
        for tensor in tensors:
            assert tensor.dtype is first.dtype, (tensor.dtype, first.dtype)
            self._offsets.append(size)
            size += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
        self._tensors = list(tensors)
        self._live = live
        self.memory = torch.zeros(size, dtype=first.dtype, device=first.device)
        if live:
            self._copy_in()
            for tensor, view in zip(self._tensors, self.views(), strict=True):
                tensor.data = view

    def views(self) -> list[Tensor]:
        """The memory's parts, in the tensors' shapes, and with their strides, which an optimizer's moments share."""
        return [self._view(*one) for one in zip(self._offsets, self._tensors, strict=True)]

    def _view(self, offset: int, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return self.memory[offset : offset + tensor.numel()].view(tensor.shape)
        # A new tensor like it has its strides without gaps between elements.
        return self.memory.as_strided(tensor.shape, torch.empty_like(tensor).stride(), offset)

    @property
    def bounds(self) -> list[int]:
        """Where each tensor begins in the memory, and after the last one the memory's end."""
        return [*self._offsets, len(self.memory)]

    def pack(self) -> Tensor:
        """The memory, with the tensors' present values."""
        if not self._live:
            self._copy_in()
        return self.memory

    def unpack(self) -> None:
        """Give the tensors the memory's values."""
        if not self._live:
            torch._foreach_copy_(self._tensors, self.views())

    def release(self) -> None:
        """Give the tensors memory of their own again."""
        if self._live:
            for tensor in self._tensors:
                tensor.data = tensor.data.clone()
            self._live = False

    def _copy_in(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.views(), [tensor.detach() for tensor in self._tensors])
