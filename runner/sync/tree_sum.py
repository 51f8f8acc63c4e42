"""`equivalence=identical`: gradients that have the same bits on any number of workers."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.backends import Backend
from runner.plan.shards import Subtree, TreeSum, shards_of, subtrees_of, used_shards
from runner.sync.averaging import ALIGNMENT, FlatLayout
from runner.sync.protocol import StepFacts, SyncPolicy
from runner.sync.synchronous import require_gradients
from runner.sync.telemetry import SyncStats


class TreeSynchronous(SyncPolicy):
    """k = 1: gradients of the shards of a global batch are added in the order of one tree, see `runner.plan.shards`.

    Each micro-batch is a shard. Workers add up the subtrees that they have. For the rest of the tree each worker gets
    one part of all workers' vectors, adds these, and sends the sum to all. If each has one subtree, as many bytes move
    as in an all-reduce.
    """

    def __init__(self, model: nn.Module, backend: Backend, shards: int) -> None:
        self.forward_model = model
        self._backend, self._shards = backend, shards
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._layout = FlatLayout(list(self._trainable.values()))
        self._gradients: TreeSum[list[Tensor]] = TreeSum(_add)
        self._stats = SyncStats()

    @property
    def equal_parts(self) -> tuple[str, ...]:
        return ("model", "optimizer")

    def loss_divisor(self, facts: StepFacts) -> float:
        return max(facts.global_count, 1)  # gradients are added, and not averaged

    @contextmanager
    def backward_pass(self, facts: StepFacts, number: int) -> Iterator[None]:
        yield
        parameters, own = self._trainable.values(), self._shards_of(facts, self._backend.rank)
        missing = [name for name, parameter in self._trainable.items() if parameter.grad is None]
        require_gradients(missing, "equivalence=identical", "use equivalence=exact")
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None  # or the next backward pass would add to it
        if number < len(own):  # not a filler
            self._gradients.append(Subtree(own[number], 1, gradients))

    def loss_sum(self, facts: StepFacts, losses: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The whole sum for rank 0, and 0 for the others: the sum over workers then has the same bits as well."""
        used, own = used_shards(facts.samples, self._shards), self._shards_of(facts, self._backend.rank)
        of_shards = losses[0].new_zeros(used, dtype=dtype)
        if own:
            of_shards[own.start : own.stop] = torch.stack(tuple(losses))
        tree: TreeSum[Tensor] = TreeSum(torch.add)
        for shard, loss in enumerate(self._backend.all_reduce(of_shards).unbind()):
            tree.append(Subtree(shard, 1, loss))
        return tree.total() if self._backend.rank == 0 else of_shards.new_zeros(())

    @torch.no_grad()
    def before_optimizer_step(self, facts: StepFacts) -> bool:
        own, self._gradients = self._gradients, TreeSum(_add)
        gradients = own.total() if self._backend.world_size == 1 else self._total_of_all(facts, own.subtrees)
        for parameter, gradient in zip(self._trainable.values(), gradients, strict=True):
            parameter.grad = gradient
        return True  # gradients are the same on all workers, so all of them step

    def _total_of_all(self, facts: StepFacts, own: list[Subtree[list[Tensor]]]) -> list[Tensor]:
        backend, first = self._backend, next(iter(self._trainable.values()))
        # Whole parts for all workers. What is beyond the gradients, and between them, is added and sent as it is.
        part = -(-self._layout.bounds[-1] // (backend.world_size * ALIGNMENT)) * ALIGNMENT
        vectors = torch.empty(len(own), backend.world_size * part, dtype=first.dtype, device=first.device)
        for vector, gradients in zip(vectors, own, strict=True):
            torch._foreach_copy_(self._layout.views(vector), gradients.value)
        own_count = len(own)
        own.clear()  # before there is a third copy
        subtrees = [subtrees_of(self._shards_of(facts, rank)) for rank in range(backend.world_size)]

        backend.synchronize()  # work queued before this point is not communication
        started = time.perf_counter()
        received = _exchange(vectors, [len(of_worker) for of_worker in subtrees], backend.rank)
        tree: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for subtree, vector in zip(itertools.chain(*subtrees), received, strict=True):
            tree.append(Subtree(subtree.first, subtree.size, vector))
        total = vectors.new_empty(backend.world_size * part)
        dist.all_gather(list(total.split(part)), tree.total())
        backend.synchronize()
        seconds = time.perf_counter() - started
        # Counted as of an all-reduce: half for sending what is added, half for sending the sum.
        sent = total.nbytes * (own_count + 1) // 2
        self._stats += SyncStats(1, sent, seconds, seconds)
        return self._layout.views(total)

    def _shards_of(self, facts: StepFacts, rank: int) -> range:
        return shards_of(used_shards(facts.samples, self._shards), self._backend.world_size, rank)

    def after_step(self, facts: StepFacts) -> bool:
        return True

    def finish(self) -> bool:
        return False

    def stats(self) -> SyncStats:
        return self._stats

    def state_dict(self) -> dict[str, Any]:
        return {"stats": dataclasses.asdict(self._stats)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stats = SyncStats(**state["stats"])


def _exchange(vectors: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    """This worker's part of every worker's vectors, in the order of ranks; [sum of counts, part].

    `vectors`: this worker's, [counts[rank], workers × part]; `counts`: of each worker.
    """
    by_worker = vectors.unflatten(1, (len(counts), -1)).transpose(0, 1).contiguous()
    part = by_worker.shape[-1]
    received = vectors.new_empty(sum(counts), part)
    sent = [counts[rank] * part] * len(counts)
    dist.all_to_all_single(received.view(-1), by_worker.view(-1), [count * part for count in counts], sent)
    return received


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
