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
from runner.plan.shards import Subtree, TreeSum, shards_by_worker, subtrees_of, used_shards
from runner.sync.protocol import StepFacts, SyncPolicy
from runner.sync.synchronous import require_gradients
from runner.sync.telemetry import SyncStats
from runner.sync.vectors import ALIGNMENT, FlatLayout

#: Bytes of gradients that are sent together, as in DDP.
_BUCKET_BYTES = 25 * 2**20


class TreeSynchronous(SyncPolicy):
    """k = 1: gradients of the shards of a global batch are added in the order of one tree, see `runner.plan.shards`.

    Each micro-batch is a shard. Workers add up the subtrees that they have. For the rest of the tree each worker gets
    one part of all workers' vectors, adds these, and sends the sum to all. If each has one subtree, as many bytes move
    as in an all-reduce. Buckets of gradients start while the backward pass of a worker's last shard still runs.
    """

    def __init__(self, model: nn.Module, backend: Backend, shards: int) -> None:
        self.forward_model = model
        self._backend, self._most_shards = backend, shards
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._buckets = [_Bucket(dict(one), backend) for one in _in_buckets(trainable)]
        self._stats = SyncStats()
        #: The shard that is computed, None for a filler, if its gradients can be sent bucket by bucket.
        self._sent_early: tuple[StepFacts, int | None] | None = None
        self._started: float | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._on_gradient(bucket))
            for bucket in self._buckets
            for parameter in bucket.parameters.values()
            if backend.world_size > 1
        ]

    @property
    def replicated_keys(self) -> tuple[str, ...]:
        return ("model", "optimizer")

    def loss_divisor(self, facts: StepFacts) -> float:
        return max(facts.global_count, 1)  # gradients are added, and not averaged

    @contextmanager
    def backward_pass(self, facts: StepFacts, number: int) -> Iterator[None]:
        own = self._shards(facts)[self._backend.rank]
        shard = own[number] if number < len(own) else None
        last = number + 1 == facts.micro_batches
        self._sent_early = (facts, shard) if last and self._backend.world_size > 1 else None
        for bucket in self._buckets:
            bucket.missing, bucket.taken = len(bucket.parameters), False
        yield
        left = [bucket for bucket in self._buckets if not bucket.taken]
        missing = [name for bucket in left for name, p in bucket.parameters.items() if p.grad is None]
        require_gradients(missing[::-1], "equivalence=identical", "use equivalence=exact")
        for bucket in left:
            bucket.take(shard)
            if self._sent_early is not None:
                self._start(bucket, facts)

    def _on_gradient(self, bucket: _Bucket) -> None:
        """Called for each parameter. Buckets start in the same order on all workers."""
        bucket.missing -= 1
        if self._sent_early is None:
            return
        facts, shard = self._sent_early
        for first in self._buckets:
            if first.missing:
                return
            if not first.taken:
                first.take(shard)
                self._start(first, facts)

    def _start(self, bucket: _Bucket, facts: StepFacts) -> None:
        if self._started is None:
            self._backend.synchronize()  # work queued before this point is not communication
            self._started = time.perf_counter()
        bucket.start([subtrees_of(shards) for shards in self._shards(facts)])

    def loss_sum(self, facts: StepFacts, losses: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The whole sum for rank 0, and 0 for the others: the sum over workers then has the same bits as well."""
        own = self._shards(facts)[self._backend.rank]
        of_shards = losses[0].new_zeros(used_shards(facts.samples, self._most_shards), dtype=dtype)
        if own:
            of_shards[own.start : own.stop] = torch.stack(tuple(losses))
        tree: TreeSum[Tensor] = TreeSum(torch.add)
        for shard, loss in enumerate(self._backend.all_reduce(of_shards).unbind()):
            tree.append(Subtree(shard, 1, loss))
        return tree.total() if self._backend.rank == 0 else of_shards.new_zeros(())

    @torch.no_grad()
    def before_optimizer_step(self, facts: StepFacts) -> bool:
        if self._started is None:
            for bucket in self._buckets:
                bucket.keep_own()
            return True
        waited = time.perf_counter()
        for bucket in self._buckets:
            bucket.add()
        sent = sum(bucket.finish() for bucket in self._buckets)
        self._backend.synchronize()
        now = time.perf_counter()
        self._stats += SyncStats(1, sent, now - self._started, now - waited)
        self._started = None
        return True  # gradients are the same on all workers, so all of them step

    def _shards(self, facts: StepFacts) -> list[range]:
        """Those of each worker."""
        return shards_by_worker(used_shards(facts.samples, self._most_shards), self._backend.world_size)

    def after_step(self, facts: StepFacts) -> bool:
        return True

    def finish(self) -> bool:
        return False

    def stats(self) -> SyncStats:
        return self._stats

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"stats": dataclasses.asdict(self._stats)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stats = SyncStats(**state["stats"])


class _Bucket:
    """Parameters whose gradients are summed over all shards together.

    `missing`: parameters without a gradient of the current micro-batch; `taken`: whether its gradients were taken.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], backend: Backend) -> None:
        self.parameters = parameters
        self.missing, self.taken = 0, False
        self._backend = backend
        self._layout = FlatLayout(list(parameters.values()))
        self._own: TreeSum[list[Tensor]] = TreeSum(_add)
        self._exchange: tuple[Any, Tensor] | None = None
        self._subtrees: list[list[Subtree[None]]] = []
        self._gathering: tuple[Any, Tensor] | None = None

    def take(self, shard: int | None) -> None:
        """Take the gradients of a shard from the parameters; None: of a filler, which count nowhere."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        for parameter in self.parameters.values():
            parameter.grad = None  # or the next backward pass would add to it
        self.taken = True
        if shard is not None:
            self._own.append(Subtree(shard, 1, gradients))

    def keep_own(self) -> None:
        """Set the gradients of the only worker."""
        own, self._own = self._own, TreeSum(_add)
        self._set(own.total())

    def start(self, subtrees: list[list[Subtree[None]]]) -> None:
        """Send each worker its part. `subtrees`: of each worker."""
        first, workers = next(iter(self.parameters.values())), self._backend.world_size
        own, self._own = self._own.subtrees, TreeSum(_add)
        # Whole parts for all workers. What is beyond the gradients, and between them, is added and sent as it is.
        part = -(-self._layout.bounds[-1] // (workers * ALIGNMENT)) * ALIGNMENT
        vectors = torch.empty(len(own), workers * part, dtype=first.dtype, device=first.device)
        for vector, gradients in zip(vectors, own, strict=True):
            torch._foreach_copy_(self._layout.views(vector), gradients.value)
        self._subtrees = subtrees
        self._exchange = _start_exchange(vectors, [len(of_worker) for of_worker in subtrees], self._backend.rank)

    def add(self) -> None:
        """Add this worker's part of all workers' vectors, and start to send the sum to all."""
        assert self._exchange is not None
        work, received = self._exchange
        work.wait()
        tree: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for subtree, vector in zip(itertools.chain(*self._subtrees), received, strict=True):
            tree.append(Subtree(subtree.first, subtree.size, vector))
        own = tree.total()
        total = own.new_empty(self._backend.world_size * len(own))
        self._gathering = (dist.all_gather(list(total.split(len(own))), own, async_op=True), total)

    def finish(self) -> int:
        """Set the gradients to the sum; the bytes that this worker sent, counted as those of an all-reduce are."""
        assert self._gathering is not None
        work, total = self._gathering
        work.wait()
        self._exchange = self._gathering = None
        self._set(self._layout.views(total))
        # Half for sending what is added, half for sending the sum.
        return total.nbytes * (len(self._subtrees[self._backend.rank]) + 1) // 2

    def _set(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient


def _in_buckets(trainable: dict[str, nn.Parameter]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """The parameters from the last to the first, about as backward passes reach them, in buckets."""
    bucket: list[tuple[str, nn.Parameter]] = []
    for name, parameter in reversed(trainable.items()):
        bucket.append((name, parameter))
        if sum(one.nbytes for _, one in bucket) >= _BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _start_exchange(vectors: Tensor, counts: Sequence[int], rank: int) -> tuple[Any, Tensor]:
    """Start to give each worker its part of every worker's vectors, in the order of ranks.

    `vectors`: this worker's, [counts[rank], workers × part]; `counts`: of each worker. Returns the work, which
    keeps its tensors, and what is received, [sum of counts, part].
    """
    by_worker = vectors.unflatten(1, (len(counts), -1)).transpose(0, 1).contiguous()
    part = by_worker.shape[-1]
    received = vectors.new_empty(sum(counts), part)
    sent = [counts[rank] * part] * len(counts)
    shares = [count * part for count in counts]
    work = dist.all_to_all_single(received.view(-1), by_worker.view(-1), shares, sent, async_op=True)
    return work, received


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
