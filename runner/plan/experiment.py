"""Everything that is known about a run before a worker starts. Creates no folder and trains nothing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.backends.machine import library_versions, local_devices, processor
from runner.config.choices import (
    BatchOrder,
    DeviceKind,
    PrecisionName,
    ScalingWeightDecay,
    ShardingKind,
)
from runner.config.environment import external_local_world_size, external_world_size
from runner.config.instantiate import EXPERIMENT_KEYS, TUNED_KEYS, build_recipe
from runner.config.plain import to_plain
from runner.config.schema import REMOVED_SYNC_SETTINGS, SETUP_DIGEST_EXCLUDES, Config, Sharding
from runner.data.cache import Cache, Progress
from runner.data.recipe import DataFacts, Recipe
from runner.errors import Unavailable, UserError, did_you_mean, require
from runner.folder.files import check_folder, digest_of
from runner.plan.baseline import RunSetup, baseline_of, baseline_plan
from runner.plan.certificate import Certificate, certify
from runner.plan.checks import check_metric, check_plan, notes_on, unmeasured_noise
from runner.plan.describe_sync import sync_labels, sync_name
from runner.plan.history import History, Outcome, Segment, ended_at
from runner.plan.placement import Placement, check_device_serves, place
from runner.plan.plan import Plan, continued_plan, make_plan


@dataclass(frozen=True)
class Inputs:
    """What was asked for, and what was found for it: the recipe, the size of its data, and where the workers run.

    `varied`, `typed`: the settings that its sweep varies, and others that were typed, for names: `lr=5e-05`. `absent`:
    a sentence for each missing data set or model of an experiment that is only planned.
    """

    config: Config
    recipe: Recipe
    facts: DataFacts
    placement: Placement
    varied: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """What a run is: its inputs, the plan that follows from them, and its history. All else follows from these."""

    inputs: Inputs
    plan: Plan
    history: History = field(default_factory=History)

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def recipe(self) -> Recipe:
        return self.inputs.recipe

    @property
    def facts(self) -> DataFacts:
        return self.inputs.facts

    @property
    def placement(self) -> Placement:
        return self.inputs.placement

    @functools.cached_property
    def setup(self) -> RunSetup:
        """How it is executed here, as far as a certificate compares it."""
        config, device_type = self.config, self.placement.device_type
        return RunSetup(
            config=config,
            plan=self.plan,
            data=self.facts.digest,
            has_dropout=self.recipe.has_dropout or config.adapter.dropout > 0,
            device_type=device_type,
            rehearsed=self.placement.rehearsed,
            versions=library_versions(device_type),
            processor=processor(device_type) if config.equivalence.is_identical else "any",
        )

    @functools.cached_property
    def certificate(self) -> Certificate:
        """Compared with one worker; after training, with what has turned out."""
        setup, history, outcome = self.setup, self.history, self.history.outcome
        if outcome is not None:
            setup = dataclasses.replace(
                setup,
                config=dataclasses.replace(setup.config, sync=outcome.sync),
                batch_statistics=outcome.batch_statistics,
                stopped_after=outcome.stopped_after,
            )
            return certify(setup, baseline_of(setup), outcome.segments)
        baseline = baseline_of(setup)
        planned = certify(setup, baseline)
        now = Segment(
            after_step=history.began_after,
            until_step=None,
            device=self.placement.label,
            workers=self.plan.world_size,
            accumulation_steps=self.plan.accumulation_steps,
            precision=self.config.precision.name.name,
            sync=sync_name(self.config.sync),
            level=planned.level,
            differs=planned.differs,
        )
        return certify(setup, baseline, (*history.earlier, now.after_changes(history.changed)))

    @property
    def one_worker(self) -> RunSetup:
        """This run on one worker without accumulation, in this run's precision: the reference for its speed."""
        config = dataclasses.replace(self.config, sharding=Sharding())
        return dataclasses.replace(self.setup, config=config, plan=baseline_plan(config, self.plan), rehearsed=False)

    @property
    def model_name(self) -> str:
        """The model's name or path, or else the class that builds it."""
        model = self.config.recipe.get("model")
        if not isinstance(model, Mapping):
            return str(model or self.config.recipe["_target_"])
        return str(model.get("name") or model.get("_target_"))

    @property
    def setup_digest(self) -> str:
        """Equal for runs that differ only in the seed and in where they are logged and cached."""
        segments = self.certificate.segments
        mixed = len({segment.setup for segment in segments}) > 1
        return self._digest(*([segment.after_step, *segment.setup] for segment in segments if mixed))

    @property
    def job_digest(self) -> str:
        """Equal for runs with the same settings, seed included, whatever has happened to them."""
        return self._digest(self.config.seed)

    def _digest(self, *parts: Any) -> str:
        config = {key: value for key, value in to_plain(self.config).items() if key not in SETUP_DIGEST_EXCLUDES}
        config["equivalence"] = {key: value for key, value in config["equivalence"].items() if value is not None}
        if config["scaling"]["weight_decay"] == ScalingWeightDecay.fixed.name:  # older runs do not have it
            del config["scaling"]["weight_decay"]
        if config["batch"]["order"] == BatchOrder.permutation.name:  # the same
            del config["batch"]["order"]
        config["sync"] |= REMOVED_SYNC_SETTINGS
        data = config["recipe"].get("data")
        if isinstance(data, dict) and data.get("eval_share") is None:  # the same
            config["recipe"] = {**config["recipe"], "data": {k: v for k, v in data.items() if k != "eval_share"}}
        config["device"] = {**config["device"], "file": None}  # what it says is among the other settings
        return digest_of([config, self.placement.label, self.facts.digest, *parts])[:16]

    @property
    def setup_name(self) -> str:
        """How the experiment is executed, what its sweep varies, and the seed: `cpu4 · k=4 · bf16 · lr=5e-05 · s1`."""
        plan = self.plan
        devices = [segment.device for segment in self.certificate.segments]
        parts = [" → ".join(device for device, _ in itertools.groupby(devices))]
        if plan.shards is not None:
            parts.append("identical")
        elif plan.accumulation_steps > 1:
            parts.append(f"acc={plan.accumulation_steps}")
        if plan.world_size > 1:
            parts += sync_labels(self.config.sync)
        elif plan.k > 1:
            parts.append(f"k={plan.k}")
        if self.config.sharding.kind is not ShardingKind.none:
            parts.append(self.config.sharding.kind.name)
        if self.config.precision.name is not PrecisionName.fp32:
            parts.append(self.config.precision.name.name)
        return " · ".join([*parts, *self.inputs.varied, f"s{self.config.seed}"])

    @property
    def notes(self) -> tuple[str, ...]:
        """What may surprise about the plan, the history, the recipe or its data, in sentences."""
        notes = notes_on(self.config, self.plan, self.placement)
        if self.history.changed:
            what, step = ", ".join(self.history.changed), f"step {self.history.began_after:,}"
            notes.append(f"changed since {step}, from which the run continues: {what}")
        return (*notes, *self.recipe.notes, *self.facts.notes)

    def with_accumulation_steps(self, accumulation_steps: int) -> Experiment:
        """The same with this number of micro-batches in each worker's step."""
        plan = self.plan.on_workers(self.plan.world_size, accumulation_steps, self.plan.k)
        return dataclasses.replace(self, plan=plan)

    def resumed_after(self, earlier: tuple[Segment, ...], step: int, changed: tuple[str, ...] = ()) -> Experiment:
        """The same for a run that continues after `step`, whose `earlier` segments ended there.

        `changed`: code and libraries that are not as they were then.
        """
        return dataclasses.replace(self, history=History(ended_at(earlier, step), step, changed))

    def trained(self, outcome: Outcome) -> Experiment:
        """The same when its workers have ended."""
        return dataclasses.replace(self, history=dataclasses.replace(self.history, outcome=outcome))


