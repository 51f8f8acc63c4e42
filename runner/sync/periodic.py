"""Local steps with periodic averaging of weights."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runner.backends import Backend
from runner.sync.protocol import SyncStats


class PeriodicAveraging:
    """Local SGD (Stich 2019, "Local SGD Converges Fast and Communicates Little").

    Every worker steps alone; after every `k` optimizer steps, and at the end, weights become their average over
    workers, weighted by the loss terms that each has trained on since the last time. One collective on one flat
    buffer per synchronisation.
    """

    def __init__(self, model: nn.Module, backend: Backend, k: int) -> None:
        self.forward_model = model
        self._backend = backend
        self._k = k
        # Running statistics (of batch norm, say) are part of what replicas have to agree on.
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        self._averaged: list[Tensor] = [*(p for p in model.parameters() if p.requires_grad), *buffers]
        self._steps_since = 0
        self._count_since = 0
        self._global_count_since = 0
        self._synchronisations, self._bytes, self._seconds = 0, 0, 0.0

    def loss_divisor(self, local_count: int, global_count: int) -> float:
        return max(local_count, 1)

    def backward_pass(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def takes_part(self, local_count: int) -> bool:
        return local_count > 0  # no sample, no step: neither decay nor moments may move

    def before_optimizer_step(self) -> None:
        pass

    def after_step(self, step: int, local_count: int, global_count: int) -> bool:
        self._steps_since += 1
        self._count_since += local_count
        self._global_count_since += global_count
        due = (step + 1) % self._k == 0
        if due:
            self._average()
        return due

    def finish(self) -> None:
        if self._steps_since:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        self._backend.synchronize()  # once in k steps the host waits: the seconds of an average are worth knowing
        start = time.perf_counter()
        # Every worker knows the whole count from the data order, so weights travel already weighted.
        total = self._global_count_since
        weight = self._count_since / total if total else 1 / self._backend.world_size
        flat = _flatten_dense_tensors([t.detach() for t in self._averaged])
        # Not in place: of a single tensor the flat one is a view, whose collective torch_xla would lose.
        flat = flat * self._backend.number(weight, flat.dtype)
        self._backend.all_reduce(flat)
        torch._foreach_copy_(self._averaged, list(_unflatten_dense_tensors(flat, self._averaged)))
        self._backend.mark_step()
        self._backend.synchronize()
        self._synchronisations += 1
        self._bytes += flat.numel() * flat.element_size()
        self._seconds += time.perf_counter() - start
        self._steps_since = self._count_since = self._global_count_since = 0

    def agree_on_scale(self, scale: float) -> float:
        scales = torch.zeros(self._backend.world_size, device=self._backend.device)
        scales[self._backend.rank] = scale
        return float(self._backend.all_reduce(scales).min())

    def stats(self) -> SyncStats:
        return SyncStats(self._synchronisations, self._bytes, self._seconds)

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps_since": self._steps_since,
            "count_since": self._count_since,
            "global_count_since": self._global_count_since,
            "stats": (self._synchronisations, self._bytes, self._seconds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps_since = state["steps_since"]
        self._count_since = state["count_since"]
        self._global_count_since = state["global_count_since"]
        self._synchronisations, self._bytes, self._seconds = state["stats"]
