"""What a run measured, from the worker that trained it to `summary.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.backends import Compilations
from runner.train.noise import NoiseScale
from runner.train.tokens import Tokens

#: What the summary reports elsewhere: in its block `speed`, and in the certificate.
_NOT_IN_SUMMARY = (
    *("tokens", "flops_per_sample", "peak_flops_per_s", "peak_memory_bytes", "waited_share"),
    "batch_statistics",
)


@dataclass(frozen=True)
class SmallerMicroBatches:
    """Memory was too little for step `after_step` + 1: from there on each worker has more micro-batches."""

    after_step: int
    accumulation_steps: int


@dataclass(frozen=True)
class RunResult:
    """The measurements of rank 0 at the end of training; None: unknown, as in a run that failed.

    `optimizer_steps`, `samples_seen`: completed. `applied_steps`, `skipped_steps`: optimizer steps that changed the
    weights, and those that the fp16 loss scaler skipped. `samples_per_s`: over all workers, after the first step.
    `first_step_s`: from the start of the command, or of workers that were started again, to the end of the first step,
    in `first_step_compile_s` of which programs were compiled. `comm_*`: of this worker's collectives for training.
    `checkpoint_stall_s`: for which training stood still to save. `sync`: statistics of local phases. `step_s`: seconds
    of an optimizer step by phase. `evaluation_s`: of all evaluations. `flops_per_sample`: operations to train a sample,
    `peak_flops_per_s`: what the devices of all workers could do (see train/flops.py). `peak_memory_bytes`: of each
    worker, by rank. `waited_share`: of the time in which this worker's threads could have run, in which they had no
    core. `noise`: of the gradient, where it was measured. `compilations`: of the whole run. `train_loss`:
    mean over the run. `eval`: the metrics of the saved weights. `best`: the step and value of the best evaluation.
    `batch_statistics`: whether the model has batch normalisation. `parameters`: of the model, with those of an adapter,
    and how many of them are trained. `truncated`: how many texts the recipe has truncated (see `Recipe.prepare`).
    `machine`: the hardware, in words. `weights_digest`: of the weights that were trained, before an adapter is merged,
    where any number of workers must have the same.
    `smaller_micro_batches`: than planned, for lack of memory.
    """

    optimizer_steps: int | None = None
    applied_steps: int | None = None
    skipped_steps: int | None = None
    samples_seen: int | None = None
    samples_per_s: float | None = None
    first_step_s: float | None = None
    first_step_compile_s: float | None = None
    synchronisations: int | None = None
    comm_bytes: int | None = None
    comm_s: float | None = None
    comm_stall_s: float | None = None
    checkpoint_stall_s: float | None = None
    sync: Mapping[str, Any] | None = None
    step_s: Mapping[str, float] | None = None
    evaluation_s: float | None = None
    tokens: Tokens | None = None
    flops_per_sample: float | None = None
    peak_flops_per_s: float | None = None
    peak_memory_bytes: tuple[int, ...] | None = None
    waited_share: float | None = None
    compilations: Compilations | None = None
    train_loss: float | None = None
    noise: NoiseScale | None = None
    eval: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    batch_statistics: bool = False
    parameters: int | None = None
    trained_parameters: int | None = None
    truncated: Any = None
    stopped_early: bool | None = None
    machine: str | None = None
    weights_digest: str | None = None
    smaller_micro_batches: tuple[SmallerMicroBatches, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_summary(self) -> dict[str, Any]:
        """The part of `summary.json` that was measured."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _NOT_IN_SUMMARY}
