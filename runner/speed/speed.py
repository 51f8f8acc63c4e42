"""What `summary.json` says about a run's speed: its numbers beside those of one worker, and what is found in them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.config.choices import SyncSchedule
from runner.config.plain import to_plain
from runner.folder.files import started_ms
from runner.plan.certificate import Setup
from runner.plan.experiment import Experiment
from runner.plan.placement import available_cores
from runner.speed.diagnosis import diagnose
from runner.speed.run_numbers import Baseline, Collectives, Reading, RunNumbers
from runner.train.tokens import Tokens

#: Caches can make several workers a little faster than so many of one; what is beyond that was no fair baseline.
_TOO_GOOD = 1.1

#: Of a recipe's settings, those that say nothing of its speed; the data are known by their digest.
_APART = ("tuned", "metric", "goal", "data")


def speed_key(setup: Setup, machine: str) -> str:
    """Equal for runs that should be equally fast: the same work in the same pieces on the same machine.

    Seed, length of the run, learning rate, evaluation, tracking and synchronisation do not enter.
    """
    config, plan = setup.config, setup.plan
    content = {
        "recipe": {name: value for name, value in config.recipe.items() if name not in _APART},
        "data": setup.data,
        "device": [setup.device_type, machine, config.device.length_buckets],
        "versions": dict(setup.versions),
        "precision": to_plain(config.precision),
        "optimizer": {name: value for name, value in to_plain(config.optimizer).items() if name != "lr"},
        "model": [config.compile, config.gradient_checkpointing, to_plain(config.equivalence)],
        "batch": [plan.micro_batch, plan.accumulation_steps, config.batch.length_sorted],
        "workers": plan.world_size,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def find_baseline(folder: Path, key: str, micro_batch: int) -> Baseline | None:
    """The newest finished run with this speed key among the folders beside `folder`; None if there is none.

    Runs that were rehearsed, that shared the machine with other jobs, or that were too short to time are passed over.
    """
    summaries = [path for path in folder.resolve().parent.glob("*/summary.json") if path.parent != folder.resolve()]
    for path in sorted(summaries, key=lambda path: started_ms(path.parent), reverse=True):
        summary = _read(path)
        timed = summary.get("status") == "FINISHED" and summary.get("samples_per_s")
        alone = not summary.get("rehearsed") and summary.get("jobs_at_once") == 1
        if timed and alone and summary.get("speed_key") == key:
            compute_s = (summary.get("speed") or {}).get("compute_s_per_sample")
            return Baseline(path.parent.name, summary["samples_per_s"], micro_batch, compute_s)
    return None


def _read(path: Path) -> dict[str, Any]:
    """A file of another run, which may be of any tool and any state: what cannot be read is no baseline."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def speed_of(
    experiment: Experiment, result: Mapping[str, Any], wall_s: float, folder: Path, jobs_at_once: int
) -> dict[str, Any]:
    """The entries `speed_key`, `speed`, `diagnosis` and `diagnoses` of `summary.json`.

    `result`: what rank 0 returned, or as much as is known of a run that failed. `wall_s`: seconds of the whole run.
    """
    machine = result.get("machine")
    keys = [speed_key(setup, machine) for setup in (experiment.setup, experiment.one_worker)] if machine else None
    numbers = _numbers(experiment, result, wall_s, folder, jobs_at_once)
    if keys is not None:
        numbers = dataclasses.replace(numbers, baseline=_baseline(experiment, numbers, folder, *keys))
    found = diagnose(numbers)
    return {
        "speed_key": keys[0] if keys is not None else None,
        "speed": _block(numbers),
        "diagnosis": found[0].sentence if found else None,
        "diagnoses": [dataclasses.asdict(one) for one in found],
    }


def _baseline(experiment: Experiment, run: RunNumbers, folder: Path, key: str, one_worker: str) -> Baseline | None:
    if run.rehearsed or run.jobs_at_once > 1 or run.samples_per_s is None:
        return None
    if key == one_worker:
        return Baseline(folder.resolve().name, run.samples_per_s, run.micro_batch, run.compute_s)
    return find_baseline(folder, one_worker, experiment.one_worker.plan.micro_batch)


