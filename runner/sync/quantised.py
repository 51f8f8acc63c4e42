"""Sums over workers in int8, with a scale for each block of numbers and error feedback."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.backends import Backend

#: Numbers that share a scale. The scales add 1.6% to the bytes.
_BLOCK = 256
_LARGEST = 127


class InOrder:
    """Runs exchanges of several collectives, one after the other, in a separate process group.

    `overlapped`: in a thread, so that training continues; all workers start their exchanges in the same order.
    """

    def __init__(self, backend: Backend, overlapped: bool) -> None:
        self.group = backend.new_group()
        dist.barrier(self.group)  # connect the workers now: it takes time
        self._thread = ThreadPoolExecutor(max_workers=1) if overlapped else None

    def start(self, exchange: Callable[[], None]) -> Callable[[], float]:
        """Returns a function that waits until the exchange is done, and returns the seconds that it took."""
        started = time.perf_counter()

        def run() -> float:
            exchange()
            return time.perf_counter() - started

        if self._thread is None:
            seconds = run()
            return lambda: seconds
        return self._thread.submit(run).result

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


class QuantisedSum:
    """A sum over workers, sent as int8.

    Each worker gets its part of all workers' vectors, adds them up in their order, and sends the sum to all: the same
    bytes as in a ring all-reduce of int8. What rounding has taken from a worker's vector is added to its next one, and
    what it has taken from a sum to the next sum (Tang et al. 2019, "DoubleSqueeze: Parallel Stochastic Gradient Descent
    with Double-Pass Error-Compensated Compression"). `vector`: memory for the sum.
    """

    def __init__(self, backend: Backend, in_order: InOrder, vector: Tensor) -> None:
        self._rank, self._workers, self._in_order, self._vector = backend.rank, backend.world_size, in_order, vector
        blocks = -(-vector.numel() // (self._workers * _BLOCK))
        #: By worker its part, in blocks.
        self._shape = (self._workers, blocks, _BLOCK)
        #: What rounding has taken from the sums so far: of this worker's vectors, and of the part that it adds up.
        self._errors = {"vector": vector.new_zeros(self._shape), "sum": vector.new_zeros(self._shape[1:])}
        self.nbytes = self._workers * blocks * (_BLOCK + vector.element_size())

    def put(self, place: slice, values: Tensor) -> None:
        self._errors["vector"].view(-1)[place].add_(values)

    def start(self, norms: Tensor) -> Callable[[], float]:
        return self._in_order.start(functools.partial(self._exchange, norms))

    @torch.no_grad()
    def _exchange(self, norms: Tensor) -> None:
        group, own = self._in_order.group, self._errors["vector"]
        dist.all_reduce(norms, group=group)
        sent = _pack(own)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        total = self._errors["sum"]
        for worker in received:
            total.add_(_unpack(worker, total))
        sums = torch.empty_like(sent)
        dist.all_gather(list(sums.unbind()), _pack(total), group=group)
        self._vector.copy_(_unpack(sums, own).view(-1)[: self._vector.numel()])

    def get(self, place: slice) -> Tensor:
        return self._vector[place]

    def state_dict(self, in_flight: bool) -> dict[str, Any]:
        return {"errors": self._errors, "sum": self._vector if in_flight else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, error in self._errors.items():
            error.copy_(state["errors"][name])
        if state["sum"] is not None:
            self._vector.copy_(state["sum"])


def _pack(values: Tensor) -> Tensor:
    """Quantise blocks, of shape [..., blocks, _BLOCK], and leave what rounding takes from them.

    Returns bytes, [..., n]: the numbers as int8, and behind them the scale of each block.
    """
    largest = values.abs().amax(-1, keepdim=True)
    scales = (largest / _LARGEST).masked_fill_(largest == 0, 1)  # NaN stays NaN, also in what is received
    rounded = (values / scales).round_()
    packed = torch.cat(
        [rounded.to(torch.int8).flatten(-2).view(torch.uint8), scales.flatten(-2).view(torch.uint8)], dim=-1
    )
    values.sub_(rounded.mul_(scales))
    return packed


def _unpack(packed: Tensor, like: Tensor) -> Tensor:
    """Blocks as they were quantised, of the shape and dtype of `like`."""
    blocks = like.shape[-2]
    numbers, scales = packed.split([blocks * _BLOCK, blocks * like.element_size()], dim=-1)
    scale = scales.contiguous().view(like.dtype).unsqueeze(-1)
    return numbers.contiguous().view(torch.int8).unflatten(-1, like.shape[-2:]).to(like.dtype).mul_(scale)
