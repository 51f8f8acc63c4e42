"""What becomes of the common weights when the mean update of all workers is known."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Rule(Protocol):
    """Moves the common weights, a vector, by the mean update; `mean_lr`: of the local steps behind it."""

    def apply(self, weights: Tensor, mean: Tensor, mean_lr: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Assign:
    """The mean of the replicas becomes the common weights."""

    def apply(self, weights: Tensor, mean: Tensor, mean_lr: float) -> None:
        weights.add_(mean)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class OuterSgd:
    """The mean update, with its sign turned, is the gradient of an outer torch.optim.SGD.

    With lr 0.7 and a Nesterov momentum of 0.9 this is DiLoCo (Douillard et al. 2023). SlowMo (Wang et al. 2020) is a
    plain momentum whose gradient is in units of the local gradient (`per_lr`): its buffer is u = β u + (a − x̄)/γ and
    its step a − α γ u, with γ the local learning rate. γ here is the mean over the local phase.
    """

    def __init__(self, lr: float, momentum: float, nesterov: bool, per_lr: bool) -> None:
        self._lr, self._per_lr = lr, per_lr
        self._momentum, self._nesterov = momentum, nesterov
        self._optimizer: torch.optim.SGD | None = None
        self._loaded: dict[str, Any] | None = None

    def apply(self, weights: Tensor, mean: Tensor, mean_lr: float) -> None:
        optimizer = self._of(weights)
        unit = mean_lr if self._per_lr else 1.0
        if unit == 0.0:
            return  # at a learning rate of 0 nobody has moved
        group = optimizer.param_groups[0]
        group["lr"] = self._lr * unit
        group["params"][0].grad = mean.div(-unit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _of(self, weights: Tensor) -> torch.optim.SGD:
        if self._optimizer is None:
            parameters = [nn.Parameter(weights)]
            self._optimizer = torch.optim.SGD(parameters, self._lr, self._momentum, nesterov=self._nesterov)
            if self._loaded is not None:
                self._optimizer.load_state_dict(self._loaded)
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict() if self._optimizer is not None else self._loaded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded, self._optimizer = state["optimizer"], None
