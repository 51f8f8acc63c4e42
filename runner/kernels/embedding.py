"""Embeddings whose gradient is computed as the rows that a step has used, out of all of the vocabulary."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Rows(torch.autograd.Function):
    """`functional.embedding` with a sparse gradient, which has each used row once.

    Unless the embedding is `sparse`, the weight already has a gradient, to which torch adds the rows in place. As in
    torch's dense gradient, rows that are used several times are added in their order, so the bits are the same.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, embedding: GradientKeepingEmbedding) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.embedding = embedding
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        (ids,), (gradient,) = ctx.saved_tensors, gradients
        embedding: GradientKeepingEmbedding = ctx.embedding
        rows, places = torch.unique(ids, return_inverse=True)
        sums = gradient.new_zeros(len(rows), gradient.size(-1))
        sums.index_add_(0, places.reshape(-1), gradient.reshape(-1, gradient.size(-1)))
        if embedding.padding_idx is not None:
            sums[rows == embedding.padding_idx] = 0
        if not embedding.sparse:
            embedding.start_gradient()
        size = embedding.weight.size()
        return None, torch.sparse_coo_tensor(rows[None], sums, size, is_coalesced=True, check_invariants=False), None


class GradientKeepingEmbedding(nn.Embedding):
    """`nn.Embedding` that gives its weight the same memory for the gradient in each step.

    If it is `sparse`, the gradient has the used rows only, until `make_dense`, at the end of a step, adds them to that
    memory. Where the weight is also used in another way, such as for a penalty, torch makes the sum dense at once.
    """

    _kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        rows: Tensor = _Rows.apply(input, self.weight, self)
        return rows

    def start_gradient(self) -> Tensor:
        """The weight's gradient; zeros, if it had none."""
        if self.weight.grad is None:
            self._kept = torch.zeros_like(self.weight) if self._kept is None else self._kept.zero_()
            self.weight.grad = self._kept
        return self.weight.grad

    def make_dense(self) -> None:
        """Turn the weight's gradient into a usual one, if it is sparse."""
        gradient = self.weight.grad
        if gradient is not None and gradient.is_sparse:
            self.weight.grad = None
            self.start_gradient().add_(gradient)


def keep_gradients(model: nn.Module, least_bytes: int = 0) -> list[GradientKeepingEmbedding]:
    """Let the model's embeddings of at least this size keep the memory of their gradients. Returns all that do.

    Not if another layer has the same weight, if hooks look at the gradient, or in 16 bits, which torch adds up in
    another precision. Between one step and the next nothing else may hold the gradient.
    """
    owners = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    for module in model.modules():
        if type(module) is not nn.Embedding or owners[id(module.weight)] != 1:
            continue
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        kind = module.weight.dtype in (torch.float32, torch.float64) and module.weight.nbytes >= least_bytes
        if plain and kind and not module.weight._backward_hooks:
            module.__class__ = GradientKeepingEmbedding
    return [module for module in model.modules() if isinstance(module, GradientKeepingEmbedding)]