def _numbers(
    experiment: Experiment, result: Mapping[str, Any], wall_s: float, folder: Path, jobs_at_once: int
) -> RunNumbers:
    config, plan, placement = experiment.config, experiment.plan, experiment.placement
    rate, compiled = result.get("samples_per_s"), result.get("compilations")
    choice = plan.world_size > 1 and config.sync.schedule is SyncSchedule.constant
    pads_to = config.recipe.get("padding")
    tokens = result.get("tokens")
    return RunNumbers(
        device=placement.label,
        rehearsed=placement.rehearsed,
        world_size=plan.world_size,
        local_workers=placement.local_workers,
        cores=available_cores() if placement.device_type == "cpu" or placement.rehearsed else None,
        jobs_at_once=jobs_at_once,
        unit=experiment.facts.unit,
        samples_per_epoch=plan.samples_per_epoch,
        micro_batch=plan.micro_batch,
        replica_batch=plan.replica_batch,
        k=plan.k,
        largest_k=plan.optimizer_steps if choice else None,
        length_sorted=config.batch.length_sorted,
        few_lengths=config.device.length_buckets is not None or compiled is not None,
        pads_to=str(pads_to) if pads_to not in (None, "longest") else None,
        compiled=config.compile,
        wall_s=wall_s,
        # The rate is that of planned samples, whatever was read in their place.
        training_s=(plan.samples_before(result["optimizer_steps"]) - plan.samples_before(1)) / rate if rate else None,
        first_step_s=result.get("first_step_s"),
        evaluation_s=result.get("evaluation_s"),
        compile_s=compiled["seconds"] if compiled is not None else None,
        samples_per_s=rate,
        step_s=result.get("step_s"),
        collectives=_collectives(result),
        tokens=Tokens(**tokens) if tokens is not None else None,
        reading=_reading(folder),
    )


def _collectives(result: Mapping[str, Any]) -> Collectives | None:
    seconds = result.get("comm_s")
    return Collectives(result["synchronisations"], result["comm_bytes"], seconds) if seconds is not None else None


def _reading(folder: Path) -> Reading | None:
    """Of the epoch of which most was trained on, by `ledger.json`; also of a run that the ledger has ended."""
    path = folder / "ledger.json"
    epochs = json.loads(path.read_text())["epochs"] if path.exists() else []
    if not epochs:
        return None
    epoch = max(epochs, key=lambda epoch: epoch["expected"])
    return Reading(epoch["expected"], epoch["samples_seen"], epoch["unique"])


def _block(run: RunNumbers) -> dict[str, Any]:
    read, base = run.reading, run.baseline
    return {
        "samples_per_epoch": read.seen if read is not None else None,
        "samples_per_epoch_planned": read.expected if read is not None else None,
        "samples_per_s": run.samples_per_s,
        "scaling_efficiency": run.scaling_efficiency,
        "baseline": base.folder if base is not None else None,
        "baseline_samples_per_s": base.samples_per_s if base is not None else None,
        "step_share": run.step_share,
        "compute_s_per_sample": run.compute_s,
        "link_gbit_per_s": run.link_gbit_per_s,
        "start_up_share": _share(run, run.first_step_s),
        "evaluation_share": _share(run, run.evaluation_s),
        "ending_share": _share(run, run.ending_s),
        "compile_share": _share(run, run.compile_s),
        "padding_share": run.tokens.padding_share if run.tokens is not None else None,
        "tokens": dataclasses.asdict(run.tokens) if run.tokens is not None else None,
    }


def _share(run: RunNumbers, seconds: float | None) -> float | None:
    return run.of_wall(seconds) if seconds is not None else None


def speed_metrics(speed: Mapping[str, Any]) -> dict[str, float]:
    """What of a `speed` block is worth a metric of its own, by which a store can sort runs."""
    names = ("scaling_efficiency", "padding_share")
    return {f"speed/{name}": speed[name] for name in names if speed[name] is not None}


def efficiency_words(summary: Mapping[str, Any], workers: int, folder: Path) -> str | None:
    """A line about how a run's workers compare with one; None where there is nothing to compare, or it is the one."""
    speed = summary["speed"]
    efficiency, baseline = speed["scaling_efficiency"], speed["baseline"]
    if efficiency is not None and baseline != folder.resolve().name:
        times, one = efficiency * workers, speed["baseline_samples_per_s"]
        faster = f"{times:,.{0 if times >= 10 else 1}f} times as fast as one worker ({one:,.0f}/s)"
        doubt = ", which something must have slowed down" if efficiency > _TOO_GOOD else ""
        return f"scaling efficiency {efficiency:.0%}: {faster} in {baseline}{doubt}"
    alone = not summary["rehearsed"] and summary["jobs_at_once"] == 1
    if efficiency is None and workers > 1 and alone and speed["samples_per_s"] is not None:
        return (
            "scaling efficiency unknown: no run of one worker lies beside this one; setup=one with all but workers "
            "and accumulation as here makes one"
        )
    return None
