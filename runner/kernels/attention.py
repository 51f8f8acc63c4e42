"""Attention of sequences that follow each other without padding.

On GPUs torch's flash attention computes sequences of different lengths in one call, in 16 bits.

On CPUs with dropout, sequences of similar lengths are computed together. torch's fast attention for CPUs has no
dropout. What it computes instead is the scores of all places in a padded batch, one operation after the other, in
memory. Here sequences are padded to a multiple of 8 tokens only, and as many of them are computed together as have
scores that fit into a core's cache. One after the other, short ones would spend their time on calling operations.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.overrides import handle_torch_function, has_torch_function

from runner.kernels.dropout import random_factors
from runner.kernels.unpadded import TokenLayout

#: (numbers of sequences, their weights [sequences, heads, length, length]) -> 0 for a weight that is dropped, else
#: 1 / (1 - p), in the weights' shape and dtype.
DropoutFactors = Callable[[slice, Tensor], Tensor]

#: Devices with the kernel.
_HAVE_FLASH = ("cuda",)
#: Sequences are padded to a multiple of this many tokens, at which matrix products are fastest.
_MULTIPLE = 8
#: The most scores that are computed together, unless a single sequence has more: 1 MiB in fp32.
_SCORES = 2**18


class AttentionOptions(NamedTuple):
    """`p`: of dropout; `scale`: of scores, by default 1 / sqrt(size); `causal`: no token attends to later ones."""

    p: float = 0.0
    scale: float | None = None
    causal: bool = False


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, options: AttentionOptions
) -> Tensor | None:
    """`unpadded_attention` by torch's kernel for GPUs, for which the host does not wait; None where it cannot be used.

    `query`: [1, heads, tokens, size]; `key`, `value`: the same, or with a divisor of `heads`. Returns
    [1, tokens, heads, size], under autocast in its precision.
    """
    # torch pads heads to a multiple of 8 itself, but not here. Exact dropout is a function mode, with other masks.
    if query.device.type not in _HAVE_FLASH or query.size(-1) % 8 or has_torch_function((query,)):
        return None
    device, shares_keys = query.device.type, query.size(1) != key.size(1)
    p, scale, causal = options
    if torch.is_autocast_enabled(device):  # rotary embeddings leave queries and keys in fp32
        query, key, value = (one.to(torch.get_autocast_dtype(device)) for one in (query, key, value))
    if not can_use_flash_attention(SDPAParams(query, key, value, None, p, causal, shares_keys)):
        return None
    tokens = [one[0].transpose(0, 1) for one in (query, key, value)]
    starts, longest = layout.starts, layout.length
    # torch.nn.attention.varlen calls this kernel, too, but has no dropout. Nested tensors take 2 ms on the host.
    output: Tensor = torch.ops.aten._flash_attention_forward(
        *tokens, starts, starts, longest, longest, p, causal, False, scale=scale
    )[0]
    return output.unsqueeze(0)


def unpadded_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], options: AttentionOptions
) -> Tensor:
    """Attention of each token to those of its sequence; dropout is from torch's generator.

    `query`: [tokens, heads, size], sequence after sequence; `key`, `value`: the same, or with a divisor of `heads`,
    each of which serves as many heads. `lengths`: of the sequences, in tokens. Returns [tokens, heads, size]. Products
    are at least in fp32, also under autocast, like torch's own with dropout.
    """
    tensors = (query, key, value)
    if has_torch_function(tensors):  # exact dropout has other masks
        own = unpadded_attention
        output: Tensor = handle_torch_function(own, tensors, *tensors, lengths, options)
        return output
    return with_factors(query, key, value, lengths, options, lambda _, weights: random_factors(weights, options.p))


def with_factors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    options: AttentionOptions,
    factors: DropoutFactors,
) -> Tensor:
    """Compute `unpadded_attention` with the caller's factors of dropout."""
    dtype, (_, heads, size) = value.dtype, query.shape
    scale = size**-0.5 if options.scale is None else options.scale
    with torch.autocast(query.device.type, enabled=False):
        tensors = [one.to(torch.promote_types(dtype, torch.float32)) for one in (query, key, value)]
        tensors = [one.repeat_interleave(heads // one.size(1), 1) for one in tensors]
        groups = _groups(tuple(lengths), heads, options.causal)
        outputs = []
        for group, *qkv in zip(
            groups, *(one.split([group.tokens for group in groups]) for one in tensors), strict=True
        ):
            queries, keys, values = (group.padded(one) for one in qkv)
            hidden = group.hidden.to(queries.dtype).expand(len(queries), -1, -1)
            weights = torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)
            of_sequences = weights.unflatten(0, (-1, heads))
            dropped = (of_sequences * factors(group.sequences, of_sequences)).flatten(0, 1)
            outputs.append(group.unpadded(dropped @ values))
        return torch.cat(outputs).to(dtype)


@dataclass(frozen=True, eq=False)
class _Group:
    """Sequences that are computed together, padded to one length.

    `sequences`: their numbers. `tokens`: of all of them. `layout`: of the heads of tokens, with a row for each sequence
    and head. `hidden`: what is added to scores, 0 or the lowest number; [sequences × heads, 1, length], or with
    `causal` [1, length, length].
    """

    sequences: slice
    tokens: int
    heads: int
    layout: TokenLayout
    hidden: Tensor

    def padded(self, tokens: Tensor) -> Tensor:
        """[tokens, heads, size] → [sequences × heads, length, size], with zeros as padding."""
        return self.layout.padded(tokens.flatten(0, 1))

    def unpadded(self, padded: Tensor) -> Tensor:
        """The reverse."""
        return self.layout.unpadded(padded).unflatten(0, (-1, self.heads))


@functools.lru_cache(maxsize=16)  # all layers of a model have the same
def _groups(lengths: tuple[int, ...], heads: int, causal: bool) -> list[_Group]:
    """Consecutive sequences whose lengths round up to the same multiple."""
    groups, start = [], 0
    for width, same in itertools.groupby(lengths, lambda length: -(-length // _MULTIPLE) * _MULTIPLE):
        own = list(same)
        most = max(1, _SCORES // max(1, heads * width**2))
        for begin in range(0, len(own), most):
            part = own[begin : begin + most]
            groups.append(_group(part, start, heads, width, causal))
            start += len(part)
    return groups


def _group(lengths: Sequence[int], start: int, heads: int, width: int, causal: bool) -> _Group:
    positions, lowest = torch.arange(width), torch.finfo(torch.float32).min
    real = positions < torch.tensor(lengths)[:, None]  # [sequences, width]
    padding = ~real.repeat_interleave(heads, 0).unsqueeze(1)
    # Padding follows the tokens, so none of them attends to it anyway if it attends to those before only.
    hidden = (positions > positions[:, None]).unsqueeze(0) if causal else padding
    sequence, position = real.nonzero(as_tuple=True)
    places = (sequence[:, None] * heads + torch.arange(heads)) * width + position[:, None]
    lows = torch.zeros(hidden.shape).masked_fill_(hidden, lowest)
    layout = TokenLayout(places.flatten(), len(lengths) * heads, width)
    return _Group(slice(start, start + len(lengths)), sum(lengths), heads, layout, lows)
