"""The speed of a run in `summary.json`: its figures, those of one worker, and the diagnosis."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.backends.machine import available_cores
from runner.config.choices import SyncSchedule
from runner.config.instantiate import NOT_TRAINED_WITH
from runner.config.plain import to_plain
from runner.errors import UserError
from runner.folder.files import started_ms
from runner.folder.reading import read_json
from runner.plan.certificate import RunSetup
from runner.plan.experiment import Experiment
from runner.speed.diagnosis import diagnose
from runner.speed.run_numbers import Baseline, Collectives, Restarts, RunNumbers, SamplesRead, flops_words
from runner.train.result import RunResult

#: Caches can make n workers a little more than n times as fast as one; beyond that the baseline was slowed down.
_IMPLAUSIBLE = 1.1
_NO_RESTARTS = Restarts()


def speed_key(setup: RunSetup, machine: str) -> str:
    """Equal for runs that should be equally fast: the same work in the same pieces on the same machine.

    Seed, length of the run, learning rate, evaluation, tracking and synchronisation are left out.
    """
    config, plan = setup.config, setup.plan
    content = {
        "recipe": {name: value for name, value in config.recipe.items() if name not in NOT_TRAINED_WITH},
        "data": setup.data,
        "device": [setup.device_type, machine, config.device.length_buckets],
        "versions": dict(setup.versions),
        "precision": to_plain(config.precision),
        "optimizer": {name: value for name, value in to_plain(config.optimizer).items() if name != "lr"},
        "model": [config.compile, config.gradient_checkpointing, *map(to_plain, (config.equivalence, config.adapter))],
        "sharding": to_plain(config.sharding),
        "batch": [plan.micro_batch, plan.accumulation_steps, config.batch.length_sorted],
        "workers": plan.world_size,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def find_baseline(folder: Path, key: str, micro_batch: int, seed: int) -> Baseline | None:
    """The newest finished run with this speed key among the folders next to `folder`, of the same seed if there is one.

    Seeds differ in their data order, and so in padding. None if there is no run.
    Runs that were rehearsed, that shared the machine with other jobs, or that were too short to time are skipped.
    """
    summaries = [path for path in folder.resolve().parent.glob("*/summary.json") if path.parent != folder.resolve()]
    read = [(path, _read(path)) for path in summaries]
    for path, summary in sorted(read, key=lambda one: (one[1].get("seed") == seed, started_ms(one[0].parent)))[::-1]:
        timed = summary.get("status") == "FINISHED" and summary.get("samples_per_s")
        alone = not summary.get("rehearsed") and summary.get("jobs_at_once") == 1
        if timed and alone and summary.get("speed_key") == key:
            compute_s = (summary.get("speed") or {}).get("compute_s_per_sample")
            return Baseline(path.parent.name, summary["samples_per_s"], micro_batch, compute_s)
    return None


def _read(path: Path) -> dict[str, Any]:
    """Another run's summary; empty if it cannot be read, since it may be in any state."""
    try:
        content: dict[str, Any] = read_json(path)
    except UserError:
        return {}
    return content


def speed_of(
    experiment: Experiment,
    result: RunResult,
    wall_s: float,
    folder: Path,
    jobs_at_once: int,
    restarts: Restarts = _NO_RESTARTS,
) -> dict[str, Any]:
    """The entries `speed_key`, `speed`, `diagnosis` and `diagnoses` of `summary.json`.

    `wall_s`: seconds of the whole run. `jobs_at_once`: jobs of a sweep that share this machine.
    """
    numbers = _numbers(experiment, result, wall_s, folder, jobs_at_once, restarts)
    key = None
    if result.machine is not None:
        key, one_worker = (speed_key(setup, result.machine) for setup in (experiment.setup, experiment.one_worker))
        numbers = dataclasses.replace(numbers, baseline=_baseline(experiment, numbers, folder, key, one_worker))
    found = diagnose(numbers)
    return {
        "speed_key": key,
        "speed": _as_json(numbers),
        "diagnosis": found[0].sentence if found else None,
        "diagnoses": [dataclasses.asdict(one) for one in found],
    }


