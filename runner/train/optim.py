"""The optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.config.schema import Optimizer as OptimizerConfig
from runner.config.schema import OptimizerName, Schedule
from runner.plan import Plan
from runner.plan.schedule import lr_multiplier


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weight decay for matrices, none for vectors and scalars (biases, normalisation weights)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


_CLASSES: dict[OptimizerName, Callable[..., Optimizer]] = {
    OptimizerName.adamw: torch.optim.AdamW,
    OptimizerName.sgd: torch.optim.SGD,
    OptimizerName.adam: torch.optim.Adam,
    OptimizerName.adafactor: torch.optim.Adafactor,
    OptimizerName.adagrad: torch.optim.Adagrad,
    OptimizerName.adamax: torch.optim.Adamax,
    OptimizerName.nadam: torch.optim.NAdam,
    OptimizerName.radam: torch.optim.RAdam,
    OptimizerName.rmsprop: torch.optim.RMSprop,
}

#: The optimizers for which torch has fused kernels on every device.
_FUSED = (OptimizerName.adamw, OptimizerName.adam, OptimizerName.sgd)


def build_optimizer(config: OptimizerConfig, model: nn.Module, fused: bool) -> Optimizer:
    """torch's optimizer with these settings, as scaled; `fused`: with torch's fused kernels, if it has any."""
    groups = [group for group in parameter_groups(model, config.weight_decay) if group["params"]]
    settings: dict[str, Any] = {"lr": config.lr, **config.settings}
    if config.betas is not None:
        settings["betas"] = tuple(config.betas)
    if config.name in _FUSED:
        settings["fused"] = fused
    optimizer = _CLASSES[config.name](groups, **settings)
    if config.name is OptimizerName.sgd and fused and config.momentum:
        # torch leaves the buffer uninitialised until the first step, and fp16 may skip that step.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class LearningRate:
    """The learning rate as a function of the samples seen. It counts nothing itself."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self._peak = plan.lr
        self._total = plan.total_samples
        self._schedule = schedule

    def at(self, samples_seen: int) -> float:
        return self._peak * lr_multiplier(self._schedule, samples_seen / self._total)

    def apply(self, optimizer: Optimizer, samples_seen: int) -> float:
        lr = self.at(samples_seen)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr
