"""Ends a run whose losses, gradients, weights or metrics are not finite, and counts the steps that fp16 skips."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.choices import PrecisionName
from runner.config.schema import Config
from runner.errors import Diverged
from runner.log import LOG
from runner.train.sharding import local
from runner.train.throughput import StepRecord

#: Skipped steps in a row after which fp16 is given up: they divide the loss scale by 2^40, from 2^16 to the smallest
#: number of fp16.
_MOST_SKIPPED = 40


class FiniteNumbers:
    """All workers see the same records and the same weights, so that all of them stop at the same step."""

    def __init__(self, config: Config, backend: Backend) -> None:
        self._config, self._backend = config, backend
        self._fp16 = config.precision.name is PrecisionName.fp16
        #: Optimizer steps that changed the weights of a worker, and those that the fp16 loss scalers of all skipped.
        self.applied_steps = self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._bad_steps = 0
        self._first_problem: str | None = None

    def check(self, records: Sequence[StepRecord]) -> None:
        """Raises Diverged after `nonfinite_steps` steps with a loss or a gradient that is not finite."""
        for record in records:
            if self._fp16 and record.applied == 0:
                self.skipped_steps += 1
                self._skipped_in_a_row += 1
                if self._skipped_in_a_row == _MOST_SKIPPED:
                    raise self._all_skipped(f"each of the last {_MOST_SKIPPED} optimizer steps to {record.step:,}")
                continue
            self.applied_steps += 1
            self._skipped_in_a_row = 0
            # Else it may be the loss of a worker whose own scaler has skipped the step.
            if not self._fp16 or record.applied == self._backend.world_size:
                self._check_step(record)

    def _check_step(self, record: StepRecord) -> None:
        numbers = {"training loss": record.loss, "norm of the gradient": record.gradient_norms}
        bad = [f"the {name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if not bad:
            return
        self._bad_steps += 1
        first = f"{bad[0]} in optimizer step {record.step:,} (learning rate {record.lr:.3g})"
        limit = self._config.nonfinite_steps
        if self._first_problem is None:
            self._first_problem = first
            if limit > 1 and self._backend.rank == 0:
                LOG.warning(f"{first}: the run ends after {limit} such steps (nonfinite_steps)")
        if self._bad_steps >= limit:
            raise Diverged(f"{self._first_problem}: {self._advice()}")

    def require_weights(self, weights: Sequence[Tensor], step: int) -> None:
        """Raises Diverged if a weight that is evaluated after this step is not finite. A collective."""
        finite = torch.stack([local(weight.detach()).isfinite().all() for weight in weights]).all()
        if self._backend.start_host_sum([not finite], async_op=False)() != [0.0]:
            raise Diverged(f"the weights are not finite after optimizer step {step:,}: {self._advice()}")

    def require_result(self, metrics: Mapping[str, float], losses: Collection[str]) -> None:
        """Raises Diverged if fp16 skipped every step, or if the run's metric or one of the `losses` is not finite.

        Other metrics can be undefined for the data, as the area under a curve is without samples of a class.
        """
        if self.skipped_steps and not self.applied_steps:
            raise self._all_skipped(f"all {self.skipped_steps:,} optimizer steps")
        for name, value in metrics.items():
            if (name in losses or name == self._config.evaluation.metric) and not math.isfinite(value):
                done = self.applied_steps + self.skipped_steps
                skipped = f", of whose {done:,} optimizer steps fp16 skipped {self.skipped_steps:,}"
                end = f"at the end of the run{skipped if self.skipped_steps else ''}"
                raise Diverged(f"the metric {name} is {value} {end}: {self._advice()}")

    def _all_skipped(self, steps: str) -> Diverged:
        return Diverged(
            f"precision=fp16: the loss scaler skipped {steps}, whose gradients were not finite: {self._advice()}"
        )

    def _advice(self) -> str:
        """Remedies that these settings leave."""
        config = self._config
        ways = [f"lower optimizer.lr ({config.optimizer.lr:g})"]
        if config.optimizer.clip_norm is None:
            ways.append("clip gradients (optimizer.clip_norm=1)")
        ways.append(f"lengthen the warm-up (schedule.warmup_share={config.schedule.warmup_share:g})")
        if self._fp16:
            ways.insert(0, "use precision=bf16")
        return f"{', '.join(ways[:-1])} or {ways[-1]}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "bad_steps": self._bad_steps,
            "first_problem": self._first_problem,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.applied_steps, self.skipped_steps = state["applied_steps"], state["skipped_steps"]
        self._skipped_in_a_row, self._bad_steps = state["skipped_in_a_row"], state["bad_steps"]
        self._first_problem = state["first_problem"]
