"""Claims of a run, and whether they follow from its own files: arithmetic only, without data or weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runner.config.choices import AccumulationMode
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

#: Relative difference of two computations of the same formula in float64.
_ARITHMETIC = 1e-12
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
    certificate: Mapping[str, Any]
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
        certificate, ledger = (read_json(folder / name) for name in ("certificate.json", "ledger.json"))
        config = settings(compose([], (), saved))
        return Recorded(folder, config, plan, certificate, ledger, record, steps, train_samples, metrics)

    @property
    def segments(self) -> Sequence[Mapping[str, Any]]:
        """The parts of the run on one set of workers each."""
        found: Sequence[Mapping[str, Any]] = self.certificate["segments"]
        return found


def arithmetic(run: Recorded) -> Iterator[Finding]:
    """Recompute what follows from the settings, the size of the data and the seed."""
    yield _plan(run)
    yield _certificate(run)
    yield _ledger(run)
    yield _learning_rates(run)
    yield _logged_metrics(run)


def _plan(run: Recorded) -> Finding:
    first, given, plan = run.segments[0], run.config, run.plan
    if len(run.segments) > 1:
        return Finding("plan", CLAIMED, "the run was resumed, and its settings are those of its last part")
    if given.accumulation.mode is AccumulationMode.fit:  # which the machine's memory decided
        steps = Accumulation(AccumulationMode.fixed, steps=first["accumulation_steps"])
        given = dataclasses.replace(given, accumulation=steps)
    try:
        expected = make_plan(given, run.train_samples, first["workers"])
    except UserError as error:
        return Finding("plan", DIFFERENT, f"the settings give none ({first_line(error)})")
    why = (
        f"global batch {plan.global_batch:,}, learning rate {plan.lr:.4g}, {plan.optimizer_steps:,} steps follow from "
        f"the settings, {run.train_samples:,} training samples and {first['workers']} worker(s)"
    )
    return compared("plan", dataclasses.asdict(plan), dataclasses.asdict(expected), why)


def _certificate(run: Recorded) -> Finding:
    """Compute it again from the settings, with what only the run could know: dropout, device, batch normalisation."""
    rows = {one["name"]: one for one in (*run.certificate["equal"], *run.certificate["different"])}
    setup = RunSetup(
        config=run.config,
        plan=run.plan,
        data="",
        has_dropout=rows["dropout"]["value"] != "none in the model",
        device_type=rows["device"]["value"],
        rehearsed=rows["rehearsed"]["value"],
        versions={},
        processor="",
        batch_statistics=rows["batch_statistics"]["value"] != "none",
    )
    expected = {one.name: one for one in certify(setup, baseline_of(setup)).properties}
    if other := sorted(rows.keys() ^ expected.keys()):  # made by another version, or changed
        why = f"it has other properties than this version of the runner gives it: {', '.join(other)}"
        return Finding("certificate", CLAIMED, why)
    left_out = (*_NOT_IN_SETTINGS, *(["samples_seen"] if run.record.result.stopped_early else []))
    names = [name for name in rows if name not in left_out]
    differs = [name for name, one in rows.items() if not one["equal"]]
    levels = [expected[name].allows for name in differs] + [segment["level"] for segment in run.segments]
    level = worst_level(levels, tuple(expected.values()))
    found = {name: rows[name]["value"] for name in names} | {f"equal: {name}": rows[name]["equal"] for name in names}
    follows = {name: expected[name].value for name in names} | {f"equal: {one}": expected[one].equal for one in names}
    if not run.certificate.get("withdrawn"):
        found["level"], follows["level"] = run.certificate["level"], level
    which = f"; different: {', '.join(differs)}" if differs else ""
    return compared("certificate", found, follows, f"{level} to one fp32 worker{which}")


def _ledger(run: Recorded) -> Finding:
    """Compute the digest of each epoch from the seed: the ids of the samples in the order of the steps."""
    order, epochs = DataOrder(run.plan, run.config.seed, 0, None), run.ledger["epochs"]
    digests: dict[str, str] = {}
    for number, epoch in enumerate(epochs):
        permutation = order.epoch_permutation(number)
        steps = [step for step in order.steps() if step.stop <= epoch["expected"]]
        rows = [(np.full(step.samples, step.t), permutation[step.start : step.stop]) for step in steps]
        planned = np.concatenate([np.stack(row, axis=1) for row in rows])
        entries = np.concatenate([planned, np.zeros((len(planned), 1), dtype=np.int64)], axis=1)
        digests[f"digest of epoch {number}"] = merge(number, entries, permutation, planned).digest
    seen = run.plan.samples_before(run.steps)
    in_epochs = sum(epoch["expected"] for epoch in epochs)
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
    for step in range(1, steps + 1):
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


def only_recorded(run: Recorded) -> Iterator[Finding]:
    """Claims that the run has recorded, and nobody can compute again."""
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
