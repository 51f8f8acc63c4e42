"""What a run claims, and whether it follows from what the bundle has: arithmetic only, without data or weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runner.config.choices import AccumulationMode, ScalingRule
from runner.config.compose import compose, settings
from runner.config.schema import Accumulation, Config
from runner.errors import UserError, first_line
from runner.folder.metrics_log import MetricsReader
from runner.folder.reading import read_json
from runner.folder.record import FILE_NAME as SUMMARY
from runner.folder.record import RunRecord
from runner.plan import Plan, make_plan
from runner.plan.baseline import RunSetup, baseline_of
from runner.plan.certificate import certify, worst_level
from runner.plan.order import DataOrder
from runner.plan.schedule import lr_multiplier
from runner.run.earlier import plan_of_run, saved_settings
from runner.train.ledger import digest_of_epochs, merge

VERIFIED, DIFFERENT, CLAIMED = "verified", "different", "only claimed"

#: Of two computations of the same formula in float64.
_TOLERANCE = 1e-12
#: Properties of a certificate that the settings do not give: the data's digest is part of the first one.
_NOT_IN_SETTINGS = ("recipe", "versions", "processor")


@dataclass(frozen=True)
class Finding:
    """Whether a claim holds. `outcome`: verified, different or only claimed; `why`: in words."""

    claim: str
    outcome: str
    why: str


@dataclass(frozen=True)
class Recorded:
    """What the files of a run say."""

    folder: Path
    config: Config
    plan: Plan
    certificate: Mapping[str, Any]
    ledger: Mapping[str, Any]
    record: RunRecord
    #: Optimizer steps, and the samples of an epoch, as claimed.
    steps: int
    train_samples: int
    #: Logged values by metric and step.
    metrics: Mapping[str, Mapping[int, float]] = field(repr=False)

    @staticmethod
    def read(folder: Path) -> Recorded:
        """Raises UserError. No code that the settings name is run."""
        saved, _ = saved_settings(folder)
        record = RunRecord.read(folder)
        steps = None if record is None else record.result.optimizer_steps
        train_samples = None if record is None else record.data.train_samples
        if record is None or steps is None or train_samples is None:
            raise UserError(f"{folder / SUMMARY} does not say what a finished run says: restore it")
        metrics: dict[str, dict[int, float]] = {}
        for metric in MetricsReader(folder).read():
            metrics.setdefault(metric.key, {})[metric.step] = metric.value
        return Recorded(
            folder=folder,
            config=settings(compose([], (), saved)),
            plan=plan_of_run(folder, refuse_changed=False),
            certificate=read_json(folder / "certificate.json"),
            ledger=read_json(folder / "ledger.json"),
            record=record,
            steps=steps,
            train_samples=train_samples,
            metrics=metrics,
        )

    @property
    def segments(self) -> Sequence[Mapping[str, Any]]:
        """The parts of the run on one set of workers each."""
        found: Sequence[Mapping[str, Any]] = self.certificate["segments"]
        return found

    @property
    def resumed(self) -> bool:
        return len(self.segments) > 1

    @property
    def data_digest(self) -> str | None:
        """The first digits of the digest over every text and label."""
        path = self.folder / "tracking.json"
        dataset = read_json(path).get("dataset") if path.exists() else None
        return None if dataset is None else str(dataset["digest"])


def arithmetic(run: Recorded) -> Iterator[Finding]:
    """Recompute what follows from the settings, the size of the data and the seed."""
    yield _plan(run)
    yield _certificate(run)
    yield _ledger(run)
    yield _learning_rates(run)
    yield _result(run)


def never_verified(run: Recorded) -> Iterator[Finding]:
    """What the run has recorded, and nobody can compute again."""
    path = run.folder / "environment.json"
    if path.exists():
        found = read_json(path, list)[-1]
        packages = found["packages"]
        commit = f", commit {found['commit'][:12]} of the runner" if found["commit"] else ""
        why = f"python {found['python']}, torch {packages.get('torch')}, {len(packages)} packages{commit}"
        yield Finding("environment", CLAIMED, why)
    speed = run.record.result.samples_per_s
    shown = f"{speed:,.0f} {run.ledger['unit']}/s" if speed else "too short to measure"
    yield Finding("speed", CLAIMED, f"{shown}, on {run.record.result.machine}")


def _plan(run: Recorded) -> Finding:
    samples, first = run.train_samples, run.segments[0]
    last = run.segments[-1]
    given = run.config
    # The settings of a resumed run are those of its last part, and `fit` was decided by the machine's memory.
    if run.resumed or given.accumulation.mode is AccumulationMode.fit:
        steps = Accumulation(AccumulationMode.fixed, steps=first["accumulation_steps"])
        given = dataclasses.replace(given, accumulation=steps)
    if run.resumed and run.plan.auto_rule is not None:
        # `auto` was decided at the start of the run, whose synchronisation may have changed since.
        rule = ScalingRule.__members__.get(run.plan.auto_rule, given.scaling.rule)
        given = dataclasses.replace(given, scaling=dataclasses.replace(given.scaling, rule=rule))
    try:
        plan = make_plan(given, samples, first["workers"])
    except UserError as error:
        return Finding("plan", DIFFERENT, f"the settings give none ({first_line(error)})")
    if run.resumed:
        plan = dataclasses.replace(plan, auto_rule=run.plan.auto_rule)
        plan = plan.on_workers(last["workers"], last["accumulation_steps"], run.config.sync.k)
    expected, found = dataclasses.asdict(plan), dataclasses.asdict(run.plan)
    wrong = [name for name in expected if not _same(found[name], expected[name])]
    if wrong:
        name = wrong[0]
        return Finding("plan", DIFFERENT, f"{name} is {found[name]}, and the settings give {expected[name]}")
    plan = run.plan
    return Finding(
        "plan",
        VERIFIED,
        f"global batch {plan.global_batch:,}, learning rate {plan.lr:.4g}, {plan.optimizer_steps:,} steps follow from "
        f"the settings, {samples:,} training samples and {first['workers']} worker(s)",
    )


def _certificate(run: Recorded) -> Finding:
    """Compute it again from the settings, with what only the run could know: dropout, device, batch normalisation."""
    found = {one["name"]: one for one in (*run.certificate["equal"], *run.certificate["different"])}
    setup = RunSetup(
        config=run.config,
        plan=run.plan,
        data="",
        has_dropout=found["dropout"]["value"] != "none in the model",
        device_type=found["device"]["value"],
        rehearsed=found["rehearsed"]["value"],
        versions={},
        processor="",
        batch_statistics=found["batch_statistics"]["value"] != "none",
    )
    expected = {one.name: one for one in certify(setup, baseline_of(setup)).properties}
    stopped = bool(run.record.result.stopped_early)
    if other := sorted(found.keys() ^ expected.keys()):  # made by another version, or changed
        why = f"it has other properties than this version of the runner gives it: {', '.join(other)}"
        return Finding("certificate", CLAIMED, why)
    for name, one in found.items():
        compared = name not in _NOT_IN_SETTINGS and not (stopped and name == "samples_seen")
        if compared and not (one["equal"] == expected[name].equal and _same(one["value"], expected[name].value)):
            return Finding("certificate", DIFFERENT, f"{name} is {one['value']}, and follows as {expected[name].value}")
    differs = [name for name, one in found.items() if not one["equal"]]
    levels = [expected[name].allows for name in differs] + [segment["level"] for segment in run.segments]
    level = worst_level(levels, tuple(expected.values()))
    if level != run.certificate["level"] and not run.certificate.get("withdrawn"):
        return Finding("certificate", DIFFERENT, f"its level is {run.certificate['level']}, and follows as {level}")
    which = f"; different: {', '.join(differs)}" if differs else ""
    return Finding("certificate", VERIFIED, f"{level} to one fp32 worker{which}")


def _ledger(run: Recorded) -> Finding:
    """Compute the digest of each epoch from the seed: the ids of the samples in the order of the steps."""
    order = DataOrder(run.plan, run.config.seed, 0, None)
    digests = []
    if [epoch["epoch"] for epoch in run.ledger["epochs"]] != list(range(len(run.ledger["epochs"]))):
        return Finding("ledger", DIFFERENT, "its epochs are not numbered from 0")
    for epoch in run.ledger["epochs"]:
        permutation = order.epoch_permutation(epoch["epoch"])
        steps = [step for step in order.steps() if step.stop <= epoch["expected"]]
        rows = [(np.full(step.samples, step.t), permutation[step.start : step.stop]) for step in steps]
        planned = np.concatenate([np.stack(row, axis=1) for row in rows])
        entries = np.concatenate([planned, np.zeros((len(planned), 1), dtype=np.int64)], axis=1)
        expected = merge(epoch["epoch"], entries, permutation, planned)
        if expected.digest != epoch["digest"]:
            why = f"the digest of epoch {epoch['epoch']} is not that of the samples that seed {run.config.seed} gives"
            return Finding("ledger", DIFFERENT, why)
        digests.append(expected.digest)
    if digest_of_epochs(digests) != run.ledger["digest"]:
        return Finding("ledger", DIFFERENT, "its digest is not that of its epochs")
    seen = run.plan.samples_before(run.steps)
    in_epochs = sum(epoch["expected"] for epoch in run.ledger["epochs"])
    if {in_epochs, run.ledger["samples_seen"], run.record.result.samples_seen} != {seen}:
        why = f"{run.steps:,} steps have {seen:,} samples, and it has {in_epochs:,}"
        return Finding("ledger", DIFFERENT, why)
    if not run.ledger["sound"]:
        return Finding("ledger", DIFFERENT, "the run itself has found that it does not match the plan")
    unit = run.ledger["unit"]
    return Finding("ledger", VERIFIED, f"{seen:,} {unit} in the steps and the order that seed {run.config.seed} gives")


def _learning_rates(run: Recorded) -> Finding:
    """Every step was logged, with the learning rate and the number of samples that the plan gives."""
    plan, schedule = run.plan, run.config.schedule
    steps = run.steps
    for name in ("train/loss", "train/lr", "train/samples_seen"):
        if missing := sorted(set(range(1, steps + 1)) ^ run.metrics.get(name, {}).keys()):
            return Finding(
                "learning rate", DIFFERENT, f"{name} of step {missing[0]:,} is missing, or was never trained"
            )
    for step in range(1, steps + 1):
        before = plan.samples_before(step - 1)
        lr = plan.lr * lr_multiplier(schedule.name.name, before / plan.total_samples, schedule.warmup_share)
        expected = {"train/lr": lr, "train/samples_seen": plan.samples_before(step)}
        for name, value in expected.items():
            if not _same(found := run.metrics[name][step], value):
                return Finding(
                    "learning rate", DIFFERENT, f"{name} of step {step:,} is {found}, and follows as {value}"
                )
    why = f"that of all {steps:,} steps follows from the plan and the number of samples seen"
    return Finding("learning rate", VERIFIED, why)


def _result(run: Recorded) -> Finding:
    """The metrics of the summary are among those that were logged, in the step that the summary gives for them."""
    logged, result = run.metrics, run.record.result
    in_parts = run.config.sync.overlap or run.config.sync.fragments != 1
    if in_parts and result.stopped_early:
        why = "averages of the last steps were applied after the evaluation that was logged"
        return Finding("logged metrics", CLAIMED, why)
    step = result.best["step"] if run.config.evaluation.keep_best and result.best is not None else run.steps
    for name, value in result.eval.items():
        found = logged.get(f"eval/{name}", {}).get(step)
        if found is None or not _same(found, float(value)):
            why = f"{name} is {value} in the summary, and was logged as {found} at step {step:,}"
            return Finding("logged metrics", DIFFERENT, why)
    return Finding("logged metrics", VERIFIED, f"the result is what was logged at step {step:,}")


def _same(a: Any, b: Any) -> bool:
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (a, b))
    return close(a, b, _TOLERANCE) if numbers else bool(a == b)


def close(a: float, b: float, relative: float, absolute: float = 0.0) -> bool:
    """Whether two numbers are equal up to these differences; NaN, of a metric that is not defined, equals NaN."""
    return math.isclose(a, b, rel_tol=relative, abs_tol=absolute) or (math.isnan(a) and math.isnan(b))
