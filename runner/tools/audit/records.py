"""Records that an audit makes in each process, and the findings that it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

#: Epoch, from 0, and sample ids: indices, or what else a sampler yields, such as (index, size).
Batch = tuple[int, tuple[Any, ...]]


@dataclass(frozen=True)
class Finding:
    """Something wrong.

    `kind`: its subject, such as coverage or gradient; `name`: of the mistake, such as `not sharded`; `seen`: the
    evidence; `fix`: what to do about it; `fits`: causes that would explain it, if the records do not show which it was.
    """

    kind: str
    name: str
    seen: str
    fix: str = ""
    fits: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        *others, last = self.fits or ("",)
        causes = f"{', '.join(others)}, or {last}" if others else last
        parts = (self.seen, f": {self.fix}" if self.fix else "", f"; causes that fit: {causes}" if causes else "")
        return "".join(parts)


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of one process.

    `lrs`: learning rate of each parameter group; `batches`: those whose gradients the optimizer used; `discarded`:
    those before them, whose gradients were cleared; `evaluating`: how many were computed in evaluation mode;
    `scheduled`: how often the scheduler had been stepped at each batch's forward pass, and last at the step.
    """

    step: int
    lrs: tuple[float, ...]
    batches: tuple[Batch, ...]
    discarded: tuple[Batch, ...] = ()
    evaluating: int = 0
    scheduled: tuple[int, ...] = ()


@dataclass(frozen=True)
class BackwardPass:
    """Some elements of all gradients, [elements]: `held` before a backward pass, and `after` it on this process."""

    held: Tensor
    after: Tensor

    @property
    def added(self) -> Tensor:
        return self.after - self.held


@dataclass(frozen=True)
class StepGradients:
    """The gradients of one optimizer step: of its backward passes, and as the optimizer `used` them, [elements]."""

    step: int
    passes: tuple[BackwardPass, ...]
    used: Tensor


@dataclass(frozen=True)
class GradientCheck:
    """Gradients computed again, [elements]: of all samples of a step in one batch, and of this process's last batch.

    `again`: as `whole`, with another random stream: dropout makes them different. `counts`: what a loss may be averaged
    over (samples, labels, …) and how many of it each of this process's batches has.
    """

    step: int
    whole: Tensor
    again: Tensor
    last: Tensor
    counts: dict[str, list[int]]


@dataclass(frozen=True)
class SamplerFacts:
    """Attributes of a loader's samplers.

    `length`: samples in an epoch before it is cut into batches; `seed`, `rank`, `replicas`: None if no sampler has one;
    `shards`: parts that samplers or Accelerate cut the data set into; `epochs_set`: what `set_epoch` had set when each
    epoch began, None without such a method; `whole`: epochs that were yielded to the end and trained on; `left_early`:
    epoch and number of batches that were yielded and not trained on.
    """

    length: int
    seed: int | None
    rank: int | None
    replicas: int | None
    shards: int
    drop_last: bool
    replacement: bool
    epochs_set: tuple[int, ...] | None
    whole: frozenset[int]
    left_early: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ScheduleFacts:
    """A scheduler at the end. `length`: None if it has no end; `multiplied`: Accelerate steps it once per process."""

    stepped: int
    length: int | None
    multiplied: bool


@dataclass(frozen=True)
class ProcessRecord:
    """All that one process has recorded.

    `samples`: of its data set; `data`: equal for equal data sets, None for one process or random samples;
    `left_over`: batches after the last step; `started`, `ended`, `buffers`: checksums by name, none if weights are
    sharded; buffers as they were in the last forward pass that begins a step; `outside`: parameters that get
    gradients, are not the optimizer's and never change; `foreign`: how many of its tensors are not the model's;
    `wrapped`: whether the model is in DistributedDataParallel.
    """

    steps: tuple[StepRecord, ...]
    sampler: SamplerFacts
    samples: int
    data: str | None = None
    left_over: tuple[Batch, ...] = ()
    schedules: tuple[ScheduleFacts, ...] = ()
    started: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    foreign: int = 0
    gradients: tuple[StepGradients, ...] = ()
    check: GradientCheck | None = None
    wrapped: bool = False
