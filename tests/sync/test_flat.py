"""Tensors that share one memory."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.sync.flat import FlatTensors, parts


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


def test_live_tensors_keep_values_and_strides_and_share_the_memory() -> None:
    """What is done to the vector is done to them, and back; moments made before or after have the same layout."""
    tensors = some_tensors()
    values, strides = [t.clone() for t in tensors], [torch.empty_like(t).stride() for t in tensors]
    flat = FlatTensors(tensors, live=True)
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


def test_copies_where_memory_cannot_be_shared() -> None:
    """`pack` takes the present values, `unpack` gives the memory's."""
    tensors = some_tensors()
    values = [t.clone() for t in tensors]
    flat = FlatTensors(tensors, live=False)
    assert float(flat.memory.abs().sum()) == 0
    flat.pack().mul_(3)
    assert torch.equal(tensors[0], values[0])
    flat.unpack()
    assert all(torch.equal(tensor, 3 * value) for tensor, value in zip(tensors, values, strict=True))


def test_tensors_begin_at_whole_vector_registers() -> None:
    """Between two of them is room, which counts nowhere."""
    flat = FlatTensors([torch.ones(3), torch.ones(17), torch.ones(16)], live=True)
    assert flat.bounds == [0, 16, 48, 64]
    assert float(flat.memory.sum()) == 36


def test_parts_cover_a_range_once() -> None:
    """On the CPU small ones, elsewhere the whole; of nothing, none."""
    for stop in (0, 1, 2**17, 2**17 + 1, 5 * 2**17):
        covered = [i for part in parts(0, stop, torch.device("cpu")) for i in (part.start, part.stop)]
        assert covered[:1] + covered[-1:] == ([0, stop] if stop else [])
        assert covered[1:-1:2] == covered[2::2]
        assert list(parts(0, stop, torch.device("meta"))) == ([slice(0, stop)] if stop else [])
