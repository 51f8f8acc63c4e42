"""`python -m runner.plan -m …`: all setups of a grid by predicted time. Nothing is trained, except to measure."""

from __future__ import annotations

import csv
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from runner.config.arguments import HydraOptions
from runner.config.choices import SyncPolicyName
from runner.config.compose import compose, parsed, settings, sweep_points, with_sweeper_params
from runner.config.schema import Sync
from runner.cost.prediction import Prediction
from runner.cost.quantity import Quantity
from runner.cost.sample_cost import SampleCost, read_sample_cost
from runner.data.cache import Progress
from runner.errors import UserError, require
from runner.folder.files import check_folder
from runner.log import LOG
from runner.measure.fitting import with_fitting_micro_batches
from runner.measure.predicted import Measuring, predicted, unsupported_reason
from runner.measure.tables import gib, seconds_words
from runner.plan.experiment import Experiment, prepare_for_plan
from runner.plan.levels import NOT_COMPARABLE
from runner.plan.scaling_range import rule_of
from runner.plan.tables import plain_table
from runner.tools.compare.runs import grouped
from runner.tools.plan.worth import Times, Worth, worth_of_workers, worth_words
from runner.tools.sweep.grid import grid_of
from runner.track.names import setting_labels

_NOT_MEASURED = "not measured: add measure=true"


@dataclass(frozen=True)
class RankedSetup:
    """A setup of the grid. `overrides`: that make it. `prediction`: None for the `reason`.

    `sample_cost`: what larger batches need, if it is known.
    """

    overrides: str
    experiment: Experiment
    prediction: Prediction | None
    reason: str | None
    sample_cost: SampleCost | None = None

    @property
    def name(self) -> str:
        return self.experiment.setup_name.rpartition(" · ")[0]  # without the seed

    @property
    def level(self) -> str:
        return self.experiment.certificate.level

    @property
    def price(self) -> float | None:
        per_hour = self.experiment.config.plan.price_per_hour
        return None if per_hour is None or self.prediction is None else self.prediction.money(per_hour).value

    @property
    def more_samples(self) -> Quantity | None:
        """How many times the samples this setup needs for the loss of the reference batch; None if it is not known.

        With local steps, or another scaling rule than the best, that was not tested.
        """
        plan, config = self.experiment.plan, self.experiment.config
        if self.sample_cost is None or config.sync.has_local_steps(plan.world_size):
            return None
        rule, batch = rule_of(config, plan)
        tested = batch == plan.reference_batch or rule.name == self.sample_cost.rule
        return self.sample_cost.at(plan.global_batch) if tested else None

    @property
    def same_loss(self) -> Quantity | None:
        """Seconds to the loss of the reference batch."""
        found, factor = self.prediction, self.more_samples
        if found is None or factor is None:
            return None
        return found.training * factor + (found.total.value - found.training.value)

    def row(self) -> dict[str, Any]:
        """The row of a CSV file; None: unknown."""
        found = self.prediction
        numbers: Mapping[str, Any] = {}
        if found is not None:
            numbers = {
                "training_s": found.training.value,
                "training_s_low": found.training.low,
                "training_s_high": found.training.high,
                "total_s": found.total.value,
                "step_s": sum(found.step_s.values()),
                "communication_share": found.communication_share,
                "padding_share": found.padding_share,
                "peak_memory_bytes": found.memory_bytes,
                "available_memory_bytes": found.available_bytes,
                "fits": found.fits,
                "price": self.price,
            }
            if self.more_samples is not None and self.same_loss is not None:
                seconds = self.same_loss
                numbers |= {
                    "more_samples": self.more_samples.value,
                    "same_loss_s": seconds.value,
                    "same_loss_s_low": seconds.low,
                    "same_loss_s_high": seconds.high,
                }
        plan = self.experiment.plan
        sizes = {"workers": plan.world_size, "accumulation_steps": plan.accumulation_steps, "k": plan.k}
        return {"setup": self.name, "overrides": self.overrides, **sizes, "certificate": self.level} | {
            **dict.fromkeys(_NUMBERS),
            **numbers,
            "reason": self.reason,
        }


_NUMBERS = (
    *("training_s", "training_s_low", "training_s_high", "total_s", "step_s", "communication_share", "padding_share"),
    *("peak_memory_bytes", "available_memory_bytes", "fits", "price"),
    *("more_samples", "same_loss_s", "same_loss_s_low", "same_loss_s_high"),
)


