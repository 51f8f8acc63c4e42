"""Everything that is known about a run before a worker starts. Creates no folder and trains nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from runner.backends.machine import library_versions, local_devices
from runner.config.choices import AccumulationMode, DeviceKind, Goal, PrecisionName, SyncPolicyName, SyncSchedule
from runner.config.environment import external_local_world_size, external_world_size
from runner.config.instantiate import EXPERIMENT_KEYS, TUNED_KEYS, build_recipe
from runner.config.plain import to_plain
from runner.config.schema import Accumulation, Config, Precision, Sync
from runner.data.cache import Cache
from runner.data.recipe import DataFacts, Recipe
from runner.errors import Unavailable, UserError, did_you_mean, require
from runner.folder.files import check_folder
from runner.plan import Plan, make_plan
from runner.plan.certificate import Certificate, RunSetup, certify
from runner.plan.describe_sync import sync_labels
from runner.plan.placement import Placement, check_device_serves, place
from runner.plan.sync_steps import sync_steps


@dataclass(frozen=True)
class Experiment:
    """`absent`: a sentence for each missing data set or model of an experiment that was only planned."""

    config: Config
    recipe: Recipe
    facts: DataFacts
    placement: Placement
    setup: RunSetup
    certificate: Certificate
    absent: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.setup.plan

    @property
    def setup_digest(self) -> str:
        """Equal for runs that differ only in the seed and in where they are logged and cached."""
        excluded = ("seed", "log_every", "tracking", "cache_dir", "plan")
        config = {key: value for key, value in to_plain(self.config).items() if key not in excluded}
        content = json.dumps([config, self.placement.label, self.facts.digest], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def one_worker(self) -> RunSetup:
        """This run on one worker without accumulation, in this run's precision: the reference for its speed."""
        return dataclasses.replace(self.setup, plan=baseline_plan(self.config, self.plan), rehearsed=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about the plan, the recipe or its data, in sentences."""
        plan = self.plan
        setting = "batch.micro_batch" if self.config.batch.global_batch is None else "batch.global_batch"
        cut = (
            f"a global batch of {plan.global_batch:,} is more than the {plan.samples_per_epoch:,} training samples: "
            f"each step trains on all of them; use a smaller {setting}"
        )
        return (*([cut] if plan.cut_short else []), *self.recipe.notes, *self.facts.notes)

    @property
    def setup_name(self) -> str:
        """The settings that differ from the defaults, and the seed: `cpu4 · k=4 · bf16 · s1`."""
        plan = self.plan
        parts = [self.placement.label]
        if plan.accumulation_steps > 1:
            parts.append(f"acc={plan.accumulation_steps}")
        if plan.world_size > 1:
            parts += sync_labels(self.config.sync)
        elif plan.k > 1:
            parts.append(f"k={plan.k}")
        if self.config.precision.name is not PrecisionName.fp32:
            parts.append(self.config.precision.name.name)
        return " · ".join([*parts, f"s{self.config.seed}"])


def prepare(config: Config) -> Experiment:
    """Check the settings against data, model and machine, and derive the plan. Raises UserError."""
    given = config.plan.train_samples
    require(given is None, "plan.train_samples", given, "it is for runner.plan only; leave it out of a run")
    recipe, placement = _recipe(config), _placement(config)
    facts = recipe.facts(_cache(config))
    recipe.check_model()
    return _experiment(config, recipe, placement, facts)


def foresee(config: Config) -> Experiment:
    """The same, with estimates for data and models that are not here; cannot be trained. Raises UserError."""
    recipe, placement = _recipe(config), _placement(config)
    absent: list[str] = []
    try:
        facts = recipe.facts(_cache(config))
    except Unavailable as error:
        given = config.plan.train_samples
        if given is None:
            raise Unavailable(f"{error}; runner.plan needs only its size, plan.train_samples=N") from error
        absent.append(str(error))
        facts = DataFacts(given, 0, "not read", f"plan.train_samples={given}")
    try:
        recipe.check_model()
    except Unavailable as error:
        absent.append(str(error))
    return _experiment(config, recipe, placement, facts, tuple(dict.fromkeys(absent)))


def _cache(config: Config) -> Cache:
    check_folder("cache_dir", config.cache_dir)
    return Cache(config.cache_dir)


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


def _placement(config: Config) -> Placement:
    devices = local_devices(look_for_tpu=config.device.kind is DeviceKind.tpu)
    placement = place(config.device, external_world_size(), devices, external_local_world_size())
    check_device_serves(config, placement)
    return placement


def _experiment(
    config: Config, recipe: Recipe, placement: Placement, facts: DataFacts, absent: tuple[str, ...] = ()
) -> Experiment:
    _check_metric(config, recipe, facts)
    plan = plan_for(config, facts.train_samples, placement.workers)
    _check_sync(config, plan)
    setup = RunSetup(
        config=config,
        plan=plan,
        data=facts.digest,
        has_dropout=recipe.has_dropout,
        device_type=placement.device_type,
        rehearsed=placement.rehearsed,
        versions=library_versions(placement.device_type),
    )
    return Experiment(config, recipe, facts, placement, setup, certify(setup, baseline_of(setup)), absent)


def _check_metric(config: Config, recipe: Recipe, facts: DataFacts) -> None:
    metric, names = config.evaluation.metric, recipe.metrics_of(facts)
    if metric not in names:
        raise UserError(
            f"evaluation.metric={metric} is not computed by recipe={config.recipe['name']} for these data"
            f"{did_you_mean(metric, names)}"
        )
    goal = Goal.min if metric in recipe.minimised else Goal.max
    rule = f"use evaluation.goal={goal.name} for evaluation.metric={metric}"
    require(config.evaluation.goal is goal, "evaluation.goal", config.evaluation.goal, rule)


def _check_sync(config: Config, plan: Plan) -> None:
    """Check k against the length of the run and the interval of evaluations. Raises UserError."""
    if plan.world_size == 1:
        return
    steps = plan.optimizer_steps
    rule = f"this run has {steps} optimizer steps and would never synchronise: use sync.k={steps} or less"
    require(plan.k <= steps, "sync.k", plan.k, rule)
    first_local = sync_steps(plan, config.sync, config.schedule).first_local
    local = steps - first_local
    if first_local and local:
        rule = (
            f"sync.schedule=post_local leaves {local} local steps: use sync.k={local} or less, "
            "or a smaller sync.synchronous_share"
        )
        require(plan.k <= local, "sync.k", plan.k, rule)
    every = config.evaluation.every_steps
    if every is not None and config.sync.schedule is SyncSchedule.constant:
        below = every // plan.k * plan.k
        near = " or ".join(str(size) for size in (below, below + plan.k) if size)
        rule = (
            f"replicas are equal only right after a synchronisation: use a multiple of sync.k={plan.k}, such as {near}"
        )
        require(every % plan.k == 0, "evaluation.every_steps", every, rule)


def plan_for(config: Config, samples: int, workers: int) -> Plan:
    """The plan of a configuration for `samples` training samples on `workers` workers."""
    return make_plan(
        samples_per_epoch=samples,
        world_size=workers,
        global_batch=config.batch.global_batch,
        micro_batch=config.batch.micro_batch,
        accumulation_steps=config.accumulation.steps,
        max_micro_batch=config.accumulation.max_micro_batch,
        drop_last=config.batch.drop_last,
        k=config.sync.k,
        base_lr=config.optimizer.lr,
        scaling_rule=config.scaling.rule.name,
        scaling_batch=config.scaling.batch.name,
        reference_batch=config.scaling.reference_batch,
        epochs=config.epochs,
        max_steps=config.max_steps,
        warmup_share=config.schedule.warmup_share,
    )


def baseline_plan(config: Config, plan: Plan) -> Plan:
    """One synchronous worker without accumulation; the global batch is kept, or under `per_device` the micro-batch.

    If `max_steps` ends the run early, the baseline ends after as many samples.
    """
    one_worker = dataclasses.replace(
        config,
        accumulation=Accumulation(AccumulationMode.fixed, steps=1),
        sync=Sync(SyncPolicyName.periodic, k=1),
        max_steps=None,
    )
    whole = plan_for(one_worker, plan.samples_per_epoch, 1)
    if config.max_steps is None:
        return whole
    max_steps = whole.steps_for(plan.total_samples)
    return plan_for(dataclasses.replace(one_worker, max_steps=max_steps), plan.samples_per_epoch, 1)


def baseline_of(setup: RunSetup) -> RunSetup:
    """One fp32 worker with the same recipe and seed, on the same kind of device.

    Its batch is no larger than the training data: nobody would run it with a larger one.
    """
    batch, samples = setup.config.batch, setup.plan.samples_per_epoch
    sizes = {name: getattr(batch, name) for name in ("global_batch", "micro_batch")}
    within = {name: min(size, samples) for name, size in sizes.items() if size is not None}
    config = dataclasses.replace(
        setup.config,
        batch=dataclasses.replace(batch, **within),
        precision=Precision(PrecisionName.fp32),
        compile=False,
        gradient_checkpointing=False,
    )
    return dataclasses.replace(setup, config=config, plan=baseline_plan(config, setup.plan), rehearsed=False)