def prepare(
    config: Config, progress: Progress | None = None, varied: tuple[str, ...] = (), typed: tuple[str, ...] = ()
) -> Experiment:
    """Check the settings against data, model and machine, and derive the plan. Raises UserError.

    With `accumulation=fit` it has one micro-batch yet. `progress`: called while data are prepared, which some recipes
    need in order to count rows. `varied`, `typed`: see `Inputs`.
    """
    given = {f"plan.{name}": value for name, value in dataclasses.asdict(config.plan).items()}
    for name, value in (*given.items(), ("measure", config.measure or None), ("hardware", config.hardware.name)):
        require(value is None, name, value, "it is for runner.plan only; leave it out of a run")
    experiment = _planned(_inputs(config, progress, varied, typed))
    every = config.noise.every_steps
    reason = unmeasured_noise(config, experiment.plan, experiment.placement.device_type)
    require(every is None or reason is None, "noise.every_steps", every, reason or "")
    return experiment


def prepare_for_plan(
    config: Config, progress: Progress | None = None, varied: tuple[str, ...] = (), typed: tuple[str, ...] = ()
) -> Experiment:
    """The same, with estimates for data and models that are not here; cannot be trained. Raises UserError."""
    return _planned(_inputs(config, progress, varied, typed, may_be_absent=True))


