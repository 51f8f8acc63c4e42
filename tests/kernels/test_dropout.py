"""Dropout from few random bits; the draws themselves are tested with attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runner.kernels.dropout import draw_few_bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
def test_it_is_torchs_dropout_with_other_draws(dtype: torch.dtype, inplace: bool) -> None:
    """The same scale, share, gradients and state, and none of it in evaluation."""
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Dropout(0.25, inplace)))
    draw_few_bits(model)
    values = torch.full((7, 1001), 3.0, dtype=dtype, requires_grad=True)
    output = model(values * 1)
    kept = output != 0
    assert output.dtype is dtype
    assert torch.equal(output[kept], torch.full_like(output[kept], 4.0))
    assert abs(float((~kept).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    output.sum().backward()
    assert torch.allclose(values.grad, kept.to(dtype) / 0.75, rtol=1e-2)
    assert torch.equal(model.eval()(values), values)


def test_modules_with_their_own_dropout_keep_it() -> None:
    model = nn.Sequential(nn.Dropout(0.1).eval(), nn.Dropout1d(0.1), nn.AlphaDropout(0.1))
    draw_few_bits(model)
    assert not model[0].training
    assert [type(module) for module in model[1:]] == [nn.Dropout1d, nn.AlphaDropout]