def _baseline(experiment: Experiment, run: RunNumbers, folder: Path, key: str, one_worker: str) -> Baseline | None:
    if run.rehearsed or run.jobs_at_once > 1 or run.samples_per_s is None:
        return None
    if key == one_worker:
        return Baseline(folder.resolve().name, run.samples_per_s, run.micro_batch, run.compute_s)
    return find_baseline(folder, one_worker, experiment.one_worker.plan.micro_batch, experiment.config.seed)


def _numbers(
    experiment: Experiment,
    result: RunResult,
    wall_s: float,
    folder: Path,
    jobs_at_once: int,
    restarts: Restarts,
) -> RunNumbers:
    config, plan, placement = experiment.config, experiment.plan, experiment.placement
    rate, compiled = result.samples_per_s, result.compilations
    pads_to = config.recipe.get("padding")
    training_s = None
    if rate and result.optimizer_steps is not None:
        first_step = experiment.began_after + 1
        training_s = (plan.samples_before(result.optimizer_steps) - plan.samples_before(first_step)) / rate
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
        largest_k=(
            plan.optimizer_steps if plan.world_size > 1 and config.sync.schedule is SyncSchedule.constant else None
        ),
        length_sorted=config.batch.length_sorted,
        few_lengths=config.device.length_buckets is not None or (compiled is not None and not config.compile),
        can_unpad=experiment.recipe.can_unpad,
        pads_to=str(pads_to) if pads_to not in (None, "none") else None,
        compiled=config.compile,
        wall_s=wall_s,
        earlier_s=restarts.earlier_s,
        lost_s=restarts.lost_s,
        training_s=training_s,
        first_step_s=result.first_step_s,
        evaluation_s=result.evaluation_s,
        compile_s=compiled.seconds if compiled is not None else None,
        first_step_compile_s=result.first_step_compile_s,
        samples_per_s=rate,
        step_s=result.step_s,
        collectives=_collectives(result),
        tokens=result.tokens,
        samples_seen=result.samples_seen,
        flops_per_sample=result.flops_per_sample,
        peak_flops_per_s=result.peak_flops_per_s,
        peak_memory_bytes=result.peak_memory_bytes,
        waited_share=result.waited_share,
        reading=_samples_read(folder),
    )


def _collectives(result: RunResult) -> Collectives | None:
    if result.comm_s is None or result.synchronisations is None or result.comm_bytes is None:
        return None
    return Collectives(result.synchronisations, result.comm_bytes, result.comm_s)


def _samples_read(folder: Path) -> SamplesRead | None:
    """Of the longest epoch in `ledger.json`, also for a run that the ledger has ended."""
    path = folder / "ledger.json"
    epochs = json.loads(path.read_text())["epochs"] if path.exists() else []
    if not epochs:
        return None
    epoch = max(epochs, key=lambda epoch: epoch["expected"])
    return SamplesRead(epoch["expected"], epoch["samples_seen"], epoch["unique"])


def _as_json(run: RunNumbers) -> dict[str, Any]:
    read, base = run.reading, run.baseline
    return {
        "samples_per_epoch": read.seen if read is not None else None,
        "samples_per_epoch_planned": read.expected if read is not None else None,
        "samples_per_s": run.samples_per_s,
        "tokens_per_s": run.tokens_per_s,
        "model_flops_utilization": run.model_flops_utilization,
        "flops_per_sample": run.flops_per_sample,
        "peak_flops_per_s": run.peak_flops_per_s,
        "peak_memory_bytes": run.peak_memory_bytes,
        "waited_share": run.waited_share,
        "scaling_efficiency": run.scaling_efficiency,
        "baseline": base.folder if base is not None else None,
        "baseline_samples_per_s": base.samples_per_s if base is not None else None,
        "step_share": run.step_share,
        "compute_s_per_sample": run.compute_s,
        "link_gbit_per_s": run.link_gbit_per_s,
        "start_up_share": _share(run, run.first_step_s),
        "evaluation_share": _share(run, run.evaluation_s),
        "ending_share": _share(run, run.ending_s),
        "restart_share": _share(run, run.lost_s or None),
        "compile_share": _share(run, run.compile_s),
        "padding_share": run.tokens.padding_share if run.tokens is not None else None,
        "tokens": dataclasses.asdict(run.tokens) if run.tokens is not None else None,
    }


