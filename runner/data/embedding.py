"""Embeddings that keep the memory of their gradient, which is as large as the vocabulary."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Rows(torch.autograd.Function):
    """`functional.embedding` with a sparse gradient, which has each used row once.

    torch adds it to a dense gradient in place. As in torch's dense gradient, rows that are used several times are added
    in their order, so that the bits are the same.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size, ctx.padding_idx = weight.size(), padding_idx
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        (ids,), (gradient,) = ctx.saved_tensors, gradients
        rows, places = torch.unique(ids, return_inverse=True)
        sums = gradient.new_zeros(len(rows), ctx.size[1])
        sums.index_add_(0, places.reshape(-1), gradient.reshape(-1, ctx.size[1]))
        if ctx.padding_idx is not None:
            sums[rows == ctx.padding_idx] = 0
        return (
            None,
            torch.sparse_coo_tensor(rows[None], sums, ctx.size, is_coalesced=True, check_invariants=False),
            None,
        )


class GradientKeepingEmbedding(nn.Embedding):
    """`nn.Embedding` that gives its weight the same memory for the gradient in each step."""

    _kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not self.weight.requires_grad:
            return super().forward(input)
        if self.weight.grad is None:
            self._kept = torch.zeros_like(self.weight) if self._kept is None else self._kept.zero_()
            self.weight.grad = self._kept
        rows: Tensor = _Rows.apply(input, self.weight, self.padding_idx)
        return rows


def keep_gradients(model: nn.Module) -> None:
    """Let the model's embeddings keep the memory of their gradients.

    Not if another layer has the same weight, or in 16 bits, which torch adds up in another precision.
    """
    owners = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    for module in model.modules():
        if type(module) is not nn.Embedding or owners[id(module.weight)] > 1:
            continue
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        if plain and module.weight.dtype in (torch.float32, torch.float64):
            module.__class__ = GradientKeepingEmbedding
