"""Everything that is known about a run before a worker starts. Creates no folder and trains nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.backends.machine import available_cores, library_versions, local_devices, processor
from runner.config.choices import (
    AccumulationMode,
    BatchMode,
    Compress,
    DeviceKind,
    Goal,
    OptimizerName,
    PrecisionName,
    ScalingBatch,
    ScalingRule,
    ScalingWeightDecay,
    ShardingKind,
    SyncPolicyName,
    SyncSchedule,
)
from runner.config.environment import external_local_world_size, external_world_size
from runner.config.instantiate import EXPERIMENT_KEYS, TUNED_KEYS, build_recipe
from runner.config.plain import to_plain
from runner.config.schema import (
    REMOVED_SYNC_SETTINGS,
    SETUP_DIGEST_EXCLUDES,
    Accumulation,
    Config,
    Precision,
    Sharding,
    Sync,
)
from runner.data.cache import Cache, Progress
from runner.data.recipe import DataFacts, Recipe
from runner.errors import Unavailable, UserError, did_you_mean, require
from runner.folder.files import check_folder
from runner.plan import Plan, make_plan
from runner.plan.certificate import Certificate, RunSetup, Segment, certify, ended_at, with_segments
from runner.plan.describe_sync import sync_labels, sync_name
from runner.plan.placement import Placement, check_device_serves, place
from runner.plan.scaling_range import scaling_warning
from runner.plan.schedule import schedule_warning
from runner.plan.sync_steps import sync_steps


@dataclass(frozen=True)
class Experiment:
    """`absent`: a sentence for each missing data set or model of an experiment that was only planned.

    `varied`, `typed`: the settings that its sweep varies, and others that were typed, for names: `lr=5e-05`.
    `began_after`: the optimizer step of the checkpoint that it continues from, 0 without one. `changed`: code and
    libraries that are not those of that checkpoint.
    """

    config: Config
    recipe: Recipe
    facts: DataFacts
    placement: Placement
    setup: RunSetup
    certificate: Certificate
    absent: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    began_after: int = 0
    changed: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.setup.plan

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
        config["sync"] |= REMOVED_SYNC_SETTINGS
        config["equivalence"] = {key: value for key, value in config["equivalence"].items() if value is not None}
        if config["scaling"]["weight_decay"] == ScalingWeightDecay.fixed.name:  # older runs do not have it
            del config["scaling"]["weight_decay"]
        data = config["recipe"].get("data")
        if isinstance(data, dict) and data.get("eval_share") is None:  # the same
            config["recipe"] = {**config["recipe"], "data": {k: v for k, v in data.items() if k != "eval_share"}}
        config["device"] = {**config["device"], "file": None}  # what it says is among the other settings
        content = json.dumps([config, self.placement.label, self.facts.digest, *parts], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def one_worker(self) -> RunSetup:
        """This run on one worker without accumulation, in this run's precision: the reference for its speed."""
        config = dataclasses.replace(self.config, sharding=Sharding())
        return dataclasses.replace(self.setup, config=config, plan=baseline_plan(config, self.plan), rehearsed=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What may surprise about the plan, the recipe or its data, in sentences."""
        plan, limit = self.plan, self.config.max_steps
        notes = []
        if plan.cut_short:
            setting = "batch.micro_batch" if self.config.batch.global_batch is None else "batch.global_batch"
            notes.append(
                f"a global batch of {plan.global_batch:,} is more than the {plan.samples_per_epoch:,} training "
                f"samples: each step trains on all of them; use a smaller {setting}"
            )
        if limit is not None and limit > plan.whole_steps:
            epochs = f"{plan.epochs} epoch{'s' * (plan.epochs > 1)}"
            notes.append(
                f"max_steps={limit} has no effect, since {epochs} end after {plan.optimizer_steps:,} steps: for more, "
                "raise epochs"
            )
        if self.config.profile.steps is not None:
            first = self.config.profile.skip + 1
            steps = f"steps {first:,} to {first + self.config.profile.steps - 1:,} are profiled, and slower for it"
            notes.append(f"{steps}: profile/worker-0.json.gz opens in ui.perfetto.dev")
        asked = self.config.accumulation.steps
        if plan.shards is not None and asked is not None and 1 < asked < plan.accumulation_steps:
            shards = f"under equivalence=identical a worker computes its {plan.accumulation_steps} shards one by one"
            notes.append(f"accumulation.steps={asked} has no effect: {shards}")
        threads, cores = self.config.equivalence.threads, available_cores()
        if threads is not None and self.setup.device_type == "cpu" and threads * self.placement.local_workers < cores:
            used = threads * self.placement.local_workers
            notes.append(
                f"equivalence.threads={threads} uses {used} of {cores} cores: more workers give the same bits sooner"
            )
        reason = unmeasured_noise(self.config, plan, self.setup.device_type)
        if self.config.noise.every_steps is not None and reason is not None:  # on other workers, or for lack of memory
            notes.append(f"the noise of the gradient is not measured: {reason}")
        for warning in (scaling_warning(self.config, plan), schedule_warning(plan, self.config.schedule)):
            if warning is not None:
                notes.append(warning)
        if plan.world_size == 1 and plan.k > 1 and self.config.sync.policy is SyncPolicyName.periodic:
            notes.append(f"sync.k={plan.k} has no effect with one worker: there is nothing to average")
        if self.changed:
            what, step = ", ".join(self.changed), f"step {self.began_after:,}"
            notes.append(f"changed since {step}, from which the run continues: {what}")
        return (*notes, *self.recipe.notes, *self.facts.notes)

    def resumed_after(self, earlier: tuple[Segment, ...], step: int) -> Experiment:
        """The same for a run that continues after `step`, whose `earlier` segments ended there."""
        now = dataclasses.replace(self.certificate.segments[-1], after_step=step)
        certificate = with_segments(self.certificate, (*ended_at(earlier, step), now))
        return dataclasses.replace(self, certificate=certificate, began_after=step)

    def with_accumulation_steps(self, accumulation_steps: int) -> Experiment:
        """The same experiment, from its first step, with this number of micro-batches in each worker's step."""
        plan = self.plan.on_workers(self.plan.world_size, accumulation_steps, self.plan.k)
        other = _experiment(self.config, self.recipe, self.placement, self.facts, self.absent, plan)
        kept = {name: getattr(self, name) for name in ("varied", "typed", "began_after", "changed")}
        return dataclasses.replace(other, **kept)

    def after_changes(self, changed: tuple[str, ...]) -> Experiment:
        """The same with what has changed since the checkpoint that it continues from."""
        *earlier, now = self.certificate.segments
        certificate = with_segments(self.certificate, (*earlier, now.after_changes(changed)))
        return dataclasses.replace(self, certificate=certificate, changed=changed)

    @property
    def setup_name(self) -> str:
        """How the experiment is executed, what its sweep varies, and the seed: `cpu4 · k=4 · bf16 · lr=5e-05 · s1`."""
        plan = self.plan
        devices = [segment.device for segment in self.certificate.segments] or [self.placement.label]
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
        return " · ".join([*parts, *self.varied, f"s{self.config.seed}"])


def prepare(
    config: Config, progress: Progress | None = None, varied: tuple[str, ...] = (), typed: tuple[str, ...] = ()
) -> Experiment:
    """Check the settings against data, model and machine, and derive the plan. Raises UserError.

    With `accumulation=fit` it has one micro-batch yet. `progress`: called while data are tokenised, which some recipes
    need in order to count rows. `varied`, `typed`: see `Experiment`.
    """
    for name, given, default in (
        ("plan.train_samples", config.plan.train_samples, None),
        ("plan.price_per_hour", config.plan.price_per_hour, None),
        ("plan.csv", config.plan.csv, None),
        ("plan.plot", config.plan.plot, None),
        ("plan.scale", config.plan.scale, None),
        ("plan.parameters", config.plan.parameters, None),
        ("plan.tokens", config.plan.tokens, None),
        ("measure", config.measure, False),
        ("hardware", config.hardware.name, None),
    ):
        require(given is default, name, given, "it is for runner.plan only; leave it out of a run")
    recipe, placement = _recipe(config), placement_of(config)
    recipe.check_model()  # first, since it takes no time, and reading the data may take minutes
    facts = recipe.facts(_cache(config, progress))
    experiment = dataclasses.replace(_experiment(config, recipe, placement, facts), varied=varied, typed=typed)
    every = config.noise.every_steps
    reason = unmeasured_noise(config, experiment.plan, placement.device_type)
    require(every is None or reason is None, "noise.every_steps", every, reason or "")
    return experiment


def prepare_resumed(config: Config, old: Plan, new_accumulation: bool, progress: Progress | None = None) -> Experiment:
    """The experiment of a run that continues: the `old` plan on the workers, and with the synchronisation, of now.

    `new_accumulation`: whether that setting was changed. Raises UserError.
    """
    recipe, placement = _recipe(config), placement_of(config)
    recipe.check_model()  # first, since it takes no time, and reading the data may take minutes
    facts = recipe.facts(_cache(config, progress))
    workers, rule = placement.workers, f"use at most {old.global_batch}, the samples of the run's global batch"
    require(workers <= old.global_batch, "device.workers", workers, rule)
    rule = f"use at most {old.shards}, the run's equivalence.shards"
    require(old.shards is None or workers <= old.shards, "device.workers", workers, rule)
    plan = old.on_workers(workers, _accumulation(config, old, workers, new_accumulation), config.sync.k)
    return _experiment(config, recipe, placement, facts, plan=plan)


def _accumulation(config: Config, old: Plan, workers: int, changed: bool) -> int:
    """Micro-batches per optimizer step of each worker that continues a run. What limited the micro-batch still does."""
    if old.shards is not None:
        rule = "with equivalence=identical micro-batches are the shards, which the run has; leave it out"
        require(not changed, "accumulation", config.accumulation.mode, rule)
    if workers == old.world_size and not changed:
        return old.accumulation_steps
    replica_batch, limit = -(-old.global_batch // workers), config.accumulation.max_micro_batch
    if config.batch.mode is BatchMode.per_device and not changed:
        limit = config.batch.micro_batch
    if config.accumulation.mode is AccumulationMode.fit:
        limit = replica_batch if changed else old.micro_batch
    if limit is not None:
        return -(-replica_batch // limit)
    assert config.accumulation.steps is not None
    return min(config.accumulation.steps, replica_batch)


def prepare_for_plan(config: Config, progress: Progress | None = None) -> Experiment:
    """The same, with estimates for data and models that are not here; cannot be trained. Raises UserError."""
    recipe, placement = _recipe(config), placement_of(config)
    absent: list[str] = []
    try:
        recipe.check_model()
    except Unavailable as error:
        absent.append(str(error))
    try:
        facts = recipe.facts(_cache(config, progress))
    except Unavailable as error:
        given = config.plan.train_samples
        if given is None:
            raise Unavailable(f"{error}; runner.plan needs only its size, plan.train_samples=N") from error
        absent.append(str(error))
        facts = DataFacts(given, 0, "not read", f"plan.train_samples={given}")
    return _experiment(config, recipe, placement, facts, tuple(dict.fromkeys(absent)))


def _cache(config: Config, progress: Progress | None) -> Cache:
    check_folder("cache_dir", config.cache_dir)
    return Cache(config.cache_dir, progress)


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


def _experiment(
    config: Config,
    recipe: Recipe,
    placement: Placement,
    facts: DataFacts,
    absent: tuple[str, ...] = (),
    plan: Plan | None = None,
) -> Experiment:
    """`plan`: of a run that is resumed, None to derive it."""
    _check_metric(config, recipe, facts)
    plan = plan or make_plan(config, facts.train_samples, placement.workers)
    _check_sharding(config)
    _check_sync(config, plan, placement.device_type)
    _check_scaling(config, plan)
    check_profile(config, plan)
    setup = RunSetup(
        config=config,
        plan=plan,
        data=facts.digest,
        has_dropout=recipe.has_dropout or config.adapter.dropout > 0,
        device_type=placement.device_type,
        rehearsed=placement.rehearsed,
        versions=library_versions(placement.device_type),
        processor=processor(placement.device_type) if config.equivalence.is_identical else "any",
    )
    certificate = certify(setup, baseline_of(setup))
    segment = Segment(
        after_step=0,
        until_step=None,
        device=placement.label,
        workers=plan.world_size,
        accumulation_steps=plan.accumulation_steps,
        precision=config.precision.name.name,
        sync=sync_name(config.sync),
        level=certificate.level,
        differs=tuple(item.name for item in certificate.properties if not item.equal),
    )
    certificate = with_segments(certificate, (segment,))
    return Experiment(config, recipe, facts, placement, setup, certificate, absent)


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


def _check_sharding(config: Config) -> None:
    """Refuse what cannot train sharded weights. Raises UserError."""
    kind = config.sharding.kind
    if kind is ShardingKind.none:
        return
    rule = f"no worker has all weights to train on alone with sharding={kind.name}: use sync.k=1"
    require(config.sync.always_synchronous, "sync.k", config.sync.k, rule)
    rule = f"its factors of whole matrices cannot be sharded by sharding={kind.name}: use optimizer=adamw"
    name = config.optimizer.name
    require(name is not OptimizerName.adafactor, "optimizer", name, rule)


def _check_scaling(config: Config, plan: Plan) -> None:
    """Refuse rules for the moving averages of the global batch where workers step alone. Raises UserError."""
    rule, local_steps = config.scaling.rule, plan.world_size > 1 and not config.sync.always_synchronous
    of_averages = rule in (ScalingRule.sde, ScalingRule.half_life, ScalingRule.half_life_sqrt)
    ok = not (of_averages and local_steps and config.scaling.batch is ScalingBatch.global_batch)
    alone = "between synchronisations workers make steps of their own batch: use scaling.batch=replica_batch"
    require(ok, "scaling", rule, f"{alone}, or scaling=auto")


def unmeasured_noise(config: Config, plan: Plan, device_type: str) -> str | None:
    """Why the noise of gradients cannot be measured, and what to do; None if it can."""
    sync = config.sync
    local = plan.world_size > 1 and not sync.always_synchronous
    alone = plan.world_size * plan.accumulation_steps > 1
    rules = (
        (alone, "it compares two gradients, and one worker has only one: use accumulation.steps=2, or more workers"),
        (
            local or plan.accumulation_steps == 1 or not config.batch.length_sorted,
            "micro-batches of sorted lengths are not samples of the batch: add batch.length_sorted=false",
        ),
        (config.sharding.kind is ShardingKind.none, "no worker has a whole gradient with sharding: use sharding=none"),
        (plan.shards is None, "equivalence=identical adds gradients in its own way: use equivalence=exact"),
        (device_type != "xla", "it was not made for torch_xla: use CPUs or GPUs"),
        (
            sync.policy is not SyncPolicyName.gradients or not local,
            "sync=gradients never makes replicas equal: use another policy",
        ),
    )
    return next((rule for ok, rule in rules if not ok), None)


def check_profile(config: Config, plan: Plan, done: int = 0) -> None:
    """Refuse to profile steps that do not come. `done`: steps before the command. Raises UserError."""
    steps, skip, ahead = config.profile.steps, config.profile.skip, plan.optimizer_steps - done
    rule = f"after profile.skip={skip} the run has {max(ahead - skip, 0)} optimizer steps: use fewer of both"
    require(steps is None or skip + steps <= ahead, "profile.steps", steps, rule)


def _check_sync(config: Config, plan: Plan, device_type: str) -> None:
    """Check the policy against the length of the run, the interval of evaluations and the device. Raises UserError."""
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
    if config.sync.compress is Compress.int8:
        rule = "it needs the collectives of torch.distributed, which torch_xla does not have: use bf16"
        require(device_type != "xla", "sync.compress", config.sync.compress, rule)
        on_cpu = device_type == "cpu"
        rule = "int8 is exchanged by a thread, which was only made for CPUs: use bf16, or sync.overlap=false"
        require(on_cpu or not config.sync.overlap, "sync.compress", config.sync.compress, rule)
    every = config.evaluation.every_steps
    if every is not None and config.sync.schedule is SyncSchedule.constant:
        below = every // plan.k * plan.k
        near = " or ".join(str(size) for size in (below, below + plan.k) if size)
        rule = (
            f"replicas are equal only right after a synchronisation: use a multiple of sync.k={plan.k}, such as {near}"
        )
        require(every % plan.k == 0, "evaluation.every_steps", every, rule)


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
    whole = make_plan(one_worker, plan.samples_per_epoch, 1)
    if config.max_steps is None:
        return whole
    max_steps = whole.steps_for(plan.total_samples)
    return make_plan(dataclasses.replace(one_worker, max_steps=max_steps), plan.samples_per_epoch, 1)


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
        sharding=Sharding(),
    )
    return dataclasses.replace(setup, config=config, plan=baseline_plan(config, setup.plan), rehearsed=False)
