"""What becomes of the common weights when the mean update of all workers is known."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Rule(Protocol):
    """Has the common weights, a vector, and moves them by the mean update."""

    @property
    def weights(self) -> Tensor: ...

    def receive(self, part: slice, mean: Tensor) -> None:
        """Take this part of the mean update."""
        ...

    def step(self, mean_lr: float) -> None:
        """Move, all parts being here; `mean_lr`: of the local steps behind the mean."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Assign:
    """The mean of the replicas becomes the common weights."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def receive(self, part: slice, mean: Tensor) -> None:
        self.weights[part].add_(mean)

    def step(self, mean_lr: float) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])


class OuterSgd:
    """The mean update, with its sign turned, is the gradient of an outer torch.optim.SGD.

    With lr 0.7 and a Nesterov momentum of 0.9 this is DiLoCo (Douillard et al. 2023). SlowMo (Wang et al. 2020) is a
    plain momentum whose gradient is in units of the local gradient (`per_lr`): its buffer is u = β u + (a − x̄)/γ and
    its step a − α γ u, with γ the local learning rate. γ here is the mean over the local phase.
    """

    def __init__(self, weights: Tensor, lr: float, momentum: float, nesterov: bool, per_lr: bool) -> None:
        self._parameter = nn.Parameter(weights)
        self._gradient = torch.zeros_like(weights)
        self._lr, self._per_lr = lr, per_lr
        self._optimizer = torch.optim.SGD([self._parameter], lr, momentum, nesterov=nesterov)

    @property
    def weights(self) -> Tensor:
        return self._parameter.detach()

    def receive(self, part: slice, mean: Tensor) -> None:
        self._gradient[part].copy_(mean).neg_()

    def step(self, mean_lr: float) -> None:
        unit = mean_lr if self._per_lr else 1.0
        if unit == 0.0:
            return  # at a learning rate of 0 nobody has moved
        self._optimizer.param_groups[0]["lr"] = self._lr * unit
        self._parameter.grad = self._gradient.div_(unit)
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._parameter.copy_(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
