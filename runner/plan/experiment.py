"""From settings to everything that is known before a worker starts. Makes no folder and trains nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from runner.backends.versions import library_versions
from runner.config.choices import BatchMode, Goal, PrecisionName, SyncSchedule
from runner.config.environment import external_world_size
from runner.config.instantiate import EXPERIMENT_KEYS, TUNED_KEYS, build_recipe
from runner.config.plain import to_plain
from runner.config.schema import Config, Precision
from runner.data.cache import Cache
from runner.data.recipe import DataFacts, Recipe
from runner.errors import Unavailable, UserError, did_you_mean, require
from runner.plan import Plan, make_plan
from runner.plan.certificate import Certificate, Setup, certify
from runner.plan.placement import Placement, check_device_serves, place
from runner.plan.sync_steps import sync_steps
from runner.plan.sync_words import sync_words


@dataclass(frozen=True)
class Experiment:
    """`absent`: why data or weights are not here, a sentence each, of an experiment that is only foreseen."""

    config: Config
    recipe: Recipe
    facts: DataFacts
    placement: Placement
    setup: Setup
    certificate: Certificate
    absent: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.setup.plan

    @property
    def setup_digest(self) -> str:
        """Equal for runs that differ in nothing but the seed and in where they are logged and cached."""
        apart = ("seed", "tracking", "cache_dir", "plan")
        config = {key: value for key, value in to_plain(self.config).items() if key not in apart}
        content = json.dumps([config, self.placement.label, self.facts.digest], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def one_worker(self) -> Setup:
        """The same on one worker without accumulation, which speed is measured by: the precision is this run's own."""
        return dataclasses.replace(self.setup, plan=baseline_plan(self.config, self.plan), rehearsed=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the recipe has to say about itself, in sentences."""
        return tuple(self.recipe.notes)

    @property
    def setup_name(self) -> str:
        """The setup in a few words: `cpu4 · k=4 · bf16 · s1`. What is as usual is left out."""
        plan = self.plan
        parts = [self.placement.label]
        if plan.accumulation_steps > 1:
            parts.append(f"acc={plan.accumulation_steps}")
        if plan.world_size > 1:
            parts += sync_words(self.config.sync)
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
    facts = _facts_of(config)
    recipe.check_model()
    return _experiment(config, recipe, placement, facts)


def foresee(config: Config) -> Experiment:
    """The same with what is known of data and models that are not here; cannot be trained. Raises UserError."""
    recipe, placement = _recipe(config), _placement(config)
    absent: list[str] = []
    try:
        facts = _facts_of(config)
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


def _recipe(config: Config) -> Recipe:
    for key in EXPERIMENT_KEYS:
        if config.recipe.get(key) is None:
            raise UserError(f"recipe.{key} has no value: every recipe states {', '.join(EXPERIMENT_KEYS)}")
    name = str(config.recipe["name"])
    ok = name == Path(name).name and name not in (".", "..") and "\\" not in name
    require(ok, "recipe.name", name, "it names the folder of the recipe's runs: leave slashes out")
    for key in config.recipe["tuned"]:
        if key not in TUNED_KEYS:
            raise UserError(f"there is no setting 'recipe.tuned.{key}'{did_you_mean(key, TUNED_KEYS)}")
    return build_recipe(config.recipe, config.trusted_packages)


def _placement(config: Config) -> Placement:
    placement = place(config.device, external_world_size())
    check_device_serves(config, placement)
    return placement


def _experiment(
    config: Config, recipe: Recipe, placement: Placement, facts: DataFacts, absent: tuple[str, ...] = ()
) -> Experiment:
    metric = config.evaluation.metric
    if metric not in recipe.metric_names:
        raise UserError(
            f"evaluation.metric={metric} is not computed by recipe={config.recipe['name']}"
            f"{did_you_mean(metric, recipe.metric_names)}"
        )
    lower_is_better = metric in recipe.minimised
    if lower_is_better != (config.evaluation.goal is Goal.min):
        raise UserError(
            f"evaluation.goal={config.evaluation.goal.name} is wrong for evaluation.metric={metric}: "
            f"set evaluation.goal={'min' if lower_is_better else 'max'}"
        )
    plan = plan_for(config, facts.train_samples, placement.workers)
    check_local_phases(config, plan)
    setup = Setup(
        config=config,
        plan=plan,
        data=facts.digest,
        has_dropout=recipe.has_dropout,
        device_type=placement.device_type,
        rehearsed=placement.rehearsed,
        versions=library_versions(placement.device_type),
    )
    return Experiment(config, recipe, facts, placement, setup, certify(setup, _baseline(setup)), absent)


def check_local_phases(config: Config, plan: Plan) -> None:
    """Refuse what the plan's numbers leave no room for between synchronisations. Raises UserError."""
    every = config.evaluation.every_steps
    if plan.world_size == 1:
        return
    if plan.k > plan.optimizer_steps:
        raise UserError(
            f"sync.k={plan.k} is more than the {plan.optimizer_steps} optimizer steps of this run, whose workers would "
            f"never meet before its end: set sync.k={plan.optimizer_steps} or less"
        )
    steps = sync_steps(plan, config.sync, config.schedule)
    local = plan.optimizer_steps - steps.first_local
    if steps.first_local and 0 < local < plan.k:
        raise UserError(
            f"sync.k={plan.k} is more than the {local} optimizer steps that sync.schedule=post_local leaves to local "
            f"phases: set sync.k={local} or less, or a smaller sync.synchronous_share"
        )
    if every is not None and every % plan.k and config.sync.schedule is SyncSchedule.constant:
        below = every // plan.k * plan.k
        near = [size for size in (below, below + plan.k) if size]
        raise UserError(
            f"evaluation.every_steps={every} is no multiple of sync.k={plan.k}, and "
            f"replicas are equal only right after a synchronisation: use {' or '.join(map(str, near))}"
        )


def _facts_of(config: Config) -> DataFacts:
    return _facts(json.dumps(config.recipe, sort_keys=True), tuple(config.trusted_packages), config.cache_dir)


@lru_cache(maxsize=8)
def _facts(recipe: str, trusted_packages: tuple[str, ...], cache_dir: str) -> DataFacts:
    # The preflight and the job ask for the same facts, and so do all jobs of a sweep: read the data once.
    return build_recipe(json.loads(recipe), trusted_packages).facts(Cache(cache_dir))


def plan_for(config: Config, samples: int, workers: int) -> Plan:
    """The plan of a configuration on `workers` workers."""
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
    """One worker, no accumulation, every step synchronous; the global batch held, or the micro-batch per device.

    A run cut short by `max_steps` is compared with a baseline that is cut short where it has seen as many samples.
    """
    per_device = config.batch.mode is BatchMode.per_device

    def one_worker(max_steps: int | None) -> Plan:
        return make_plan(
            samples_per_epoch=plan.samples_per_epoch,
            world_size=1,
            global_batch=None if per_device else plan.global_batch,
            micro_batch=plan.micro_batch if per_device else None,
            accumulation_steps=1,
            max_micro_batch=None,
            drop_last=plan.drop_last,
            k=1,
            base_lr=plan.base_lr,
            scaling_rule=config.scaling.rule.name,
            scaling_batch=config.scaling.batch.name,
            reference_batch=plan.reference_batch,
            epochs=plan.epochs,
            max_steps=max_steps,
            warmup_share=config.schedule.warmup_share,
        )

    whole = one_worker(None)
    return whole if config.max_steps is None else one_worker(whole.steps_for(plan.total_samples))


def _baseline(setup: Setup) -> Setup:
    """One fp32 worker with the same recipe and seed, on a device of the same kind."""
    config = dataclasses.replace(
        setup.config, precision=Precision(PrecisionName.fp32), compile=False, gradient_checkpointing=False
    )
    return dataclasses.replace(setup, config=config, plan=baseline_plan(setup.config, setup.plan), rehearsed=False)
