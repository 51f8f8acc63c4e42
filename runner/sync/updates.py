"""What one worker's optimizer steps come to until the next synchronisation."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from runner.backends import Backend
from runner.sync.flat import parts
from runner.sync.replica import Replica, State


class Updates(Protocol):
    """Keeps what was learnt since the common weights were last sent on their way.

    `left`: what of the replica goes on while they travel, and where it was when they left.
    """

    left: State

    def after_step(self) -> None:
        """This worker has just made an optimizer step."""
        ...

    def write(self, part: slice, where: Tensor) -> None:
        """Write this part of it, the replica's vector being packed."""
        ...

    def depart(self) -> None:
        """All of it has been written: begin anew."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MovingUpdates:
    """The weights themselves move, as in local SGD. `travels`: while updates are under way."""

    def __init__(self, replica: Replica, backend: Backend, travels: bool) -> None:
        self._replica = replica
        self.left: State = (None, None)
        if travels:
            self.left = replica.weights().clone(), replica.buffers().clone()

    def after_step(self) -> None:
        pass

    def write(self, part: slice, where: Tensor) -> None:
        self._replica.write_update(part, where)

    def depart(self) -> None:
        self._replica.note(self.left)

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _load(self.left, state["left"])


class CollectedUpdates:
    """What accumulation does with gradients, done with updates: they are added up, and the weights stay where they are.

    (If the weights moved by them in between, this would be local SGD: the averages are the same sum.)
    """

    def __init__(self, replica: Replica, backend: Backend, travels: bool) -> None:
        self._replica, self._backend = replica, backend
        self._sum = torch.zeros_like(replica.rule.weights)
        # Nobody's weights move while an average travels, but running statistics do.
        self.left: State = (None, replica.buffers().clone() if travels else None)

    @torch.no_grad()
    def after_step(self) -> None:
        """Take the update just made off the weights."""
        weights = self._replica.weights()
        for part in parts(0, len(weights), weights.device):
            common = self._replica.common(part)
            self._sum[part].add_(weights[part]).sub_(common)
            weights[part].copy_(common)
        self._replica.unpack()
        self._backend.mark_step()

    def write(self, part: slice, where: Tensor) -> None:
        if part.start < len(self._sum):
            where.copy_(self._sum[part])
        else:  # running statistics are no sums of updates: they go on by themselves, and are averaged as they are
            self._replica.write_update(part, where)

    def depart(self) -> None:
        self._sum.zero_()
        self._replica.note(self.left)

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum, "left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum.copy_(state["sum"])
        _load(self.left, state["left"])


def _load(left: State, saved: State) -> None:
    for own, values in zip(left, saved, strict=True):
        if own is not None:
            assert values is not None
            own.copy_(values)
