"""Fully synchronous training: gradients are averaged in every optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from runner.backends import Backend
from runner.errors import UserError
from runner.sync.flat import FlatTensors
from runner.sync.protocol import StepFacts, SyncStats
from runner.sync.telemetry import SyncRecord


class Synchronous:
    """k = 1: through torch's DistributedDataParallel during the last backward pass of a step, or right after it.

    `wire`: the dtype in which gradients travel, None for their own.
    """

    communicates_in_backward = True
    overlaps = False

    def __init__(
        self, model: nn.Module, buffers: Sequence[Tensor], backend: Backend, wire: torch.dtype | None = None
    ) -> None:
        self._backend, self._wire = backend, wire
        self.forward_model = backend.data_parallel(model, wire)
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(self._trainable.values())
        #: Parameters whose gradient came in the last backward pass.
        self._reached: set[nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        self._buffers = list(buffers) if backend.world_size > 1 else []
        self._buffers_at_first = [buffer.clone() for buffer in self._buffers]
        if isinstance(self.forward_model, DistributedDataParallel):
            # Its timers look at the first ten steps, which build buckets, and then at every hundredth: look more often.
            self.forward_model._set_ddp_runtime_logging_sample_rate(10)
            self._hooks = [p.register_post_accumulate_grad_hook(self._reached.add) for p in self._parameters]
        self._gradient_bytes = sum(p.numel() * (wire.itemsize if wire else p.element_size()) for p in self._parameters)
        self._steps = 0
        self._final_stats: SyncStats | None = None  # of a wrapper that is gone

    def loss_divisor(self, facts: StepFacts) -> float:
        # Gradients are averaged over workers; a sum over the global batch divided by its count is wanted.
        return max(facts.global_count, 1) / self._backend.world_size

    def backward_pass(self, last: bool) -> AbstractContextManager[Any]:
        model = self.forward_model
        self._reached.clear()
        if last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()

    def takes_part(self, facts: StepFacts) -> bool:
        return True  # gradients are common, and so is the step

    def before_optimizer_step(self, facts: StepFacts) -> None:
        if isinstance(self.forward_model, DistributedDataParallel):
            self._require_gradients()
        self._backend.average_gradients(self._parameters, self._wire)

    def _require_gradients(self) -> None:
        # DDP would leave what shares a bucket with a missing one unaveraged in this step, and say so in the next. It
        # waits in a step's last backward pass: a gradient from an earlier micro-batch is none to it.
        missing = [name for name, parameter in self._trainable.items() if parameter not in self._reached]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"the loss of a micro-batch does not depend on {missing[0]}{more}, and sync.k=1 needs every gradient: "
                "freeze it in the recipe's build_model with requires_grad_(False), or average weights: sync.k=2 or more"
            )

    def after_step(self, facts: StepFacts) -> bool:
        self._steps += 1
        return True

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        own = [buffer.clone() for buffer in self._buffers]
        self._average_buffers()
        yield
        for buffer, before in zip(self._buffers, own, strict=True):
            buffer.copy_(before)
        if own:
            self._backend.mark_step()

    def finish(self) -> bool:
        self._average_buffers()
        return False

    @torch.no_grad()
    def _average_buffers(self) -> None:
        """Running statistics are each worker's own while it trains, and nothing that gradients could make common."""
        if not self._buffers:
            return
        # What they have changed by, so that constants among them stay what they are.
        torch._foreach_sub_(self._buffers, self._buffers_at_first)
        flat = FlatTensors(self._buffers, live=False)
        self._backend.mark_step()
        self._backend.all_reduce(flat.pack()).div_(self._backend.world_size)
        flat.unpack()
        torch._foreach_add_(self._buffers, self._buffers_at_first)
        self._backend.mark_step()

    def agree_on_scale(self, scale: float) -> float:
        return scale  # equal everywhere: it follows from common gradients

    def stats(self) -> SyncStats:
        if self._backend.world_size == 1:
            return SyncStats(0, 0, 0.0, 0.0)
        if self._final_stats is not None:
            return self._final_stats
        if not isinstance(self.forward_model, DistributedDataParallel):
            return SyncStats(self._steps, self._steps * self._gradient_bytes, None, None)
        # torch's own timers, in nanoseconds, averaged over the steps it sampled.
        timing = self.forward_model._get_ddp_logging_data()
        under_way = timing.get("avg_backward_comm_time", 0) / 1e9
        beside_compute = timing.get("avg_backward_compute_comm_overlap_time", 0) / 1e9
        return SyncStats(
            self._steps,
            self._steps * self._gradient_bytes,
            self._steps * under_way,
            self._steps * max(under_way - beside_compute, 0.0),
        )

    def take_records(self) -> list[SyncRecord]:
        return []  # every step alike, and no replica drifts

    def close(self) -> None:
        if isinstance(self.forward_model, DistributedDataParallel):
            self._final_stats = self.stats()
            for hook in self._hooks:
                hook.remove()
            self.forward_model = self.forward_model.module

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
