"""Fully synchronous training: gradients are averaged in every optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from runner.backends import Backend
from runner.errors import UserError
from runner.sync.protocol import StepFacts
from runner.sync.running_statistics import AveragedGradients
from runner.sync.telemetry import SyncStats

#: Embeddings of at least this size send only the rows of their gradient that a step has used. Tables of positions, of
#: which a step may use all rows, are smaller.
_SENT_AS_ROWS_BYTES = 2**25


class RowEmbedding(Protocol):
    """An embedding whose gradient has only the rows that a step has used, while it is `sparse`."""

    weight: Tensor
    sparse: bool

    def make_dense(self) -> None:
        """Turn the weight's gradient into a usual one."""
        ...


#: Finds the embeddings of a model that are of at least some bytes, and lets them compute such gradients.
FindRowEmbeddings = Callable[[nn.Module, int], Sequence[RowEmbedding]]

_Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]
_COMPRESS_HOOKS: dict[torch.dtype, _Hook] = {torch.bfloat16: bf16_compress_hook, torch.float16: fp16_compress_hook}


class Synchronous(AveragedGradients):
    """k = 1: torch's DistributedDataParallel, or one all-reduce after the backward pass on a device that compiles.

    `wire`: the dtype of gradients on the wire, None for their own. `find_embeddings`: finds large embeddings, which
    send only the rows of their gradient that a step has used; None: all gradients are sent whole. `compares`: whether
    some steps compare gradients.
    """

    averages_gradients = True

    def __init__(
        self,
        model: nn.Module,
        buffers: Sequence[Tensor],
        backend: Backend,
        wire: torch.dtype | None = None,
        find_embeddings: FindRowEmbeddings | None = None,
        compares: bool = False,
    ) -> None:
        super().__init__(model, buffers, backend)
        self._wire = wire
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parameters = list(self._trainable.values())
        #: Parameters that the last backward pass computed a gradient for.
        self._reached: set[nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        self._embeddings: list[RowEmbedding] = []
        #: Bytes and seconds of all-reduces of their gradients.
        self._row_bytes, self._row_seconds = 0, 0.0
        if backend.world_size > 1 and not backend.compiles:
            tables = {layer.weight for layer in model.modules() if isinstance(layer, nn.Embedding)}
            if find_embeddings is not None and not tables.issuperset(parameters):  # DDP needs at least one parameter
                self._embeddings = _without_ddp(model, find_embeddings)
            before_sending = self._note_own_gradient if compares else None
            self.forward_model = _data_parallel(model, backend.device, wire, before_sending)
            self._hooks = [p.register_post_accumulate_grad_hook(self._reached.add) for p in parameters]
        #: Squared norms of this worker's gradients by bucket, in a step that compares them.
        self._own_gradient: list[Tensor] | None = None
        #: Figures of a run that this one continues: its steps, and the seconds in which gradients were in flight, and
        #: in which the backward pass waited for them.
        self._earlier = (0, 0.0, 0.0)
        self._final_stats: SyncStats | None = None  # of a wrapper that is gone

    @property
    def replicated_keys(self) -> tuple[str, ...]:
        return ("model", "optimizer")

    def backward_pass(self, facts: StepFacts, number: int) -> AbstractContextManager[Any]:
        self._reached.clear()
        if not isinstance(self.forward_model, _DataParallel):
            return nullcontext()
        self.collective_backward = number + 1 == facts.micro_batches
        self._own_gradient = [] if facts.compares_gradients else None
        return nullcontext() if self.collective_backward else self.forward_model.no_sync()

    def before_backward(self) -> None:
        if isinstance(self.forward_model, _DataParallel) and self.collective_backward:
            self.forward_model.expect_gradients()

    def before_optimizer_step(self, facts: StepFacts) -> bool:
        if isinstance(self.forward_model, _DataParallel):
            self._require_gradients()
            self._average_rows()
        elif self._backend.world_size > 1:
            self._average_gradients()
        return super().before_optimizer_step(facts)

    def _require_gradients(self) -> None:
        # DDP waits for every gradient in the last backward pass of a step. If one is missing it leaves the others of
        # its bucket unaveraged, and reports that one step later. Gradients of earlier micro-batches do not help.
        missing = [name for name, parameter in self._trainable.items() if parameter not in self._reached]
        require_gradients(missing, "sync.k=1", "average weights: sync.k=2 or more")

    def _note_own_gradient(self, bucket: Tensor) -> None:
        if self._own_gradient is not None:
            self._own_gradient.append(torch.dot(bucket, bucket))

    def own_gradient(self) -> Tensor | None:
        return torch.stack(self._own_gradient).double().sum() if self._own_gradient else None

    @torch.no_grad()
    def _average_rows(self) -> None:
        gradients = []
        for embedding in self._embeddings:
            gradient = embedding.weight.grad
            assert gradient is not None
            if gradient.is_sparse:
                gradient = embedding.weight.grad = gradient.coalesce()
                self._row_bytes += gradient.indices().nbytes + gradient.values().nbytes
            else:
                self._row_bytes += gradient.nbytes
            self._note_own_gradient((gradient.values() if gradient.is_sparse else gradient).flatten())
            gradients.append(gradient.div_(self._backend.world_size))
        if gradients:
            self._row_seconds += self._backend.start_all_reduce(gradients, async_op=False)() or 0.0
        for embedding in self._embeddings:
            embedding.make_dense()

    @torch.no_grad()
    def _average_gradients(self) -> None:
        # Workers whose rows have another length run another program up to here. The one with the collective has to be
        # the same on all workers. (Not tested on a TPU: one collective in two different programs.)
        self._backend.mark_step()
        gradients = [p.grad for p in self._trainable.values() if p.grad is not None]
        flat = _flatten_dense_tensors(gradients)
        if self._wire is None:
            flat = self._backend.all_reduce(flat).div_(self._backend.world_size)
        else:
            flat = self._backend.all_reduce(flat.div(self._backend.world_size).to(self._wire)).to(gradients[0].dtype)
        for gradient, average in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(average)

    def stats(self) -> SyncStats:
        if self._backend.world_size == 1:
            return SyncStats()
        if self._final_stats is not None:
            return self._final_stats
        if not isinstance(self.forward_model, _DataParallel):
            return SyncStats(self._steps, self._bytes, None, None)
        in_flight, in_backward = self._ddp_seconds()
        rows = self._row_seconds
        return SyncStats(self._steps, self._bytes, in_flight + rows, in_backward + rows, in_backward)

    def _ddp_seconds(self) -> tuple[float, float]:
        """Seconds in which gradients were in flight, and of which the backward pass waited for them."""
        earlier_steps, in_flight, in_backward = self._earlier
        if not isinstance(self.forward_model, _DataParallel):
            return in_flight, in_backward
        # torch's own timers, in nanoseconds, averaged over the steps it sampled in this process.
        timing, steps = self.forward_model._get_ddp_logging_data(), self._steps - earlier_steps
        each = timing.get("avg_backward_comm_time", 0) / 1e9
        overlapped = timing.get("avg_backward_compute_comm_overlap_time", 0) / 1e9
        return in_flight + steps * each, in_backward + steps * max(each - overlapped, 0.0)

    @property
    def _bytes(self) -> int:
        """Bytes that this worker has sent so far."""
        dense = set(self._trainable.values()).difference(embedding.weight for embedding in self._embeddings)
        return self._row_bytes + self._steps * sum(p.numel() * (self._wire or p.dtype).itemsize for p in dense)

    def close(self) -> None:
        if isinstance(self.forward_model, _DataParallel):
            self._final_stats = self.stats()
            for hook in self._hooks:
                hook.remove()
            for embedding in self._embeddings:
                embedding.sparse = False
            self.forward_model = self.forward_model.module

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "ddp_seconds": self._ddp_seconds(),
            "rows": (self._row_bytes, self._row_seconds),
            "initial_buffers": self._statistics.initial,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._earlier = (self._steps, *state["ddp_seconds"])
        self._row_bytes, self._row_seconds = state["rows"]
        self._statistics.load(state["initial_buffers"])


def require_gradients(missing: Sequence[str], setting: str, instead: str) -> None:
    """Raises UserError if a parameter is `missing` a gradient, which `setting` needs."""
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"the loss of a micro-batch does not depend on {missing[0]}{more}, and {setting} needs every gradient: "
            f"freeze it in the recipe's build_model with requires_grad_(False), or {instead}"
        )