def rank(options: HydraOptions, started: float, progress: Progress, console: Console) -> list[RankedSetup]:
    """The setups that a grid asks for, the fastest first; those without a prediction last.

    `started`: when the command did, on the monotonic clock. Raises UserError.
    """
    first = compose(next(sweep_points(options.overrides)), options.config_dirs)
    overrides = with_sweeper_params(options.overrides, first.hydra)
    grid = grid_of(parsed(overrides), first.hydra)
    if grid.overrides is None:
        raise UserError("an optimizing sweeper chooses its jobs as it runs: runner.plan -m needs a list of values")
    for name, path in (("plan.csv", first.plan.csv), ("plan.plot", first.plan.plot)):
        if path is not None:
            _check_new_file(name, path)
    require(
        first.plan.plot is None or first.plan.scale is not None, "plan.plot", first.plan.plot,
        "it shows the time to the same loss, for which plan.scale=FOLDER is needed",
    )  # fmt: skip
    cost = read_sample_cost(first.plan.scale) if first.plan.scale is not None else None
    experiments: dict[str, Experiment] = {}
    prepared_s = 0.0
    for job in grid.overrides.values():
        varied = " ".join(one for one in job if one.lstrip("+").partition("=")[0] in grid.varied)
        labels, typed = setting_labels(job, grid.varied)
        try:
            config = settings(compose(job, options.config_dirs))
            experiment = prepare_for_plan(config, progress, labels, typed)
            experiment = with_fitting_micro_batches(
                experiment, started, progress, LOG.info, measures=experiment.config.measure
            )
        except UserError as error:
            raise UserError(f"{error} (setup {varied})") from error
        prepared_s = prepared_s or time.monotonic() - started
        if not any(_same(experiment, other) for other in experiments.values()):
            experiments[varied] = experiment
    measuring = Measuring(prepared_s, progress)
    measuring.announce([one for one in experiments.values() if one.config.measure and unsupported_reason(one) is None])
    setups = [_ranked(varied, experiment, measuring, console) for varied, experiment in experiments.items()]
    if cost is not None:
        _require_tested(setups, cost, first.plan.scale)
    setups = [dataclasses.replace(one, sample_cost=cost) for one in setups]
    return sorted(setups, key=_seconds)


def _require_tested(setups: Sequence[RankedSetup], cost: SampleCost, path: str) -> None:
    """Refuse a branch test of something else. Raises UserError."""
    for one in setups:
        experiment = one.experiment
        plan, names = experiment.plan, ("recipe", "model", "data", "reference batch")
        own = (
            str(experiment.config.recipe["name"]), experiment.model_name, experiment.facts.digest, plan.reference_batch
        )  # fmt: skip
        for name, tested, here in zip(names, cost.tested, own, strict=True):
            require(
                tested == here, "plan.scale", path, f"its {name} is {tested}, and here it is {here}: test this recipe"
            )


def _seconds(one: RankedSetup) -> tuple[float, float]:
    """Sort key: seconds to the same loss, where that is known for some setups, then in total."""
    total = one.prediction.total.value if one.prediction else math.inf
    if one.sample_cost is None:
        return total, total
    return one.same_loss.value if one.same_loss is not None else math.inf, total


def _same(one: Experiment, other: Experiment) -> bool:
    """Whether two setups do the same: with one worker there is nothing to synchronise."""
    alone = one.plan.world_size == other.plan.world_size == 1
    digests = (one.setup_digest, other.setup_digest) if not alone else (_without_sync(one), _without_sync(other))
    return digests[0] == digests[1] and one.config.hardware == other.config.hardware


def _without_sync(experiment: Experiment) -> str:
    config = dataclasses.replace(experiment.config, sync=Sync(SyncPolicyName.periodic, k=1))
    inputs = dataclasses.replace(experiment.inputs, config=config)
    return dataclasses.replace(experiment, inputs=inputs).setup_digest


