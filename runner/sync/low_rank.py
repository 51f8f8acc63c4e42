"""Gradients of low rank: torch's PowerSGD, with a state that can be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

#: The first steps send whole gradients. DDP orders them anew after the first, which torch's hook must not see.
_WHOLE_STEPS = 2


class LowRankGradients:
    """A hook for `DistributedDataParallel`: gradients of matrices are averaged as products of rank `rank`.

    Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization". What is left
    out is added to the next gradient. All gradients have to be in one bucket: torch's hook starts collectives when
    others have ended, and with several buckets not in the same order on all workers.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], rank: int) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._state = power_sgd.PowerSGDState(None, rank, _WHOLE_STEPS)
        #: The parameters in the order in which the bucket, and so the state, has them. A new DDP changes it once.
        self._order: list[Tensor] = list(self._names)
        self._numbers = sum(parameter.numel() for parameter in parameters.values())
        self._item = next(iter(parameters.values())).element_size()
        self._set(self._first(), self._order)

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        assert bucket.is_last(), "several buckets"
        order = bucket.parameters()
        if any(a is not b for a, b in zip(order, self._order, strict=True)):
            self._set(self._by_name(), order)
        self._order = order
        return power_sgd.powerSGD_hook(self._state, bucket)

    def bytes_of(self, steps: int) -> int:
        """What a worker sends in the first `steps` steps of a run, counted as all-reduces."""
        matrices = self._matrices(list(self._names))
        saved = sum(matrix.numel() - self._rank_of(matrix) * sum(matrix.shape) for matrix in matrices.values())
        return self._item * (steps * self._numbers - max(steps - _WHOLE_STEPS, 0) * saved)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._state.iter, "by_name": self._by_name()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.iter = state["steps"]
        self._set(state["by_name"], self._order)

    def _first(self) -> dict[str, dict[str, Tensor]]:
        """Nothing left out, and random right factors, the same on all workers and for any order of the bucket."""
        generator = torch.Generator().manual_seed(0)
        own = {name: {"left_out": torch.zeros(parameter.numel())} for parameter, name in self._names.items()}
        for parameter, matrix in self._matrices(self._order).items():
            numbers = self._rank_of(matrix) * matrix.shape[1]
            own[self._names[parameter]]["right"] = torch.randn(numbers, generator=generator)
        return own

    def _by_name(self) -> dict[str, dict[str, Tensor]]:
        """By parameter: what was left out of its gradient, and the right factor of its product, from which the next
        one starts."""
        matrices = self._matrices(self._order)
        lefts_out = self._state.error_dict[0].split([parameter.numel() for parameter in self._order])
        rights = self._state.q_memory_dict[0].split([self._rank_of(m) * m.shape[1] for m in matrices.values()])
        own = {self._names[p]: {"left_out": one} for p, one in zip(self._order, lefts_out, strict=True)}
        for parameter, right in zip(matrices, rights, strict=True):
            own[self._names[parameter]]["right"] = right
        return own

    def _set(self, by_name: Mapping[str, Mapping[str, Tensor]], order: Sequence[Tensor]) -> None:
        matrices, state, like = self._matrices(order), self._state, order[0]
        lefts_out = [by_name[self._names[parameter]]["left_out"] for parameter in order]
        rights = [by_name[self._names[parameter]]["right"] for parameter in matrices]
        size = sum(self._rank_of(matrix) * matrix.shape[0] for matrix in matrices.values())
        state.error_dict[0] = torch.cat(lefts_out).to(like)
        state.q_memory_dict[0] = torch.cat([like.new_zeros(0), *(right.to(like) for right in rights)])
        state.p_memory_dict[0] = torch.empty(size, dtype=like.dtype, device=like.device)  # overwritten in each step

    def _matrices(self, order: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Those that are sent as products, in the order of torch's hook: matrices of one shape together."""
        by_shape: dict[torch.Size, dict[Tensor, Tensor]] = {}
        for parameter in order:
            matrix = parameter.detach().view(len(parameter), -1)
            numbers = self._rank_of(matrix) * sum(matrix.shape)
            if numbers * self._state.min_compression_rate < matrix.numel():
                by_shape.setdefault(matrix.shape, {})[parameter] = matrix
        return {parameter: matrix for same in by_shape.values() for parameter, matrix in same.items()}

    def _rank_of(self, matrix: Tensor) -> int:
        return min(*matrix.shape, self._state.matrix_approximation_rank)
