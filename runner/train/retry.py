"""Repeats a step for which memory was too little, with smaller micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner.errors import OutOfMemory, first_line
from runner.folder.record import SmallerMicroBatches
from runner.log import LOG
from runner.plan.order import DataOrder
from runner.train.replica import Replica
from runner.train.throughput import PhaseTimer, StepRecord


class StepRetry:
    """Remembers what a step needs to be repeated by this worker alone, and from when on micro-batches were smaller."""

    def __init__(self, replica: Replica, order: DataOrder, timer: PhaseTimer) -> None:
        self._replica, self._order, self._timer = replica, order, timer
        self._buffers = list(replica.model.buffers())
        self._repeated = False
        self.smaller_micro_batches: list[SmallerMicroBatches] = []
        self.before_step()

    def before_step(self) -> None:
        """Note random states of host and device, which can be restored, and buffers' versions, which cannot."""
        self._random = torch.get_rng_state(), self._replica.backend.random_state()
        self._versions = [buffer._version for buffer in self._buffers]

    def halve_micro_batches(self, error: Exception, step: int) -> None:
        """Undo what optimizer step `step` has done until memory was too little, so that it can be repeated.

        Raises OutOfMemory if this worker cannot repeat it alone: nothing is smaller, the others wait for it, or weights
        or running statistics have changed already.
        """
        order, policy, phase = self._order, self._replica.policy, self._timer.phase
        plan, backend = self._replica.plan, self._replica.backend
        size = -(-plan.replica_batch // order.accumulation_steps)
        what = f"step {step:,}: worker {backend.rank} has too little memory for micro-batches of {size}"
        alone = phase in ("data", "forward") or (phase == "backward" and not policy.collective_backward)
        unchanged = [buffer._version for buffer in self._buffers] == self._versions
        if not (order.can_cut_smaller and alone and unchanged) or policy.collective_forward:
            raise OutOfMemory(f"{what} ({first_line(error)})", order.accumulation_steps) from error
        self._replica.optimizer.zero_grad(set_to_none=True)
        on_host, on_device = self._random
        torch.set_rng_state(on_host)
        backend.restore_random_state(on_device)
        self._repeated = True
        order.accumulation_steps = min(2 * order.accumulation_steps, plan.replica_batch)
        LOG.warning(f"{what}: the step is repeated with smaller ones")

    def succeeded(self) -> bool:
        """Return whether the step that has just ended was repeated by this worker, and forget it."""
        repeated, self._repeated = self._repeated, False
        return repeated

    def agree(self, records: Sequence[StepRecord]) -> None:
        """Let all continue with the micro-batches of those that have repeated a step. A collective if any has."""
        first = next((record.step for record in records if record.repeated), None)
        if first is not None:
            steps = max(self._replica.backend.all_gather_object(self._order.accumulation_steps))
            self._order.accumulation_steps = steps
            self.smaller_micro_batches.append(SmallerMicroBatches(first - 1, steps))
