"""The runs that are compared, independent of where they were read from."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from runner.tools.compare.design import Design

#: How a setup with several workers saves communication. Setups with the same method and number of workers are a family.
SINGLE, ACCUMULATION, K = "one worker", "accumulation", "k"
#: Names of metrics that should be low, where a run does not say so itself.
LOWER_IS_BETTER = re.compile(r"(^|_)(loss|perplexity|error|wer|cer|mse|mae|rmse)$")

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class BlockKey:
    """Properties that two runs must have in common to appear in the same table.

    `experiment`: name of the recipe or of the published experiment; `conditions`: further words for the title, may be
    empty; `samples`: per epoch; `goal`: `max` or `min`; `data`: digest of the data settings.
    """

    experiment: str
    conditions: tuple[str, ...]
    samples: int
    epochs: int
    metric: str
    goal: str
    data: str = ""

    @property
    def total_samples(self) -> int:
        return self.samples * self.epochs

    @property
    def title(self) -> str:
        return " · ".join(
            word for word in (self.experiment, *self.conditions, f"{self.total_samples:,} samples") if word
        )


@dataclass(frozen=True)
class Phases:
    """Parts of the wall-clock time of a run, in seconds.

    `stalled`: part of `training` spent waiting for communication; `step`: seconds of one step on worker 0 by phase.
    None: not measured.
    """

    first_step: float
    training: float
    wall: float
    stalled: float | None = None
    step: Mapping[str, float] | None = None
    evaluation: float | None = None


@dataclass(frozen=True)
class CertificateProperty:
    """A property in a run's certificate, and the best level that two runs can have if they differ in it."""

    value: Any
    allows: str


@dataclass(frozen=True)
class Run:
    """One run that has finished or diverged.

    `source`: folder, MLflow run id or line of a file; `setup`: name of its setup, without the seed; `digest`: equal for
    runs that differ only in the seed; `seconds`: training time for all planned samples without start-up and evaluation,
    None if the run was too short to time; `busy`: whether it says that other programs slowed it down; `values`: every
    setting, flattened; `varied`: settings that the sweep varied;
    `certificate`: by property; `withdrawn`: why the certificate was withdrawn; `curve`: (samples seen, training loss);
    `peak_memory_bytes`: of the worker that needed most; `predicted_seconds`: of training, by a measurement before it;
    `weights`: digest of the saved weights; `eval_rows`: number of evaluation rows, or of the groups they belong to;
    `row_metrics`: the metric of each of them, whose mean it is, where the run has kept that; `constant`: the metric of
    the best answer that is the same for every row; `design`: of the sweep, if it added seeds until its setups were
    decided; `raced`: the setups that began the race of the sweep, 0 without one; `diverged`: which number is not
    finite; `metric` is NaN then. `order`: of two runs with the same setup and seed, the greater is the newer.
    """

    source: str
    block: BlockKey
    setup: str
    digest: str
    seed: int
    workers: int
    accumulation: int
    k: int
    precision: str
    method: str
    metric: float
    seconds: float | None
    rehearsed: bool = False
    machine: str | None = None
    jobs_at_once: int | None = None
    busy: bool = False
    varied: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, CertificateProperty] | None = None
    withdrawn: str | None = None
    phases: Phases | None = None
    curve: tuple[tuple[float, float], ...] = ()
    tokens_per_s: float | None = None
    model_flops_utilization: float | None = None
    peak_memory_bytes: int | None = None
    predicted_seconds: float | None = None
    weights: str | None = None
    eval_rows: int | None = None
    row_metrics: np.ndarray | None = field(default=None, repr=False, compare=False)
    constant: float | None = None
    design: Design | None = None
    raced: int = 0
    diverged: str | None = None
    mlflow_run_id: str | None = None
    order: str = ""

    @property
    def setup_key(self) -> tuple[str, bool]:
        # Not the name: it depends on what was typed.
        return (self.digest, self.rehearsed)

    @property
    def uncertain_time(self) -> bool:
        """Return whether other jobs or programs had a part of the machine, which makes its time unreliable."""
        return self.busy or (self.jobs_at_once or 1) > 1

    @property
    def prediction_error(self) -> float | None:
        """The share of its training time by which the prediction was too high; None without one.

        The time of a rehearsal, or of a run that did not have the machine for itself, says nothing about it.
        """
        if self.predicted_seconds is None or not self.seconds or self.rehearsed or self.uncertain_time:
            return None
        return self.predicted_seconds / self.seconds - 1


@dataclass(frozen=True)
class SkippedRun:
    """A run that is not compared, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class FoundRuns:
    """The runs that the command line names, and those among them that cannot be compared."""

    runs: Sequence[Run]
    skipped: Sequence[SkippedRun] = ()


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Runs, or other items, by key, in the order of their first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def newest_of_each_seed(found: FoundRuns) -> FoundRuns:
    """Keep the newest run of each setup and seed: repeating a seed adds no independent sample."""
    kept: list[Run] = []
    skipped = list(found.skipped)
    for repeats in grouped(found.runs, lambda run: (run.block, run.setup_key, run.seed)).values():
        *older, newest = sorted(repeats, key=lambda run: run.order)
        kept.append(newest)
        skipped += [
            SkippedRun(run.source, f"replaced by the newer run {newest.source} with the same setup and seed {run.seed}")
            for run in older
            if run.source != newest.source
        ]
    return FoundRuns(kept, skipped)