def _ranked(varied: str, experiment: Experiment, measuring: Measuring, console: Console) -> RankedSetup:
    reason, prediction = unsupported_reason(experiment), None
    if reason is None and experiment.config.measure:
        console.print(f"measuring {escape(experiment.setup_name)} …", style="dim")
        prediction = measuring.predicted(experiment)
    elif reason is None:
        prediction = predicted(experiment)
    return RankedSetup(varied, experiment, prediction, reason or (None if prediction else _NOT_MEASURED))


def print_ranking(setups: Sequence[RankedSetup], worth: Sequence[Worth], console: Console) -> None:
    """A table with a line per setup, and which is the fastest at each level of the certificate."""
    table = plain_table("Setups by predicted time")
    priced = any(one.price is not None for one in setups)
    columns = ("in total", "training", "interval", "communication", "memory", *(("price",) if priced else ()))
    to_same_loss = any(one.sample_cost is not None for one in setups)
    table.add_column("setup", style="bold", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    for column in ("samples", "to the same loss") if to_same_loss else ():
        table.add_column(column, justify="right")
    table.add_column("certificate")
    for one in setups:
        same_loss = _same_loss_cells(one) if to_same_loss else ()
        table.add_row(Text(one.name), *_cells(one, priced, len(columns)), *same_loss, one.level)
    console.print(table)
    for reason, members in grouped(setups, lambda one: one.reason).items():
        if reason is not None:
            console.print(Text(f"{', '.join(one.name for one in members)}: {reason}", style="dim"))
    console.print(Text(best_words(setups)))
    if words := worth_words(worth, is_predicted(setups)):
        console.print(Text(words, style="bold"))


def _same_loss_cells(one: RankedSetup) -> tuple[str, str]:
    more, seconds = one.more_samples, one.same_loss
    if more is None or seconds is None:
        return "–", "–"
    known = math.isfinite(seconds.value)
    return f"× {more.value:.2g}", seconds_words(seconds.value) if known else "more than tried"


def worth_of(setups: Sequence[RankedSetup]) -> list[Worth]:
    """What more workers are worth; empty if fewer than two numbers of them have a time to the same loss."""
    times = []
    for one in sorted(setups, key=_seconds):
        found, same_loss = one.prediction, one.same_loss
        if found is not None and found.fits is not False and same_loss is not None and math.isfinite(same_loss.value):
            times.append(Times(one.experiment.plan.world_size, same_loss, found.total.value))
    return worth_of_workers(times)


def is_predicted(setups: Sequence[RankedSetup]) -> bool:
    """Whether times come from published figures, not from measurements on this machine."""
    return any(one.experiment.config.hardware.name is not None for one in setups)


def _cells(one: RankedSetup, priced: bool, columns: int) -> list[str]:
    found = one.prediction
    if found is None:
        return ["–"] * columns
    memory = gib(found.memory_bytes) + ("" if found.fits is not False else " (does not fit)")
    return [
        seconds_words(found.total.value),
        seconds_words(found.training.value),
        f"{seconds_words(found.training.low)} to {seconds_words(found.training.high)}",
        f"{found.communication_share:.0%}",
        memory,
        *([f"{one.price:.3g}"] if priced and one.price is not None else []),
    ]


def best_words(setups: Sequence[RankedSetup]) -> str:
    """The fastest setup at each level of the certificate, of those that fit; its metric is the experiment's."""
    best: dict[str, RankedSetup] = {}
    for one in setups:
        fits = one.prediction is not None and one.prediction.fits is not False
        if fits and one.level != NOT_COMPARABLE:
            best.setdefault(one.level, one)
    if not best:
        return "No setup has a prediction."
    parts = [f"{level} to one fp32 worker: {one.name} ({_total(one)})" for level, one in best.items()]
    return f"Fastest setup that is {'; '.join(parts)}."


def _total(one: RankedSetup) -> str:
    assert one.prediction is not None
    if one.same_loss is not None and math.isfinite(one.same_loss.value):
        return f"{seconds_words(one.same_loss.value)} to the same loss"
    return seconds_words(one.prediction.total.value)


def _check_new_file(setting: str, path: str) -> None:
    """Refuse a file that exists or cannot be written. Raises UserError."""
    require(not Path(path).exists(), setting, path, "the file exists; choose another")
    check_folder(setting, str(Path(path).parent))


def write_csv(setups: Sequence[RankedSetup], path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, tuple(setups[0].row()))
        writer.writeheader()
        writer.writerows(one.row() for one in setups)
