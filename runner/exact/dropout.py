"""Dropout whose masks depend on seed, optimizer step, sample and call site only, not on how a batch is split."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from runner.errors import UserError
from runner.exact.stream import keep_mask, keep_mask_of_tokens, row_keys, sample_keys
from runner.kernels.attention import AttentionOptions, DropoutFactors, unpadded_attention, with_factors
from runner.kernels.unpadded import current_layout

#: (optimizer step from 0, row numbers of the micro-batch, device) -> context manager for the forward pass.
DropoutStreams = Callable[[int, np.ndarray, torch.device], AbstractContextManager[object]]

#: Rows that a batch has for each sample.
_rows: ContextVar[int] = ContextVar("rows of a sample", default=1)


@contextlib.contextmanager
def rows_per_sample(rows: int) -> Iterator[None]:
    """A forward pass within it has so many rows for each sample, such as the two texts of a pair.

    They follow each other: those of the first sample, those of the second and so on. Each has masks of its own.
    """
    before = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(before)


def standard_streams(step: int, ids: np.ndarray, device: torch.device) -> AbstractContextManager[object]:
    """Dropout from the worker's own generator, as usual in PyTorch."""
    return nullcontext()


def exact_streams(seed: int) -> DropoutStreams:
    """Dropout as a pure function of (seed, step, sample id, call site, coordinates within the sample)."""

    def streams(step: int, ids: np.ndarray, device: torch.device) -> AbstractContextManager[object]:
        keys = sample_keys(seed, step, ids)
        if device.type == "cuda":  # copying from pageable memory would make the host wait for the device
            keys = keys.pin_memory()
        return ExactDropout(keys.to(device, non_blocking=True))

    return streams


class ExactDropout(TorchFunctionMode):
    """Replaces torch's dropout during one forward pass of one micro-batch.

    `keys`: int64 of shape [samples], on the model's device. Raises UserError for a dropout it cannot make exact.
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self._samples = keys
        self._site = 0

    @property
    def _keys(self) -> Tensor:
        """One key for each row of the batch."""
        rows = _rows.get()
        return self._samples if rows == 1 else row_keys(self._samples, rows)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, *args, **(kwargs or {}))

    def mask(self, values: Tensor, p: float) -> Tensor:
        """The mask of the next call site: 0 where an element is dropped, else 1 / (1 - p), in the dtype of `values`."""
        shape, layout, keys = tuple(values.shape), current_layout(), self._keys
        site = self._next_site(p)
        if shape[:1] == (len(keys),):
            keep = keep_mask(keys, site, shape, p)
        elif layout is not None and shape[:2] == (1, len(layout.places)):  # a model's layer that computes no padding
            keep = keep_mask_of_tokens(keys, site, *layout.row_and_position(), shape[2:], p).unsqueeze(0)
        else:
            raise not_exact(
                f"dropout is applied to a tensor of shape {list(shape)} in a micro-batch of {len(keys)}, "
                "so its first dimension is not the sample"
            )
        return _factors(keep, p, values.dtype)

    def _next_site(self, p: float) -> int:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        self._site += 1
        return self._site - 1

    def factors_of_samples(self, p: float) -> DropoutFactors:
        """The mask of the next call site, for some samples at a time."""
        site, keys = self._next_site(p), self._keys

        def factors(samples: slice, values: Tensor) -> Tensor:
            return _factors(keep_mask(keys[samples], site, tuple(values.shape), p), p, values.dtype)

        return factors


def _factors(keep: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return keep.to(dtype).mul_(1 / (1 - p) if p < 1 else 0.0)


def not_exact(reason: str) -> UserError:
    modes = "equivalence=exact (or identical) is not possible for this model"
    return UserError(f"{modes}: {reason}; use equivalence=standard")


def _dropout(mode: ExactDropout, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    mask = mode.mask(input, p)
    return input.mul_(mask) if inplace else input * mask


def _dropout_of_torch(mode: ExactDropout, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train)


def _dropout_in_place(mode: ExactDropout, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train, inplace=True)


def _attention(
    mode: ExactDropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention without fused kernels, which draw their masks inside. Shapes as in torch's documentation."""
    if dropout_p == 0 or (is_causal and attn_mask is not None):  # torch rejects the combination
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query * (1 / math.sqrt(query.size(-1)) if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    dtype = scores.dtype
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        boolean = attn_mask.dtype is torch.bool
        hidden = ~attn_mask if boolean else attn_mask.isneginf()
        scores = scores if boolean else scores + attn_mask
        # Not minus infinity: a row that attends to nothing must give 0, and a gradient of 0.
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return (weights * mode.mask(weights, dropout_p)).to(dtype) @ value


def _unpadded_attention(
    mode: ExactDropout, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], options: AttentionOptions
) -> Tensor:
    """Each sequence is a sample, with the part of its mask that is not padding."""
    return with_factors(query, key, value, lengths, options, mode.factors_of_samples(options.p))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout_of_torch,
    torch.dropout_: _dropout_in_place,
    functional.scaled_dot_product_attention: _attention,
    unpadded_attention: _unpadded_attention,
}