def prepare_resumed(config: Config, old: Plan, new_accumulation: bool, progress: Progress | None = None) -> Experiment:
    """The experiment of a run that continues: the `old` plan on the workers, and with the synchronisation, of now.

    `new_accumulation`: whether that setting was changed. Raises UserError.
    """
    inputs = _inputs(config, progress)
    return _planned(inputs, continued_plan(old, config, inputs.placement.workers, new_accumulation))


def _planned(inputs: Inputs, plan: Plan | None = None) -> Experiment:
    """`plan`: of a run that continues, None to derive it. Raises UserError."""
    config, placement = inputs.config, inputs.placement
    plan = plan or make_plan(config, inputs.facts.train_samples, placement.workers)
    check_plan(config, plan, placement.device_type)
    return Experiment(inputs, plan)


def _inputs(
    config: Config,
    progress: Progress | None,
    varied: tuple[str, ...] = (),
    typed: tuple[str, ...] = (),
    may_be_absent: bool = False,
) -> Inputs:
    """`may_be_absent`: whether data and model can be missing, so that only a plan can be made. Raises UserError."""
    recipe, placement, absent = _recipe(config), placement_of(config), []
    try:
        recipe.check_model()  # first, since it takes no time, and reading the data may take minutes
    except Unavailable as error:
        if not may_be_absent:
            raise
        absent.append(str(error))
    check_folder("cache_dir", config.cache_dir)
    try:
        facts = recipe.facts(Cache(config.cache_dir, progress))
    except Unavailable as error:
        if not may_be_absent:
            raise
        samples = config.plan.train_samples
        if samples is None:
            raise Unavailable(f"{error}; runner.plan needs only its size, plan.train_samples=N") from error
        absent.append(str(error))
        facts = DataFacts(samples, 0, "not read", f"plan.train_samples={samples}")
    check_metric(config, recipe, facts)
    return Inputs(config, recipe, facts, placement, varied, typed, tuple(dict.fromkeys(absent)))


def _recipe(config: Config) -> Recipe:
    for key in EXPERIMENT_KEYS:
        if config.recipe.get(key) is None:
            raise UserError(f"recipe.{key} has no value: every recipe states {', '.join(EXPERIMENT_KEYS)}")
    name = str(config.recipe["name"])
    ok = name == Path(name).name and name not in (".", "..") and "\\" not in name
    require(ok, "recipe.name", name, "it is the name of a folder; remove the slashes")
    for key in config.recipe["tuned"]:
        if key not in TUNED_KEYS:
            raise UserError(f"there is no setting 'recipe.tuned.{key}'{did_you_mean(key, TUNED_KEYS)}")
    return build_recipe(config.recipe, config.trusted_packages)


def placement_of(config: Config) -> Placement:
    """Where the workers of a configuration run. Raises UserError."""
    devices = local_devices(look_for_tpu=config.device.kind is DeviceKind.tpu)
    placement = place(config.device, external_world_size(), devices, external_local_world_size())
    check_device_serves(config, placement)
    return placement
