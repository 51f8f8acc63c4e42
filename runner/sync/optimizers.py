"""Optimizers and synchronisation: an outer optimizer for the common weights, and averages of the inner moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from runner.config.choices import SyncPolicyName
from runner.config.schema import Sync

_ADAM = ("exp_avg", "exp_avg_sq")
_MOMENT_NAMES = {AdamW: _ADAM, Adam: _ADAM, SGD: ("momentum_buffer",)}


class OuterSGD:
    """SGD on the common weights; the pseudo-gradient is the negative mean update of all workers.

    With lr 0.7 and a Nesterov momentum of 0.9 this is DiLoCo (Douillard et al. 2023). SlowMo (Wang et al. 2020) has a
    plain momentum whose pseudo-gradient is in units of the local gradient (`per_lr`): the buffer is
    u = β u + (a − x̄)/γ and the step a − α γ u, with γ the local learning rate, here its mean over the local phase.
    The arithmetic is that of torch.optim.SGD, which cannot step with a part of a tensor.
    """

    def __init__(self, weights: Tensor, lr: float, momentum: float, nesterov: bool, per_lr: bool) -> None:
        self._weights, self._lr, self._beta, self._nesterov, self._per_lr = weights, lr, momentum, nesterov, per_lr
        self.momentum = torch.zeros_like(weights)

    def step(self, place: slice, mean_update: Tensor, mean_lr: float) -> None:
        """Change the weights at `place`. `mean_lr`: of the local steps."""
        unit = mean_lr if self._per_lr else 1.0
        if unit == 0.0:
            return  # at a learning rate of 0 no worker has moved
        gradient, momentum = mean_update / -unit, self.momentum[place]
        momentum.mul_(self._beta).add_(gradient)
        step = gradient.add_(momentum, alpha=self._beta) if self._nesterov else momentum
        self._weights[place].add_(step, alpha=-self._lr * unit)


def outer_optimizer(sync: Sync, weights: Tensor) -> OuterSGD | None:
    """The outer optimizer that the settings name, if they do."""
    if sync.policy is not SyncPolicyName.outer:
        return None
    assert sync.outer_lr is not None
    assert sync.outer_momentum is not None
    return OuterSGD(weights, sync.outer_lr, sync.outer_momentum, bool(sync.outer_nesterov), bool(sync.outer_per_lr))


class Moments:
    """The moments of an optimizer, as tensors that can be averaged with the weights of `parameters`."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._names = _MOMENT_NAMES[type(optimizer)]
        assert all(group.get("momentum") != 0 for group in optimizer.param_groups), "there are no moments"
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._fused = {id(p): group.get("fused") for group in optimizer.param_groups for p in group["params"]}
        self.tensors = [torch.zeros_like(p) for _ in self._names for p in self._parameters]

    def by_name(self) -> list[list[Tensor]]:
        """The tensors of each moment."""
        count = len(self._parameters)
        return [self.tensors[n : n + count] for n in range(0, len(self.tensors), count)]

    def collect(self) -> None:
        """Make `tensors` the optimizer's own state, with its current values.

        A worker that has not stepped yet has no state, and one that has loaded its state has other tensors there.
        """
        tensors = iter(self.tensors)
        for name in self._names:
            for parameter in self._parameters:
                tensor, state = next(tensors), self._optimizer.state[parameter]
                current = state.get(name)
                if current is not tensor:
                    tensor.copy_(current) if current is not None else tensor.zero_()
                    state[name] = tensor

    def set_step_count(self, steps: int) -> None:
        """Every worker counts `steps` steps after an average: Adam's bias correction depends on the count."""
        for parameter in self._parameters:
            state: dict[str, Any] = self._optimizer.state[parameter]
            if "exp_avg" not in state:
                continue
            if "step" not in state:
                device = parameter.device if self._fused[id(parameter)] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            count: Tensor = state["step"]
            count.fill_(float(steps))
