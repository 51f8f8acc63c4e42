"""torch's optimizers as the runner builds them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from runner.config.choices import OptimizerName
from runner.config.schema import Optimizer
from runner.train.optim import build_optimizer

GRADIENTS = [[1.0, -2.0, 4.0], [0.5, 0.25, -1.0], [-3.0, 2.0, 0.125]]


def sgd(nesterov: bool, momentum: float = 0.9) -> Optimizer:
    return Optimizer(OptimizerName.sgd, lr=0.1, clip_norm=None, momentum=momentum, nesterov=nesterov)


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[list[float]]) -> Tensor:
    """The weight after fp16 steps with these gradients, some of them perhaps skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for gradient in gradients:
        weight.grad = scaler.scale(torch.tensor(gradient))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return weight.detach().clone()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("skipped", [[0], [1], [0, 1], []])
def test_a_step_that_fp16_skips_leaves_no_momentum(skipped: list[int], nesterov: bool) -> None:
    """Fused SGD ends where plain SGD does that was never given the skipped steps, wherever its memory comes from."""
    stale = [torch.full((3,), 3e38) for _ in range(64)]  # what such memory may hold
    del stale
    weight = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(sgd(nesterov), nn.ParameterList([weight]), 0.1, fused=True)
    steps = [[float("inf")] * 3 if n in skipped else gradient for n, gradient in enumerate(GRADIENTS)]
    found = trained(optimizer, weight, steps)

    plain = nn.Parameter(torch.ones(3))
    reference = torch.optim.SGD([plain], lr=0.1, momentum=0.9, nesterov=nesterov)
    expected = trained(reference, plain, [gradient for n, gradient in enumerate(GRADIENTS) if n not in skipped])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("fused", "momentum"), itertools.product([True, False], [0.0, 0.9]))
def test_momentum_is_there_from_the_beginning_where_it_is_needed(fused: bool, momentum: float) -> None:
    """As zeros, for fused kernels only."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(sgd(False, momentum), nn.ParameterList([weight]), 0.1, fused)
    state = optimizer.state[weight]
    assert ("momentum_buffer" in state) is (fused and momentum > 0)
    assert all(torch.equal(buffer, torch.zeros(3)) for buffer in state.values())
