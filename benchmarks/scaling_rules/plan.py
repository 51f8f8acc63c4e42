"""What is trained: tasks, batch sizes, rules and seeds, and in which order. Written down before the first run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.sync_frontier.plan import TUNING_SEEDS
from benchmarks.sync_frontier.rows import FINISHED, Row, missing_jobs, settings_digest

#: The baseline: the reference batch, at which all rules are the same.
BASELINE = "reference"
RULES = ("linear", "sqrt", "sde", "half_life", "half_life_sqrt", "none")


@dataclass(frozen=True)
class Task:
    """A recipe that one worker clearly learns.

    `margin`: points of the metric within which batches count as equivalent. `rates`: learning rates of which the best
    mean over the tuning seeds is taken at the reference batch; a single one was tuned for
    benchmarks/results/sync-frontier.
    `reference_batch`: samples. `recipe`: overrides without data and model. `held_out`: every n-th line of CoLA's
    training data is evaluated instead of trained: with few evaluated samples a metric is noise.
    """

    name: str
    metric: str
    margin: float
    rates: tuple[float, ...]
    reference_batch: int
    recipe: tuple[str, ...]
    epochs: int
    held_out: int | None = None


TASKS = {
    task.name: task
    for task in (
        Task("cola", "matthews", 2.0, (6e-5,), 16, ("recipe=cola",), epochs=3, held_out=4),
        Task(
            "names",
            "f1",
            1.0,
            (5e-5, 1e-4, 2e-4, 4e-4),
            16,
            ("recipe=token_classification", "recipe.max_length=96"),
            epochs=1,
        ),
        Task(
            "squad",
            "f1",
            1.0,
            (1e-4,),
            8,
            ("recipe=squad", "recipe.max_length=128", "recipe.doc_stride=32", "recipe.data.max_train_samples=2000"),
            epochs=1,
        ),
    )
}


@dataclass(frozen=True)
class Stage:
    """Runs of all `rules` at `ratio` times the reference batch, with `seeds`."""

    ratio: float
    rules: tuple[str, ...]
    seeds: range


_FIRST, _MORE = range(3), range(3, 10)
#: In this order. Three seeds show which rules fail; ten decide where it matters: at 4 and 8 times the reference batch,
#: which are 4 and 8 workers with `batch=per_device`. `sde` has no β₁ above 0 at 16.
STAGES = (
    Stage(1, (BASELINE,), _FIRST),
    Stage(8, RULES, _FIRST),
    Stage(4, RULES, _FIRST),
    Stage(1, (BASELINE,), _MORE),
    Stage(8, ("linear", "sqrt", "sde", "half_life_sqrt"), _MORE),
    Stage(4, ("linear", "sqrt", "sde", "half_life_sqrt"), _MORE),
    Stage(2, RULES, _FIRST),
    Stage(16, tuple(rule for rule in RULES if rule != "sde"), _FIRST),
    Stage(0.5, RULES, _FIRST),
    Stage(0.25, RULES, _FIRST),
)


@dataclass(frozen=True)
class Job:
    """One run."""

    task: Task
    ratio: float
    rule: str
    lr: float
    seed: int

    @property
    def batch(self) -> int:
        return int(self.task.reference_batch * self.ratio)

    @property
    def overrides(self) -> list[str]:
        """Without data, model and folder. One worker makes any batch, in micro-batches of 16."""
        rule = "none" if self.rule == BASELINE else self.rule
        return [
            *self.task.recipe,
            f"epochs={self.task.epochs}",
            *("device=cpu", "precision=bf16", "tracking=none", "checkpoint=none"),
            *(f"batch.global_batch={self.batch}", "accumulation=auto", "accumulation.max_micro_batch=16"),
            *(f"scaling={rule}", f"scaling.reference_batch={self.task.reference_batch}"),
            f"optimizer.lr={self.lr:g}",
            f"seed={self.seed}",
        ]

    def digest(self, data: str) -> str:
        """Return a digest of everything but the seed."""
        return settings_digest(self.overrides, data)


def chosen_rate(task: Task, rows: Sequence[Row]) -> float | None:
    """The learning rate at the reference batch; None until all tuning runs have ended."""
    if len(task.rates) == 1:
        return task.rates[0]
    found: dict[float, list[float]] = {rate: [] for rate in task.rates}
    for row in rows:
        if row["task"] == task.name and int(row["seed"]) in TUNING_SEEDS and row["status"] == FINISHED:
            found[float(row["lr"])].append(float(row["metric"]))
    if any(len(values) < len(TUNING_SEEDS) for values in found.values()):
        return None
    return max(task.rates, key=lambda rate: sum(found[rate]) / len(found[rate]))


def planned(task: Task, rows: Sequence[Row]) -> Iterator[Job]:
    """All runs that can be made now, in order."""
    rate = chosen_rate(task, rows)
    if rate is None:
        yield from (Job(task, 1, BASELINE, lr, seed) for lr in task.rates for seed in TUNING_SEEDS)
        return
    for stage in STAGES:
        for seed in stage.seeds:
            yield from (Job(task, stage.ratio, rule, rate, seed) for rule in stage.rules)


def next_jobs(task: Task, rows: Sequence[Row], data: str) -> list[Job]:
    """The planned runs that are missing. `data`: its files' digest."""
    rows = [row for row in rows if row["data"] == data]
    return missing_jobs(planned(task, rows), rows, data)