class _DataParallel(DistributedDataParallel):
    """DDP that does not wait for gradients before a backward pass begins: until then a forward pass can be repeated."""

    def _post_forward(self, output: Any) -> Any:
        with self.no_sync():
            return super()._post_forward(output)

    def expect_gradients(self) -> None:
        self.reducer.prepare_for_backward([])


def _average_bucket(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket as DDP does without a hook, with the same bits."""
    scaled = bucket.buffer().mul_(1.0 / dist.get_world_size())
    return dist.all_reduce(scaled, async_op=True).get_future().then(lambda future: future.value()[0])


def _without_ddp(model: nn.Module, find_embeddings: FindRowEmbeddings) -> list[RowEmbedding]:
    """Have DDP leave out the gradients of large embeddings, and let these have the rows that a step has used.

    DDP averages sparse gradients as well, but refuses one that is dense because the weight is also used as a whole.
    """
    large = [one for one in find_embeddings(model, _SENT_AS_ROWS_BYTES) if one.weight.requires_grad]
    for embedding in large:
        embedding.sparse = True
    weights = {embedding.weight for embedding in large}
    names = [name for name, parameter in model.named_parameters() if parameter in weights]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return large


def _data_parallel(
    model: nn.Module,
    device: torch.device,
    wire: torch.dtype | None,
    before_sending: Callable[[Tensor], None] | None = None,
) -> _DataParallel:
    """`before_sending`: called with each bucket of this worker's own gradients."""
    with warnings.catch_warnings():
        # torch 2.13 deprecates `broadcast_buffers`, and recommends to keep using it for exactly this case: buffers are
        # local to a worker, and broadcasting them would communicate on accumulation micro-batches, too.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = _DataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
    # Registered under its own name, torch refuses bf16 on all backends but nccl. Gloo can sum it as well.
    hook: _Hook = _COMPRESS_HOOKS[wire] if wire is not None else _average_bucket
    if before_sending is not None:

        def note_and_send(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            before_sending(bucket.buffer())
            return hook(None, bucket)

        note_and_send.__annotations__ = {}  # DDP refuses those that are not evaluated
        wrapped.register_comm_hook(None, note_and_send)
    elif wire is not None:
        wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    # DDP times the first ten steps, which build buckets, and then one of a hundred by default: sample more often.
    wrapped._set_ddp_runtime_logging_sample_rate(10)
    return wrapped
