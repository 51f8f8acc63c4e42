"""Random bits as a pure integer function of what they are for, with the same result on every device.

A sample's key is hashed from (seed, optimizer step, sample id). A call site and every coordinate except the last are
hashed into it, all in 64-bit arithmetic on small tensors. Only the last dimension, which has most elements, uses 32-bit
arithmetic: that is fast on CPUs and native on TPUs. Coordinates are hashed one by one and never as a flat index, since
an element's bits must not change when its row is padded to another length or moves to another micro-batch.

Wrapping multiplication, addition, shifts and exclusive-or of two's complement integers give the same bits everywhere.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = 0x9E3779B9


def _signed(value: int, bits: int) -> int:
    """The signed integer with the same `bits` bits: torch has signed integers only."""
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


_GOLDEN = _signed(_GOLDEN64, 64)
_MIX_A, _MIX_B = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_LOW_A, _LOW_B = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)


def sample_keys(seed: int, step: int, ids: np.ndarray) -> Tensor:
    """One key per sample id for an optimizer step (from 0); int64 of shape [samples], on the CPU.

    The keys enter a graph as data: with seed and step as constants XLA would compile every step again.
    """
    key = torch.zeros(len(ids), dtype=torch.int64)
    for coordinate in (seed, step, torch.from_numpy(np.array(ids, dtype=np.int64))):
        key = _fold(key, coordinate)
    return key


def row_keys(keys: Tensor, rows: int) -> Tensor:
    """The keys of several rows of each sample, sample after sample; int64 of shape [samples × rows]."""
    return _fold(keys.unsqueeze(-1), torch.arange(rows, dtype=torch.int64, device=keys.device)).flatten()


def keep_mask(keys: Tensor, site: int, shape: tuple[int, ...], p: float) -> Tensor:
    """Draw the elements of a tensor that survive dropout with probability `p`; bool of `shape`.

    `keys`: of the samples, which are the first dimension. `site`: number of the dropout call within one forward pass.
    """
    return _kept(_fold(keys, site), shape[1:], p)


def keep_mask_of_tokens(
    keys: Tensor, site: int, rows: Tensor, positions: Tensor, shape: tuple[int, ...], p: float
) -> Tensor:
    """Draw them for tokens of several samples in a row: the bits at their places in `keep_mask`'s result.

    `rows`, `positions`: of each token, int64 of shape [tokens]. `shape`: of one token. Returns [tokens, *shape].
    """
    return _kept(_fold(_fold(keys, site)[rows], positions), shape, p)


def _kept(keys: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """A mask of `shape` for each key: bool of shape [keys, *shape]."""
    if p >= 1:
        return torch.zeros((len(keys), *shape), dtype=torch.bool, device=keys.device)
    rows = keys
    *middle, last = shape or (1,)
    for size in middle:
        rows = _fold(rows.unsqueeze(-1), torch.arange(size, dtype=torch.int64, device=keys.device))
    # Without the sign bit: XLA's CPU compiler gets the sign wrong when a product is compared immediately.
    bits = _elements(rows, last).bitwise_and_(2**31 - 1)
    return (bits >= min(round(p * 2**31), 2**31 - 1)).view(len(keys), *shape)


def _fold(key: Tensor, coordinate: Tensor | int) -> Tensor:
    """The finaliser of SplitMix64 over key + (coordinate + 1) × golden ratio.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with Stafford's variant 13.
    """
    x = key + (coordinate + 1) * torch.full((), _GOLDEN, dtype=torch.int64, device=key.device)
    x = (x ^ _shifted(x, 30, 64)) * _MIX_A
    x = (x ^ _shifted(x, 27, 64)) * _MIX_B
    return x ^ _shifted(x, 31, 64)


def _elements(rows: Tensor, size: int) -> Tensor:
    """32 bits for each of `size` elements of every row; int32 of shape [*rows, size].

    lowbias32 of Wellons 2018, "Prospecting for Hash Functions", over one half of the row's key and the coordinate. The
    other half is mixed in between, so that two rows do not share a mask if 32 bits of their keys agree. The final shift
    is omitted: it changes low bits only, which hardly affect a comparison.
    """
    column = _low32(torch.arange(size, dtype=torch.int64, device=rows.device) * _GOLDEN32)
    x = _low32(torch.bitwise_right_shift(rows, 32)).unsqueeze(-1) + column
    x ^= _shifted(x, 16, 32)
    x *= _LOW_A
    x ^= _low32(rows).unsqueeze(-1)
    x ^= _shifted(x, 15, 32)
    x *= _LOW_B
    return x


def _shifted(x: Tensor, by: int, bits: int) -> Tensor:
    """Logical shift to the right; torch's shift is arithmetic."""
    # Not `x >> by`: torch_xla 2.9 compiles it to a division, which rounds negative numbers the other way.
    return torch.bitwise_right_shift(x, by).bitwise_and_((1 << (bits - by)) - 1)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 as int32, reduced to its range first: a cast out of range need not wrap."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)
