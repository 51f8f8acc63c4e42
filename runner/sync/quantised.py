"""Sums over workers in int8, with a scale for each block of numbers and error feedback."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.backends import Backend
from runner.sync.vectors import chunks

#: Numbers that share a scale. The scales add 1.6% to the bytes.
_BLOCK = 256
_LARGEST = 127


class OrderedExecutor:
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

    def __init__(self, backend: Backend, in_order: OrderedExecutor, vector: Tensor) -> None:
        self._rank, self._workers, self._in_order, self._vector = backend.rank, backend.world_size, in_order, vector
        blocks = -(-vector.numel() // (self._workers * _BLOCK))
        #: A part for each worker, in blocks.
        shape = (self._workers, blocks, _BLOCK)
        #: Losses by rounding in the sums so far: of this worker's vectors, and of the part that it adds up.
        self._errors = {"vector": vector.new_zeros(shape), "sum": vector.new_zeros(shape[1:])}
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
            _add(worker, total)
        sums = torch.empty_like(sent)
        dist.all_gather(list(sums.unbind()), _pack(total), group=group)
        mean = torch.zeros_like(own)
        _add(sums, mean)
        self._vector.copy_(mean.view(-1)[: self._vector.numel()])

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
    """Quantise blocks, of shape [..., _BLOCK], and leave what rounding takes from them.

    Returns bytes, [..., n]: of each block the numbers as int8, and behind them its scale.
    """
    packed = values.new_empty((*values.shape[:-1], _BLOCK + values.element_size()), dtype=torch.uint8)
    for own, sent in _together(values, packed):
        largest = own.abs().amax(-1, keepdim=True)
        scales = (largest / _LARGEST).masked_fill_(largest == 0, 1)  # NaN stays NaN, also in what is received
        rounded = (own / scales).round_()
        sent[:, :_BLOCK].view(torch.int8).copy_(rounded)
        sent[:, _BLOCK:].copy_(scales.view(torch.uint8))
        own.sub_(rounded.mul_(scales))
    return packed


def _add(packed: Tensor, total: Tensor) -> None:
    """Add what `_pack` made of blocks to `total`, of their shape."""
    for sent, own in _together(packed, total):
        scales = sent[:, _BLOCK:].contiguous().view(total.dtype)
        own.add_(sent[:, :_BLOCK].view(torch.int8).to(total.dtype).mul_(scales))


def _together(*blocks: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The blocks of tensors with as many of them, in rows, chunk by chunk."""
    rows = [tensor.flatten(0, -2) for tensor in blocks]
    for chunk in chunks(slice(0, len(rows[0]) * _BLOCK), rows[0].device):
        yield tuple(tensor[chunk.start // _BLOCK : chunk.stop // _BLOCK] for tensor in rows)
