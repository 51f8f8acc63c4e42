"""The speed of a run in `summary.json`: its figures, those of one worker, and the diagnosis."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from runner.backends.machine import available_cores
from runner.config.choices import SyncSchedule
from runner.cost.identity import step_settings
from runner.folder.files import digest_of, started_ms
from runner.folder.reading import read_json
from runner.folder.record import FINISHED, RunRecord, SpeedFigures
from runner.plan.baseline import RunSetup
from runner.plan.experiment import Experiment
from runner.speed.diagnosis import diagnose
from runner.speed.run_numbers import Baseline, Restarts, RunNumbers, SamplesRead, flops_words

#: Caches can make n workers a little more than n times as fast as one; beyond that the baseline was slowed down.
_IMPLAUSIBLE = 1.1
_NO_RESTARTS = Restarts()


def speed_key(setup: RunSetup, machine: str) -> str:
    """Equal for runs that should be equally fast: the same work in the same pieces on the same machine.

    Seed, length of the run, learning rate, evaluation, tracking and synchronisation are left out.
    """
    config, plan = setup.config, setup.plan
    content = step_settings(setup) | {
        "data": setup.data,
        "device": [setup.device_type, machine, config.device.length_buckets],
        "batch": [plan.micro_batch, plan.accumulation_steps, config.batch.length_sorted],
        "workers": plan.world_size,
    }
    return digest_of(content)[:16]


def find_baseline(folder: Path, key: str, micro_batch: int, seed: int) -> Baseline | None:
    """The newest finished run with this speed key among the folders next to `folder`, of the same seed if there is one.

    Seeds differ in their data order, and so in padding. None if there is no run.
    Runs that were rehearsed, that shared the machine with other jobs, or that were too short to time are skipped.
    """
    beside = [one for one in folder.resolve().parent.iterdir() if one != folder.resolve()]
    read = [(one, record) for one in beside if (record := RunRecord.read_if_valid(one)) is not None]
    for one, record in sorted(read, key=lambda pair: (pair[1].seed == seed, started_ms(pair[0])))[::-1]:
        rate = record.result.samples_per_s if record.status == FINISHED else None
        alone = not record.rehearsed and record.jobs_at_once == 1
        if rate and alone and record.speed_key == key:
            return Baseline(one.name, rate, micro_batch, record.speed.compute_s_per_sample)
    return None


def with_speed(record: RunRecord, experiment: Experiment, folder: Path, restarts: Restarts = _NO_RESTARTS) -> RunRecord:
    """Add speed key, figures and diagnoses to the record of a run that has ended in `folder`."""
    numbers, key = _numbers(record, experiment, folder, restarts), None
    if (machine := record.result.machine) is not None:
        key, one_worker = (speed_key(setup, machine) for setup in (experiment.setup, experiment.one_worker))
        numbers = dataclasses.replace(numbers, baseline=_baseline(experiment, numbers, folder, key, one_worker))
    return dataclasses.replace(record, speed_key=key, speed=_figures(numbers), diagnoses=tuple(diagnose(numbers)))


def _baseline(experiment: Experiment, run: RunNumbers, folder: Path, key: str, one_worker: str) -> Baseline | None:
    rate = run.result.samples_per_s
    if run.rehearsed or run.jobs_at_once > 1 or rate is None:
        return None
    if key == one_worker:
        return Baseline(folder.resolve().name, rate, run.plan.micro_batch, run.compute_s)
    return find_baseline(folder, one_worker, experiment.one_worker.plan.micro_batch, experiment.config.seed)


def _numbers(record: RunRecord, experiment: Experiment, folder: Path, restarts: Restarts) -> RunNumbers:
    config, plan, placement = experiment.config, experiment.plan, experiment.placement
    result = record.result
    rate, compiled = result.samples_per_s, result.compilations
    assert record.wall_s is not None
    assert record.jobs_at_once is not None
    pads_to = config.recipe.get("padding")
    training_s = None
    if rate and result.optimizer_steps is not None:
        first_step = experiment.history.began_after + 1
        training_s = (plan.samples_before(result.optimizer_steps) - plan.samples_before(first_step)) / rate
    return RunNumbers(
        plan=plan,
        device=placement.label,
        rehearsed=placement.rehearsed,
        local_workers=placement.local_workers,
        cores=available_cores() if placement.device_type == "cpu" or placement.rehearsed else None,
        jobs_at_once=record.jobs_at_once,
        unit=experiment.facts.unit,
        largest_k=(
            plan.optimizer_steps if plan.world_size > 1 and config.sync.schedule is SyncSchedule.constant else None
        ),
        length_sorted=config.batch.length_sorted,
        few_lengths=config.device.length_buckets is not None or (compiled is not None and not config.compile),
        can_unpad=experiment.recipe.can_unpad,
        pads_to=str(pads_to) if pads_to not in (None, "none") else None,
        compiled=config.compile,
        wall_s=record.wall_s,
        result=result,
        restarts=restarts,
        training_s=training_s,
        reading=_samples_read(folder),
    )


def _samples_read(folder: Path) -> SamplesRead | None:
    """The longest epoch's in `ledger.json`, also for a run that the ledger has ended."""
    path = folder / "ledger.json"
    epochs = read_json(path)["epochs"] if path.exists() else []
    if not epochs:
        return None
    epoch = max(epochs, key=lambda epoch: epoch["expected"])
    return SamplesRead(epoch["expected"], epoch["samples_seen"], epoch["unique"])


