"""Dropout on a CPU from few random bits: torch draws a number for each element, on one core."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Random bits for each element: the probability of dropout is rounded to a multiple of 2**-16.
_BITS = 16


def random_factors(values: Tensor, p: float) -> Tensor:
    """0 for an element that is dropped, else 1 / (1 - p), from torch's generator; shape and dtype of `values`."""
    per_draw = 64 // _BITS
    drawn = torch.empty(-(-values.numel() // per_draw), dtype=torch.int64).random_(-(2**63), None)
    # A signed number with 16 random bits is below this one in a share p of all cases.
    least = min(round(p * 2**_BITS), 2**_BITS - 1) - 2 ** (_BITS - 1)
    kept = torch.empty(values.numel(), dtype=values.dtype)
    torch.ge(drawn.view(torch.int16)[: values.numel()], least, out=kept)
    return kept.mul_(1 / (1 - p) if p < 1 else 0.0).view(values.shape)


class FewBitsDropout(nn.Dropout):
    """`nn.Dropout` with `random_factors`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        factors = random_factors(input, self.p)
        return input.mul_(factors) if self.inplace else input * factors


def draw_few_bits(model: nn.Module) -> None:
    """Replace the model's `nn.Dropout` modules."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, FewBitsDropout(child.p, child.inplace).train(child.training))
