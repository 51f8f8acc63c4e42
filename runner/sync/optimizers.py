"""An outer optimizer, which makes the step of the common weights to the average."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.config.choices import SyncPolicyName
from runner.config.schema import Sync


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