def _figures(run: RunNumbers) -> SpeedFigures:
    read, base, result = run.reading, run.baseline, run.result
    return SpeedFigures(
        samples_per_epoch=read.seen if read is not None else None,
        samples_per_epoch_planned=read.expected if read is not None else None,
        tokens_per_s=run.tokens_per_s,
        model_flops_utilization=run.model_flops_utilization,
        scaling_efficiency=run.scaling_efficiency,
        baseline=base.folder if base is not None else None,
        baseline_samples_per_s=base.samples_per_s if base is not None else None,
        step_share=run.step_share,
        compute_s_per_sample=run.compute_s,
        link_gbit_per_s=run.link_gbit_per_s,
        start_up_share=run.share_of_wall(result.first_step_s),
        evaluation_share=run.share_of_wall(result.evaluation_s),
        ending_share=run.share_of_wall(run.ending_s),
        restart_share=run.share_of_wall(run.restarts.lost_s or None),
        compile_share=run.share_of_wall(run.compile_s),
        padding_share=result.tokens.padding_share if result.tokens is not None else None,
    )


def speed_metrics(record: RunRecord) -> dict[str, float]:
    """The figures that are logged as metrics, so that a tracking store can sort runs by them."""
    names = ("scaling_efficiency", "padding_share", "model_flops_utilization", "tokens_per_s")
    figures = {name: getattr(record.speed, name) for name in names}
    figures["peak_memory_bytes"] = max(record.result.peak_memory_bytes or (), default=None)
    return {f"speed/{name}": value for name, value in figures.items() if value is not None}


def utilization_words(record: RunRecord) -> str | None:
    """How much of the devices a run has used, in a line; None if nothing is known."""
    tokens, share = record.speed.tokens_per_s, record.speed.model_flops_utilization
    peak, memory = record.result.peak_flops_per_s, record.result.peak_memory_bytes
    words = [
        f"{tokens:,.0f} tokens/s" if tokens else None,
        f"model FLOPs utilization {share:.0%} of {flops_words(peak)}" if share and peak else None,
        f"peak memory {max(memory) / 2**30:,.3g} GiB per worker" if memory else None,
    ]
    return ", ".join(filter(None, words)) or None


def _named(run: Path) -> str:
    """A run by its folder's name; a job of a sweep, whose folder has only a number, as `job 3 (cpu · s0)`."""
    if not (run / "job.json").is_file():
        return run.name
    record = RunRecord.read_if_valid(run)
    return f"job {run.name} ({record.setup})" if record is not None and record.setup else f"job {run.name}"


def _doubt(efficiency: float, run: RunRecord, baseline: RunRecord | None) -> str | None:
    """Why the scaling efficiency of a run says little, by the records of both; None if it is to be trusted."""
    whose = {"this run": run, "the baseline": baseline}
    busy = [name for name, one in whose.items() if one is not None and any(d.kind == "busy" for d in one.diagnoses)]
    if busy:
        return f"{' and '.join(busy)} shared the machine with other programs"
    return "the baseline was probably slowed down by something else" if efficiency > _IMPLAUSIBLE else None


def efficiency_words(record: RunRecord, workers: int, folder: Path) -> str | None:
    """How the speed of several workers compares with one worker's, in a line; None for one worker."""
    speed = record.speed
    efficiency, baseline, one = speed.scaling_efficiency, speed.baseline, speed.baseline_samples_per_s
    if efficiency is not None and baseline is not None and baseline != folder.resolve().name:
        times = efficiency * workers
        faster = f"{times:,.{0 if times >= 10 else 1}f} times as fast as one worker ({one:,.0f}/s)"
        one_worker = folder.resolve().parent / baseline
        where = _named(one_worker)
        if doubt := _doubt(efficiency, record, RunRecord.read_if_valid(one_worker)):
            return f"scaling efficiency unreliable (measured {efficiency:.0%}): {faster} in {where}; {doubt}"
        return f"scaling efficiency {efficiency:.0%}: {faster} in {where}"
    alone = not record.rehearsed and record.jobs_at_once == 1
    if efficiency is None and workers > 1 and alone and record.result.samples_per_s is not None:
        return (
            "scaling efficiency unknown: there is no run of one worker in this folder; rerun with setup=one to get a "
            "baseline"
        )
    return None
