"""What is trained: tasks, setups, and the learning rate of each setup, which is chosen with separate seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.sync_frontier.rows import FINISHED, Row, missing_jobs, settings_digest

#: Of the choice of a learning rate.
TUNING_SEEDS = range(100, 102)


@dataclass(frozen=True)
class Task:
    """`margin`: points of the metric within which setups count as equivalent; written down before any run.

    `rates`: learning rates that are tried, in ascending order. `seeds`: of the comparison. `recipe`: overrides without
    data and model. `batch`: of each worker, by number of workers. `train_samples`: at most as many are trained, and
    `tuning_samples` in the runs that choose a learning rate; None: all. With `held_out=n` every n-th line of the
    training data is evaluated instead of trained: with few evaluated samples a metric is noise.
    """

    name: str
    metric: str
    margin: float
    rates: tuple[float, ...]
    seeds: range
    recipe: tuple[str, ...]
    batch: Mapping[int, int]
    epochs: int
    train_samples: int | None = None
    tuning_samples: int | None = None
    held_out: int | None = None


TASKS = {
    task.name: task
    for task in (
        Task(
            "cola",
            "matthews",
            2.0,
            (3e-5, 6e-5, 1.2e-4),
            range(14),
            ("recipe=cola",),
            {1: 16, 2: 16},
            epochs=3,
            held_out=4,
        ),
        Task(
            "squad",
            "f1",
            1.0,
            (5e-5, 1e-4, 2e-4),
            range(10),
            ("recipe=squad", "recipe.max_length=128", "recipe.doc_stride=32"),
            {1: 8, 2: 4},
            epochs=1,
            train_samples=2000,
            tuning_samples=1500,
        ),
    )
}


@dataclass(frozen=True)
class Setup:
    """`on_a_link`: the name of the same setup in benchmarks/slow_link. `rate_of`: the setup whose rate it takes."""

    workers: int
    k: int
    on_a_link: str
    sync: tuple[str, ...] = ()
    rate_of: str | None = None

    @property
    def overrides(self) -> list[str]:
        return ["device=cpu"] if self.workers == 1 else ["device=cpu2", *self.sync, f"sync.k={self.k}"]


ONE = "one"
_OVERLAP = ("sync.overlap=true", "sync.compress=bf16")
_INT8 = ("sync=streaming", "sync.compress=int8")
#: By name. The learning rate is chosen for each, or for another setup, so it is not scaled.
SETUPS = {
    ONE: Setup(1, 1, "one"),
    "k16": Setup(2, 16, "runner_k16"),
    "streaming_k16": Setup(2, 16, "runner_k16_streaming_bf16", ("sync=streaming",)),
    "streaming_k16_int8": Setup(2, 16, "runner_k16_streaming_int8", _INT8),
    "streaming_k16_int8_rate_of_bf16": Setup(2, 16, "runner_k16_streaming_int8", _INT8, rate_of="streaming_k16"),
    "streaming_k4": Setup(2, 4, "runner_k4_streaming_bf16", ("sync=streaming",)),
    "overlap_k16": Setup(2, 16, "runner_k16_overlap_bf16", _OVERLAP),
    "ddp": Setup(2, 1, "runner_k1"),
}
DEFAULT = (ONE, "k16", "streaming_k16", "streaming_k16_int8")


@dataclass(frozen=True)
class Job:
    """One run of a setup."""

    task: Task
    setup: str
    lr: float
    seed: int

    @property
    def overrides(self) -> list[str]:
        """Without data, model and folder."""
        setup = SETUPS[self.setup]
        size = [f"batch.micro_batch={self.task.batch[setup.workers]}", f"epochs={self.task.epochs}"]
        fixed = ["batch=per_device", "scaling=none", "precision=bf16", "tracking=none", "checkpoint=none"]
        # Evaluated at its end only. More steps than a run has, and a multiple of every k.
        fixed.append(f"evaluation.every_steps={2**20}")
        samples = self.task.tuning_samples if self.seed in TUNING_SEEDS else self.task.train_samples
        if samples is not None:
            fixed.append(f"recipe.data.max_train_samples={samples}")
        return [
            *self.task.recipe,
            *size,
            *fixed,
            *setup.overrides,
            f"optimizer.lr={self.lr:g}",
            f"seed={self.seed}",
        ]

    def digest(self, data: str) -> str:
        """Of everything but the seed."""
        return settings_digest(self.overrides, data)


def is_planned(row: Row) -> bool:
    """Whether this is a run of the present plan, which may have changed since."""
    job = Job(TASKS[row["task"]], row["setup"], float(row["lr"]), int(row["seed"]))
    return job.digest(row["data"]) == row["digest"]


def digest_of(files: Sequence[Path]) -> str:
    """Of the files' contents."""
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()[:12]


def chosen_rate(task: Task, setup: str, rows: Sequence[Row]) -> float | None:
    """The learning rate with the best mean over the tuning seeds; None until all of them have run."""
    setup = SETUPS[setup].rate_of or setup
    found: dict[float, list[float]] = {}
    for row in rows:
        ours = row["task"] == task.name and row["setup"] == setup and int(row["seed"]) in TUNING_SEEDS
        if ours and row["status"] == FINISHED:
            found.setdefault(float(row["lr"]), []).append(float(row["metric"]))
    if any(len(found.get(lr, ())) < len(TUNING_SEEDS) for lr in task.rates):
        return None
    return max(task.rates, key=lambda lr: fmean(found[lr]))


def next_jobs(task: Task, setups: Sequence[str], rows: Sequence[Row], data: str) -> list[Job]:
    """The runs that can be made now: those that choose learning rates, then seed by seed. `data`: its files' digest."""
    rows = [row for row in rows if row["data"] == data and is_planned(row)]
    rates = {name: chosen_rate(task, name, rows) for name in setups}
    return missing_jobs(_wanted(task, setups, rates), rows, data)


def _wanted(task: Task, setups: Sequence[str], rates: Mapping[str, float | None]) -> Iterator[Job]:
    for name in setups:
        for lr in task.rates if rates[name] is None else ():
            yield from (Job(task, SETUPS[name].rate_of or name, lr, seed) for seed in TUNING_SEEDS)
    for seed in task.seeds:
        for name in setups:
            if (lr := rates[name]) is not None:
                yield Job(task, name, lr, seed)
