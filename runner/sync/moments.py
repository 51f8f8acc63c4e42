"""An optimizer's moments, as far as they can be averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

_NAMES = {AdamW: ("exp_avg", "exp_avg_sq"), SGD: ("momentum_buffer",)}


class Moments:
    """Moments of `parameters`, which `tensors` stand for: as many vectors of the same shapes, zero to begin with."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._names = _NAMES[type(optimizer)]
        assert all(group.get("momentum") != 0 for group in optimizer.param_groups), "there are no moments"
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._fused = {id(p): group.get("fused") for group in optimizer.param_groups for p in group["params"]}
        self.tensors = [torch.zeros_like(p) for _ in self._names for p in self._parameters]

    def collect(self) -> None:
        """Let `tensors` be the optimizer's own state, with its present values.

        A worker that has not stepped yet, or whose state was just loaded, has other tensors in it, or none.
        """
        mine = iter(self.tensors)
        for name in self._names:
            for parameter in self._parameters:
                tensor, state = next(mine), self._optimizer.state[parameter]
                there = state.get(name)
                if there is not tensor:
                    tensor.copy_(there) if there is not None else tensor.zero_()
                    state[name] = tensor

    def note_steps(self, steps: int) -> None:
        """So many steps are behind the averaged moments, on every worker: Adam corrects its bias by that number."""
        for parameter in self._parameters:
            state: dict[str, Any] = self._optimizer.state[parameter]
            if "exp_avg" not in state:
                continue
            if "step" not in state:
                device = parameter.device if self._fused[id(parameter)] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            count: Tensor = state["step"]
            count.fill_(float(steps))
