"""What a comparison knows of a run, wherever the run came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

#: How a setup with several workers saves communication; setups of one method and one number of workers are a family.
SINGLE, ACCUMULATION, K = "one worker", "accumulation", "k"

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class BlockKey:
    """What has to be the same before two runs are set side by side at all.

    `experiment`: a recipe's name or a published experiment's; `conditions`: further words that tell blocks apart, empty
    ones left out; `samples`: in one epoch, of `epochs`; `data`: digest of where they come from; `goal`: `max` or `min`.
    """

    experiment: str
    conditions: tuple[str, ...]
    samples: int
    epochs: int
    metric: str
    goal: str
    data: str = ""

    @property
    def title(self) -> str:
        words = [self.experiment, *self.conditions, f"{self.samples * self.epochs:,} samples"]
        return " · ".join(word for word in words if word)


@dataclass(frozen=True)
class Phases:
    """Seconds of a run's life, from the start of the command to its end.

    `stalled`: of `training`, waiting for averages, None if unknown; `step`: seconds of one step on worker 0 by phase,
    None where a device has no phases; `evaluation`: None if unknown.
    """

    first_step: float
    training: float
    wall: float
    stalled: float | None = None
    step: Mapping[str, float] | None = None
    evaluation: float | None = None


@dataclass(frozen=True)
class Property:
    """One property of a run's certificate, and what a difference in it allows two runs to be called."""

    value: Any
    allows: str


@dataclass(frozen=True)
class Run:
    """One finished run.

    `source`: folder, MLflow run id or line of a file; `setup`: its setup's name without the seed; `digest`: the same
    for runs that differ in the seed only; `seconds`: of training, for all planned samples, first step and evaluation
    left out, None if too short to time; `values`: every setting, flat, as text; `varied`: the settings that its sweep
    varied; `certificate`: by property, None if unknown; `withdrawn`: why the run's own certificate was taken back;
    `curve`: (samples seen, training loss); `order`: of two runs of one setup and seed the greater is the newer.
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
    varied: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, Property] | None = None
    withdrawn: str | None = None
    phases: Phases | None = None
    curve: tuple[tuple[float, float], ...] = ()
    mlflow_run_id: str | None = None
    order: str = ""

    @property
    def setup_key(self) -> tuple[str, str, bool]:
        # `device=auto` and rehearsals are one digest on different machines, and not one setup.
        return (self.digest, self.setup, self.rehearsed)


@dataclass(frozen=True)
class Refused:
    """A run that is not compared, and why in a few words."""

    source: str
    reason: str


@dataclass(frozen=True)
class Found:
    """What the arguments came to. `parent`: the MLflow run that all these runs are children of, if there is one."""

    runs: Sequence[Run]
    refused: Sequence[Refused] = ()
    parent: str | None = None


def grouped(runs: Iterable[Run], key: Callable[[Run], _Key]) -> dict[_Key, list[Run]]:
    """Runs by key, keys and runs in the order in which they come."""
    groups: dict[_Key, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def newest_of_each_seed(found: Found) -> Found:
    """Each setup's newest run of each seed; a repeated seed is no further draw, so older runs of it are set aside."""
    kept: list[Run] = []
    refused = list(found.refused)
    for repeats in grouped(found.runs, lambda run: (run.block, run.setup_key, run.seed)).values():
        *older, newest = sorted(repeats, key=lambda run: run.order)
        kept.append(newest)
        refused += [
            Refused(run.source, f"repeated by {newest.source} with the same setup and seed {run.seed}")
            for run in older
            if run.source != newest.source
        ]
    return Found(kept, refused, found.parent)
