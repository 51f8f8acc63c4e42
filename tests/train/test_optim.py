"""torch's optimizers as the runner builds them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.config.choices import OptimizerName
from runner.config.compose import compose, settings
from runner.config.schema import Optimizer
from runner.train.optim import build_optimizer, parameter_groups

GRADIENTS = [[1.0, -2.0, 4.0], [0.5, 0.25, -1.0], [-3.0, 2.0, 0.125]]


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[list[float]]) -> Tensor:
    """The weight after fp16 steps with these gradients; the scaler skips steps with an infinite one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for gradient in gradients:
        weight.grad = scaler.scale(torch.tensor(gradient))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return weight.detach().clone()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("skipped", [[0], [0, 1], []])
def test_skipped_fp16_steps_leave_no_momentum(skipped: list[int], nesterov: bool) -> None:
    """Fused SGD ends where plain SGD ends without the skipped steps, though torch would not initialise its buffer."""
    stale = [torch.full((3,), 3e38) for _ in range(64)]  # what uninitialised memory may contain
    del stale
    weight = nn.Parameter(torch.ones(3))
    config = Optimizer(OptimizerName.sgd, lr=0.1, clip_norm=None, momentum=0.9, nesterov=nesterov)
    optimizer = build_optimizer(config, nn.ParameterList([weight]), fused=True)
    steps = [[float("inf")] * 3 if n in skipped else gradient for n, gradient in enumerate(GRADIENTS)]
    found = trained(optimizer, weight, steps)

    plain = nn.Parameter(torch.ones(3))
    reference = torch.optim.SGD([plain], lr=0.1, momentum=0.9, nesterov=nesterov)
    kept = [gradient for n, gradient in enumerate(GRADIENTS) if n not in skipped]
    assert torch.equal(found, trained(reference, plain, kept))


@pytest.mark.parametrize("name", OptimizerName)
def test_every_optimizer_descends(name: OptimizerName) -> None:
    """Its preset builds torch's class with every setting; decay, and the learning rate of each step, reach it."""
    config = settings(compose([f"optimizer={name.name}", "optimizer.weight_decay=0.1"])).optimizer
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(config, model, fused=True)
    assert type(optimizer).__name__.lower() == name.name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for setting, value in config.settings.items():
        assert optimizer.param_groups[0][setting] == (tuple(value) if setting == "betas" else value)
    inputs, losses = torch.randn(8, 4), []
    for lr in [0.0] + [0.01] * 20:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]  # a learning rate of 0 moves nothing
    assert losses[-1] < losses[1]


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in others["params"]] == [1, 1, 1]
