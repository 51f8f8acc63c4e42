"""`python -m runner.plan -m …`: all setups of a grid by predicted time. Nothing is trained, except to measure."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

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
from runner.plan.experiment import Experiment, prepare_for_plan
from runner.plan.scaling_range import rule_of
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
        tested = batch == plan.reference_batch or rule.name == self.sample_cost.best_rule
        return self.sample_cost.at(plan.global_batch) if tested else None

    @property
    def same_loss(self) -> Quantity | None:
        """Seconds to the loss of the reference batch."""
        found, factor = self.prediction, self.more_samples
        if found is None or factor is None:
            return None
        return found.training * factor + (found.total.value - found.training.value)

    def row(self) -> dict[str, Any]:
        """The row of a CSV file; what is not known is left out."""
        plan, found = self.experiment.plan, self.prediction
        sizes = {"workers": plan.world_size, "accumulation_steps": plan.accumulation_steps, "k": plan.k}
        row = {"setup": self.name, "overrides": self.overrides, **sizes, "certificate": self.level}
        if found is None:
            return row | {"reason": self.reason}
        row |= _with_interval("training_s", found.training) | {
            "total_s": found.total.value,
            "step_s": sum(found.step_s.values()),
            "communication_share": found.communication_share,
            "padding_share": found.padding_share,
            "peak_memory_bytes": found.memory_bytes,
            "available_memory_bytes": found.available_bytes,
            "fits": found.fits,
            "price": self.price,
        }
        if self.more_samples is None or self.same_loss is None:
            return row
        return row | {"more_samples": self.more_samples.value} | _with_interval("same_loss_s", self.same_loss)

    @property
    def seconds(self) -> tuple[float, float]:
        """What setups are sorted by: seconds to the same loss, where that is known for some, then in total."""
        total = self.prediction.total.value if self.prediction else math.inf
        if self.sample_cost is None:
            return total, total
        return self.same_loss.value if self.same_loss is not None else math.inf, total

    @property
    def may_fit(self) -> bool:
        """Whether there is a prediction, and it is not for more memory than there is."""
        return self.prediction is not None and self.prediction.fits is not False


def _with_interval(name: str, quantity: Quantity) -> dict[str, float]:
    return {name: quantity.value, f"{name}_low": quantity.low, f"{name}_high": quantity.high}


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
            require(not Path(path).exists(), name, path, "the file exists; choose another")
            check_folder(name, str(Path(path).parent))
    rule = "it shows the time to the same loss, for which plan.scale=FOLDER is needed"
    require(first.plan.plot is None or first.plan.scale is not None, "plan.plot", first.plan.plot, rule)
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
    return sorted(setups, key=lambda one: one.seconds)


def _require_tested(setups: Sequence[RankedSetup], cost: SampleCost, path: str) -> None:
    """Refuse a branch test of something else. Raises UserError."""
    for one in setups:
        experiment = one.experiment
        for name, tested, here in (
            ("recipe", cost.recipe, experiment.config.recipe["name"]),
            ("model", cost.model, experiment.model_name),
            ("data", cost.data, experiment.facts.digest),
            ("reference batch", cost.reference, experiment.plan.reference_batch),
        ):
            rule = f"its {name} is {tested}, and here it is {here}: test this recipe"
            require(tested == here, "plan.scale", path, rule)


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