def _share(run: RunNumbers, seconds: float | None) -> float | None:
    return run.of_wall(seconds) if seconds is not None else None


def speed_metrics(speed: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are logged as metrics, so that a tracking store can sort runs by them."""
    names = ("scaling_efficiency", "padding_share", "model_flops_utilization", "tokens_per_s")
    figures = {name: speed[name] for name in names}
    figures["peak_memory_bytes"] = max(speed["peak_memory_bytes"] or (None,))
    return {f"speed/{name}": value for name, value in figures.items() if value is not None}


def utilization_words(speed: Mapping[str, Any]) -> str | None:
    """How much of the devices a run has used, in a line; None if nothing is known."""
    tokens, share, memory = (speed[name] for name in ("tokens_per_s", "model_flops_utilization", "peak_memory_bytes"))
    words = [
        f"{tokens:,.0f} tokens/s" if tokens else None,
        f"model FLOPs utilization {share:.0%} of {flops_words(speed['peak_flops_per_s'])}" if share else None,
        f"peak memory {max(memory) / 2**30:,.3g} GiB per worker" if memory else None,
    ]
    return ", ".join(filter(None, words)) or None


def _named(run: Path) -> str:
    """A run by its folder's name; a job of a sweep, whose folder has only a number, as `job 3 (cpu · s0)`."""
    if not (run / "job.json").is_file():
        return run.name
    setup = _read(run / "summary.json").get("setup")
    return f"job {run.name} ({setup})" if setup else f"job {run.name}"


def _doubt(efficiency: float, run: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """Why the scaling efficiency of a run says little, by the summaries of both; None if it is to be trusted."""
    whose = {"this run": run, "the baseline": baseline}
    kinds = {name: [cause["kind"] for cause in one.get("diagnoses") or ()] for name, one in whose.items()}
    busy = [name for name, own in kinds.items() if "busy" in own]
    if busy:
        return f"{' and '.join(busy)} shared the machine with other programs"
    return "the baseline was probably slowed down by something else" if efficiency > _IMPLAUSIBLE else None


def efficiency_words(summary: Mapping[str, Any], workers: int, folder: Path) -> str | None:
    """How the speed of several workers compares with one worker's, in a line; None for one worker."""
    speed = summary["speed"]
    efficiency, baseline = speed["scaling_efficiency"], speed["baseline"]
    if efficiency is not None and baseline != folder.resolve().name:
        times, one = efficiency * workers, speed["baseline_samples_per_s"]
        faster = f"{times:,.{0 if times >= 10 else 1}f} times as fast as one worker ({one:,.0f}/s)"
        one_worker = folder.resolve().parent / baseline
        where = _named(one_worker)
        if doubt := _doubt(efficiency, summary, _read(one_worker / "summary.json")):
            return f"scaling efficiency unreliable (measured {efficiency:.0%}): {faster} in {where}; {doubt}"
        return f"scaling efficiency {efficiency:.0%}: {faster} in {where}"
    alone = not summary["rehearsed"] and summary["jobs_at_once"] == 1
    if efficiency is None and workers > 1 and alone and speed["samples_per_s"] is not None:
        return (
            "scaling efficiency unknown: there is no run of one worker in this folder; rerun with setup=one to get a "
            "baseline"
        )
    return None
