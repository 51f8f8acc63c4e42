"""Attention with dropout on a CPU, one sequence after the other.

torch's fast attention for CPUs has no dropout. What it computes instead is the scores of all places in a padded batch,
one operation after the other, in memory. A sequence has no padding, and its scores fit into a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

#: (number of a sequence, its weights) -> 0 for a weight that is dropped, else 1 / (1 - p), in the weights' dtype.
DropoutFactors = Callable[[int, Tensor], Tensor]

#: Random bits per weight: the probability of dropout is rounded to a multiple of 2**-16.
_BITS = 16


def attention_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], p: float, scale: float | None, causal: bool
) -> Tensor:
    """Attention of each token to those of its sequence, or with `causal` to itself and those before.

    `query`: [heads, tokens, size], sequence after sequence; `key`, `value`: the same, or a divisor of `heads`, each of
    which serves as many heads. `lengths`: of the sequences, in tokens. `p`: of dropout, from torch's generator.
    Returns [tokens, heads, size]. Products are at least in fp32, also under autocast, like torch's own with dropout.
    `scale`: of the scores, by default 1 / sqrt(size).
    """
    tensors = (query, key, value)
    if has_torch_function(tensors):  # exact dropout has other masks
        own = attention_by_sequence
        output: Tensor = handle_torch_function(own, tensors, *tensors, lengths, p, scale, causal)
        return output
    return with_factors(query, key, value, lengths, scale, causal, _drawn(len(query), lengths, p))


def with_factors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    causal: bool,
    of: DropoutFactors,
) -> Tensor:
    """The same with factors of dropout by the caller."""
    dtype = value.dtype
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = (one.to(torch.promote_types(dtype, torch.float32)) for one in (query, key, value))
        query = query * (query.size(-1) ** -0.5 if scale is None else scale)
        if len(key) != len(query):
            key, value = (one.repeat_interleave(len(query) // len(one), 0) for one in (key, value))
        sequences = zip(*(one.split(list(lengths), 1) for one in (query, key, value)), strict=True)
        outputs = []
        for number, (queries, keys, values) in enumerate(sequences):
            scores = queries @ keys.transpose(1, 2)
            if causal:
                later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
                scores = scores.masked_fill(later, -torch.inf)
            weights = scores.softmax(-1)
            outputs.append(((weights * of(number, weights)) @ values).transpose(0, 1))
        return torch.cat(outputs).to(dtype)


def _drawn(heads: int, lengths: Sequence[int], p: float) -> DropoutFactors:
    """From 16 random bits for each weight: torch's own dropout takes seven times as long to draw."""
    sizes = [heads * length**2 for length in lengths]
    per_draw = 64 // _BITS
    drawn = torch.empty(-(-sum(sizes) // per_draw), dtype=torch.int64).random_(-(2**63), None)
    of_sequences = drawn.view(torch.int16)[: sum(sizes)].split(sizes)
    # A signed number with 16 random bits is below this one in a share p of all cases.
    least = min(round(p * 2**_BITS), 2**_BITS - 1) - 2 ** (_BITS - 1)
    factor = 1 / (1 - p) if p < 1 else 0.0

    def factors(number: int, weights: Tensor) -> Tensor:
        return (of_sequences[number] >= least).to(weights.dtype).mul_(factor).view(weights.shape)

    return factors
