"""Tensors in one flat vector."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.sync.vectors import FlatTensors


def some_tensors() -> list[Tensor]:
    """Of several shapes; one is transposed, one has gaps, one is empty, one is a scalar."""
    torch.manual_seed(0)
    return [
        torch.randn(3, 5),
        torch.randn(4, 7).T,
        torch.randn(6, 6)[:, ::2],
        torch.randn(0),
        torch.tensor(2.5),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]


def test_shared_tensors_keep_values_and_strides() -> None:
    """Tensors and vector are the same memory until `release`. Strides matter to an optimizer's moments."""
    tensors = some_tensors()
    values, strides = [t.clone() for t in tensors], [torch.empty_like(t).stride() for t in tensors]
    flat = FlatTensors(tensors, shared=True)
    assert flat.pack() is flat.memory
    for tensor, value, stride in zip(tensors, values, strides, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.stride() == stride
    flat.memory.mul_(2)
    assert all(torch.equal(tensor, 2 * value) for tensor, value in zip(tensors, values, strict=True))
    tensors[1].zero_()
    assert not flat.views()[1].any()
    flat.release()
    flat.memory.zero_()
    assert torch.equal(tensors[0], 2 * values[0])


def test_tensors_that_are_not_shared_are_copied() -> None:
    """`pack` copies into the vector and `unpack` back."""
    tensors = some_tensors()
    values = [t.clone() for t in tensors]
    flat = FlatTensors(tensors, shared=False)
    assert float(flat.memory.abs().sum()) == 0
    flat.pack().mul_(3)
    assert torch.equal(tensors[0], values[0])
    flat.unpack()
    assert all(torch.equal(tensor, 3 * value) for tensor, value in zip(tensors, values, strict=True))


def test_tensors_are_aligned() -> None:
    """The padding is zero."""
    flat = FlatTensors([torch.ones(3), torch.ones(17), torch.ones(16)], shared=True)
    assert flat.bounds == [0, 16, 48, 64]
    assert float(flat.memory.sum()) == 36
