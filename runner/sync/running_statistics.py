"""Workers that average only gradients, in every step, and their running statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.sync.protocol import StepFacts, SyncPolicy
from runner.sync.vectors import FlatTensors


class RunningStatistics:
    """Floating-point buffers, such as those of batch normalisation, of workers that average gradients.

    They differ between workers during training: averaging gradients does not make them equal.
    """

    def __init__(self, buffers: Sequence[Tensor], backend: Backend) -> None:
        self._backend = backend
        self._buffers = list(buffers) if backend.world_size > 1 else []
        #: At the start. The change since is averaged, so that constant buffers keep their exact values.
        self.initial = [buffer.clone() for buffer in self._buffers]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the buffers have their average. A collective."""
        own = [buffer.clone() for buffer in self._buffers]
        self.average()
        yield
        for buffer, before in zip(self._buffers, own, strict=True):
            buffer.copy_(before)
        if own:
            self._backend.mark_step()

    @torch.no_grad()
    def average(self) -> None:
        """Average the buffers over workers, in place. A collective."""
        if not self._buffers:
            return
        torch._foreach_sub_(self._buffers, self.initial)
        flat = FlatTensors(self._buffers, shared=False)
        self._backend.mark_step()
        self._backend.all_reduce(flat.pack()).div_(self._backend.world_size)
        flat.unpack()
        torch._foreach_add_(self._buffers, self.initial)
        self._backend.mark_step()

    def load(self, initial: Sequence[Tensor]) -> None:
        """Restore what was `initial` in the run that continues."""
        for buffer, saved in zip(self.initial, initial, strict=True):
            buffer.copy_(saved)


class AveragedGradients(SyncPolicy):
    """A policy with k = 1 whose workers average gradients: nothing but their `buffers` differs after a step."""

    def __init__(self, model: nn.Module, buffers: Sequence[Tensor], backend: Backend) -> None:
        self.forward_model = model
        self._backend = backend
        self._statistics = RunningStatistics(buffers, backend)
        self._steps = 0

    def loss_divisor(self, facts: StepFacts) -> float:
        # The average over workers is then the sum over the global batch divided by its count.
        return max(facts.global_count, 1) / self._backend.world_size

    def before_optimizer_step(self, facts: StepFacts) -> bool:
        return True  # gradients are the same on all workers, so all of them step

    def after_step(self, facts: StepFacts) -> bool:
        self._steps += 1
        return True

    def common_weights(self) -> AbstractContextManager[Any]:
        return self._statistics.averaged()

    def finish(self) -> bool:
        self._statistics.average()
        return False


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers of a new model, which have to be averaged like weights.

    Buffers with infinities are masks, not statistics: they have no mean.
    """
    return [b for b in model.buffers() if b.is_floating_point() and bool(torch.isfinite(b).all())]
