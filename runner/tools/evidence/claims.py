"""Claims of a run, and whether they follow from its own files: arithmetic only, without data or weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.backends.memory import available_memory
from runner.config.choices import AccumulationMode, BatchOrder
from runner.config.compose import compose, settings
from runner.config.schema import Accumulation, Config
from runner.errors import UserError, first_line
from runner.folder.metrics_log import MetricsReader
from runner.folder.reading import read_json
from runner.folder.record import FILE_NAME as SUMMARY
from runner.folder.record import RunRecord
from runner.plan import Plan, make_plan
from runner.plan.baseline import RunSetup, baseline_of
from runner.plan.certificate import Certificate, certify, worst_level
from runner.plan.order import DataOrder
from runner.plan.schedule import lr_multiplier
from runner.run.earlier import certificate_of_run, plan_of_run, saved_settings
from runner.train.ledger import digest_of_epochs, planned_digest

VERIFIED, DIFFERENT, CLAIMED = "verified", "different", "only claimed"

#: Relative difference of two computations of the same formula in float64.
_ARITHMETIC = 1e-12
#: Memory, at most, for the order of an epoch, and samples whose digest takes about an hour.
_BYTES_PER_SAMPLE, _MOST_SAMPLES = 16, 10**10
#: Properties of a certificate that the settings do not give: the data's digest is part of the first one.
_NOT_IN_SETTINGS = ("recipe", "versions", "processor")


@dataclass(frozen=True)
class Finding:
    """Result of checking a claim. `outcome`: verified, different or only claimed; `why`: in words."""

    claim: str
    outcome: str
    why: str


def compared(
    claim: str,
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    why: str,
    rounding: float = _ARITHMETIC,
    absolute: Mapping[str, float] | None = None,
) -> Finding:
    """Verified, for the reason `why`, if every expected value was found; else different, by the first that was not.

    `rounding`: relative difference of numbers that counts as none, and `absolute` ones, by name.
    """
    for name, value in expected.items():
        if not _same(found.get(name), value, rounding, (absolute or {}).get(name, 0.0)):
            return Finding(claim, DIFFERENT, f"{name} is {found.get(name)}, and follows as {value}")
    return Finding(claim, VERIFIED, why)


def _same(a: Any, b: Any, relative: float, absolute: float) -> bool:
    if all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (a, b)):
        both_undefined = math.isnan(a) and math.isnan(b)
        return both_undefined or math.isclose(a, b, rel_tol=relative, abs_tol=absolute)
    return bool(a == b)


@dataclass(frozen=True)
class Recorded:
    """Content of the files of a run. `steps`: optimizer steps, and `train_samples`: of an epoch, as claimed; `metrics`:
    logged values by metric and step."""

    folder: Path
    config: Config
    plan: Plan
    certificate: Certificate
    ledger: Mapping[str, Any]
    record: RunRecord
    steps: int
    train_samples: int
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
        plan = plan_of_run(folder, refuse_changed=False)
        certificate, ledger = certificate_of_run(folder), read_json(folder / "ledger.json")
        config = settings(compose([], (), saved))
        return Recorded(folder, config, plan, certificate, ledger, record, steps, train_samples, metrics)


def arithmetic(run: Recorded) -> Iterator[Finding]:
    """Recompute what follows from the settings, the size of the data and the seed."""
    checks = {"plan": _plan, "certificate": _certificate, "ledger": _ledger, "learning rate": _learning_rates}
    yield from _checked(run, {**checks, "logged metrics": _logged_metrics})


def only_recorded(run: Recorded) -> Iterator[Finding]:
    """Claims that the run has recorded, and nobody can compute again."""
    has_environment = (run.folder / "environment.json").exists()
    yield from _checked(run, {**({"environment": _environment} if has_environment else {}), "speed": _speed})


def _checked(run: Recorded, checks: Mapping[str, Callable[[Recorded], Finding]]) -> Iterator[Finding]:
    """The findings of `checks`, by claim. Anybody can write a bundle: its numbers need not be ones to compute with."""
    for claim, check in checks.items():
        try:
            yield check(run)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError) as error:
            yield Finding(claim, DIFFERENT, f"no run records what it would follow from ({first_line(error)})")


def _plan(run: Recorded) -> Finding:
    first, given, plan = run.certificate.segments[0], run.config, run.plan
    if len(run.certificate.segments) > 1:
        return Finding("plan", CLAIMED, "the run was resumed, and its settings are those of its last part")
    if given.accumulation.mode is AccumulationMode.fit:  # which the machine's memory decided
        steps = Accumulation(AccumulationMode.fixed, steps=first.accumulation_steps)
        given = dataclasses.replace(given, accumulation=steps)
    try:
        expected = make_plan(given, run.train_samples, first.workers)
    except UserError as error:
        return Finding("plan", DIFFERENT, f"the settings give none ({first_line(error)})")
    why = (
        f"global batch {plan.global_batch:,}, learning rate {plan.lr:.4g}, {plan.optimizer_steps:,} steps follow from "
        f"the settings, {run.train_samples:,} training samples and {first.workers} worker(s)"
    )
    return compared("plan", dataclasses.asdict(plan), dataclasses.asdict(expected), why)


def _certificate(run: Recorded) -> Finding:
    """Compute it again from the settings, with what only the run could know: dropout, device, batch normalisation."""
    rows = {one.name: one for one in run.certificate.properties}
    setup = RunSetup(
        config=run.config,
        plan=run.plan,
        data="",
        has_dropout=rows["dropout"].value != "none in the model",
        device_type=rows["device"].value,
        rehearsed=rows["rehearsed"].value,
        versions={},
        processor="",
        batch_statistics=rows["batch_statistics"].value != "none",
    )
    expected = {one.name: one for one in certify(setup, baseline_of(setup)).properties}
    if other := sorted(rows.keys() ^ expected.keys()):  # made by another version, or changed
        why = f"it has other properties than this version of the runner gives it: {', '.join(other)}"
        return Finding("certificate", CLAIMED, why)
    left_out = (*_NOT_IN_SETTINGS, *(["samples_seen"] if run.record.result.stopped_early else []))
    names = [name for name in rows if name not in left_out]
    differs = run.certificate.differs
    levels = [expected[name].allows for name in differs] + [segment.level for segment in run.certificate.segments]
    level = worst_level(levels, tuple(expected.values()))
    found = {name: rows[name].value for name in names} | {f"equal: {name}": rows[name].equal for name in names}
    follows = {name: expected[name].value for name in names} | {f"equal: {one}": expected[one].equal for one in names}
    if not run.certificate.withdrawn:
        found["level"], follows["level"] = run.certificate.level, level
    which = f"; different: {', '.join(differs)}" if differs else ""
    return compared("certificate", found, follows, f"{level} to one fp32 worker{which}")


def _ledger(run: Recorded) -> Finding:
    """Compute the digest of each epoch from the seed, which gives the samples of each step."""
    order, epochs = DataOrder(run.plan, run.config.seed, 0, None), run.ledger["epochs"]
    in_epochs, in_memory = sum(epoch["expected"] for epoch in epochs), run.plan.order == BatchOrder.permutation.name
    needed, free = _BYTES_PER_SAMPLE * run.plan.samples_per_epoch * in_memory, available_memory("cpu", 1)
    if free is not None and needed > free:
        return Finding("ledger", CLAIMED, f"its digest takes {needed:,} bytes of memory, and {free:,} are free here")
    if in_epochs > _MOST_SAMPLES:
        return Finding("ledger", CLAIMED, f"its digest of {in_epochs:,} samples takes hours to compute")
    digests = {
        f"digest of epoch {number}": planned_digest(order, number, epoch["expected"])
        for number, epoch in enumerate(epochs)
    }
    seen = run.plan.samples_before(run.steps)
    found = {
        "numbers of epochs": [epoch["epoch"] for epoch in epochs],
        **{f"digest of epoch {number}": epoch["digest"] for number, epoch in enumerate(epochs)},
        "digest": run.ledger["digest"],
        "numbers of samples": [in_epochs, run.ledger["samples_seen"], run.record.result.samples_seen],
        "sound": run.ledger["sound"],
    }
    follows = {
        "numbers of epochs": list(range(len(epochs))),
        **digests,
        "digest": digest_of_epochs(list(digests.values())),
        "numbers of samples": [seen] * 3,
        "sound": True,
    }
    why = f"{seen:,} {run.ledger['unit']} in the steps and the order that seed {run.config.seed} gives"
    return compared("ledger", found, follows, why)


def _learning_rates(run: Recorded) -> Finding:
    """Every step was logged, with the learning rate and the number of samples that the plan gives."""
    plan, schedule, steps = run.plan, run.config.schedule, run.steps
    names = ("train/loss", "train/lr", "train/samples_seen")
    logged = {name: run.metrics.get(name, {}) for name in names}
    found: dict[str, Any] = {
        f"number and last of the steps with {name}": (len(values), max(values, default=0))
        for name, values in logged.items()
    }
    follows: dict[str, Any] = dict.fromkeys(found, (steps, steps))
    for step in range(1, len(logged["train/lr"]) + 1):  # however many steps the summary claims
        before = plan.samples_before(step - 1)
        lr = plan.lr * lr_multiplier(schedule, before / plan.total_samples)
        for name, value in (("train/lr", lr), ("train/samples_seen", plan.samples_before(step))):
            found[f"{name} of step {step:,}"] = logged[name].get(step)
            follows[f"{name} of step {step:,}"] = value
    why = f"that of all {steps:,} steps follows from the plan and the number of samples seen"
    return compared("learning rate", found, follows, why)


def _logged_metrics(run: Recorded) -> Finding:
    """The metrics of the summary are among those that were logged, in the step that the summary gives for them."""
    result, sync = run.record.result, run.config.sync
    if (sync.overlap or sync.fragments != 1) and result.stopped_early:
        why = "averages of the last steps were applied after the evaluation that was logged"
        return Finding("logged metrics", CLAIMED, why)
    step = result.best["step"] if run.config.evaluation.keep_best and result.best is not None else run.steps
    logged = {name: run.metrics.get(f"eval/{name}", {}).get(step) for name in result.eval}
    return compared("logged metrics", result.eval, logged, f"the result is what was logged at step {step:,}")


def _environment(run: Recorded) -> Finding:
    found = read_json(run.folder / "environment.json", list)[-1]
    packages = found["packages"]
    commit = f", commit {found['commit'][:12]} of the runner" if found["commit"] else ""
    why = f"python {found['python']}, torch {packages.get('torch')}, {len(packages)} packages{commit}"
    return Finding("environment", CLAIMED, why)


def _speed(run: Recorded) -> Finding:
    speed = run.record.result.samples_per_s
    shown = f"{speed:,.0f} {run.ledger['unit']}/s" if speed else "too short to measure"
    return Finding("speed", CLAIMED, f"{shown}, on {run.record.result.machine}")
