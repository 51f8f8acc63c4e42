"""Why was a run not faster? From measured numbers to sentences; reads no file and measures nothing."""

from __future__ import annotations

from collections.abc import Iterator

from runner.backends.machine import BUSY
from runner.cost.step import STANDS_OUT, StepCost
from runner.folder.record import Diagnosis, Tokens
from runner.speed.run_numbers import PER_SAMPLE, RunNumbers, flops_words

#: Start-up and end take a fixed time, so a larger share of a short run is normal.
FIXED_COST_STANDS_OUT = 0.3
#: Share of the peak that forward and backward pass reach with products of a good size (Chowdhery et al. 2022: 46% on
#: TPUs with communication), and the share below which they are reported.
COMMON_UTILIZATION, LOW_UTILIZATION = 0.5, 0.25
#: Share of the samples read. Samplers that pad shards to equal length repeat fewer.
REPEATS_STAND_OUT = 0.02


def diagnose(run: RunNumbers) -> list[Diagnosis]:
    """Everything that made a run slower than it could be, the costliest first; empty if nothing is known about it.

    A run that did other work than intended, a rehearsal and a busy machine come before all others, since they leave the
    other numbers without meaning.
    """
    first = [*_not_dealt_out(run), *_rehearsed(run), *_busy(run)]
    others = [*_repeats(run), *_phases(run), *_padding(run), *_devices(run), *_fixed_costs(run)]
    return [*first, *sorted(others, key=lambda one: -one.lost_share)] or list(_nothing(run))


def _not_dealt_out(run: RunNumbers) -> Iterator[Diagnosis]:
    read, workers = run.reading, run.plan.world_size
    if read is None or workers == 1 or not read.unique == read.expected > 0 or read.seen != workers * read.unique:
        return
    part = "" if read.expected == run.plan.samples_per_epoch else " of the finished steps"
    yield Diagnosis(
        "not dealt out",
        f"each worker read all {read.unique:,} {run.unit}{part}: the data were not split between workers, so "
        f"{workers} workers did {workers}× the work",
        (1 - 1 / workers) * run.training_share,
        1 - 1 / workers,
    )


def _rehearsed(run: RunNumbers) -> Iterator[Diagnosis]:
    if run.rehearsed and run.result.first_step_s is not None:
        sentence = f"this was a rehearsal of {run.device} on other hardware: its speed says nothing about {run.device}"
        yield Diagnosis("rehearsed", sentence, 0.0)


def _busy(run: RunNumbers) -> Iterator[Diagnosis]:
    crowded = run.cores is not None and run.local_workers * run.jobs_at_once > run.cores  # its workers wait in turns
    waited = 0.0 if crowded or run.result.waited_share is None else run.result.waited_share
    if waited >= BUSY and run.result.samples_per_s is not None:
        sentence = (
            f"the machine was busy: {waited:.0%} of the time in which this run could compute, another program had the "
            "core; stop other programs, or compare only with runs made alongside the same ones"
        )
        yield Diagnosis("busy", sentence, waited * run.training_share, waited)


def _repeats(run: RunNumbers) -> Iterator[Diagnosis]:
    read = run.reading
    if read is None or any(_not_dealt_out(run)):
        return
    repeats = read.seen - read.unique
    if repeats and repeats >= REPEATS_STAND_OUT * read.seen:
        share = repeats / read.seen
        sentence = f"{repeats:,} of {read.seen:,} {run.unit} were duplicates within an epoch: see ledger.json"
        yield Diagnosis("repeats", sentence, share * run.training_share, share)


#: Phase of a step, kind, what happened, what helps, and its setting.
_PHASE_CAUSES = (
    (
        "data",
        "data",
        "waiting for data",
        "use a cheaper collate in the recipe, or a faster disk for cache_dir",
        "cache_dir",
    ),
    (
        "optimizer",
        "optimizer",
        "the optimizer",
        "adding workers does not help; a larger global batch means fewer optimizer steps",
        "batch.global_batch",
    ),
    ("other", "overhead", "logging and loop overhead", "use larger micro-batches, or a larger log_every", "log_every"),
)


def _phases(run: RunNumbers) -> Iterator[Diagnosis]:
    """Phases that take too much of a step without being the computation that was asked for."""
    for phase, kind, what, hint, setting in _PHASE_CAUSES:
        share = run.in_steps(phase)
        if share >= STANDS_OUT:
            sentence = f"{what} took {share:.0%} of a step: {hint}"
            yield Diagnosis(kind, sentence, share * run.training_share, share, (setting,))
    share = run.in_steps("communication")
    if share >= STANDS_OUT and run.plan.world_size > 1:
        rate = run.link_gbit_per_s
        shown = None if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        link = f" at this link speed ({shown} Gbit/s)" if shown else ""
        advice, settings = _another_k(run)
        sentence = f"communication took {share:.0%} of a step{link}{advice}"
        yield Diagnosis("communication", sentence, share * run.training_share, share, settings)


def _another_k(run: RunNumbers) -> tuple[str, tuple[str, ...]]:
    """Advice as a clause, and as settings."""
    result = run.result
    if run.largest_k is None or not result.step_s:
        return "", ()
    spent = result.step_s["communication"]
    compute_s = sum(result.step_s.values()) - spent
    each_s = spent * run.plan.k
    if run.plan.k == 1 and result.comm_s is not None and result.synchronisations:
        # With local phases, the backward pass no longer hides a part of it.
        each_s = max(each_s, result.comm_s / result.synchronisations)
    k, advice = StepCost(compute_s, each_s).advice(run.largest_k)
    return f"; {advice}", () if k is None else (f"sync.k={k}",)


def _padding(run: RunNumbers) -> Iterator[Diagnosis]:
    tokens = run.result.tokens
    if tokens is not None and tokens.padding_share >= STANDS_OUT:
        share = tokens.padding_share
        advice, settings = _less_padding(run, tokens)
        sentence = f"padding was {share:.0%} of the tokens: {advice}"
        yield Diagnosis("padding", sentence, share * run.computing, share, settings)


def _less_padding(run: RunNumbers, tokens: Tokens) -> tuple[str, tuple[str, ...]]:
    """What reduces the largest kind of padding, in words and as settings."""
    if tokens.fillers > max(tokens.uneven, tokens.beyond):
        advice = "most of it is in the short last batch of each epoch; use a smaller global batch"
        return advice, ("batch.global_batch",)
    if run.can_unpad and run.pads_to is not None and not (run.pads_to == "longest" and run.few_lengths):
        none = "recipe.padding=none"
        return f"recipe.padding={run.pads_to} computes it; use {none}", (none,)
    if run.pads_to == "max_length" and tokens.beyond > tokens.uneven:
        longest = "recipe.padding=longest"
        return f"most of it is what recipe.padding=max_length adds; use {longest}", (longest,)
    if tokens.uneven >= tokens.beyond:
        sorting = () if run.length_sorted else ("batch.length_sorted=true",)
        smaller = f"smaller micro-batches (more accumulation.steps), which hold {run.unit} of similar length"
        return f"use {' and '.join((*sorting, smaller))}", (*sorting, "accumulation.steps")
    if run.few_lengths:
        return "use more lengths in device.length_buckets", ("device.length_buckets",)
    return "the recipe's collate pads beyond the longest row of a batch", ()


def _devices(run: RunNumbers) -> Iterator[Diagnosis]:
    """Devices that are shared, or that are not used well."""
    workers, jobs, base = run.local_workers, run.jobs_at_once, run.baseline
    few_cores = run.cores is not None and workers > 1 and workers * jobs >= run.cores
    if run.result.samples_per_s is not None and few_cores:
        cores = "one core" if run.cores == 1 else f"the {run.cores} cores"
        sentence = f"{workers} workers share {cores} that one worker would use alone: expect about its speed"
        yield Diagnosis("cores", sentence, (1 - 1 / workers) * run.computing, 1 - 1 / workers)
    if run.result.samples_per_s is not None and jobs > 1:
        sentence = f"{jobs} jobs shared this machine; a single run would be faster"
        yield Diagnosis("side by side", sentence, (1 - 1 / jobs) * run.computing, 1 - 1 / jobs)
    if few_cores:
        return
    saved, times = 0.0, 1.0
    if base is not None and base.compute_s and run.compute_s is not None and run.plan.micro_batch < base.micro_batch:
        times = run.compute_s / base.compute_s
        saved = 1 - 1 / times
    if saved >= STANDS_OUT:
        assert base is not None
        sentence = (
            f"a sample took {times:.1f} times as long to compute as in {base.folder}: micro-batches of "
            f"{run.plan.micro_batch:,} {run.unit} use the device less efficiently than {base.micro_batch:,}"
        )
        yield Diagnosis("micro-batch", sentence, saved * run.computing, saved)
    elif jobs == 1 and not any(_busy(run)):
        yield from _slow_products(run)


def _slow_products(run: RunNumbers) -> Iterator[Diagnosis]:
    used = run.compute_utilization
    if run.rehearsed or used is None or used >= LOW_UTILIZATION:
        return
    peak = run.result.peak_flops_per_s
    assert peak is not None
    settings = () if run.compiled or run.cores is not None else ("compile=true",)  # on CPUs it gains nothing
    sentence = (
        f"forward and backward pass reached {used:.0%} of the devices' peak ({flops_words(peak)}): "
        "their operations are small; "
        f"use micro-batches of more than {run.plan.micro_batch:,} {run.unit}"
        f"{''.join(f', or {one}' for one in settings)}"
    )
    yield Diagnosis("utilization", sentence, (1 - used / COMMON_UTILIZATION) * run.computing, used, settings)


def _fixed_costs(run: RunNumbers) -> Iterator[Diagnosis]:
    """Parts of a run that are not training."""
    result, wall, lost_s = run.result, f"{run.wall_s:.1f} s", run.restarts.lost_s
    share = run.of_wall(lost_s)
    if share >= STANDS_OUT:
        sentence = (
            f"{share:.0%} of this run ({lost_s:.1f} of {wall}) was lost when its workers had to be started again: "
            "see notes"
        )
        yield Diagnosis("restarted", sentence, share, share)
    share = run.of_wall(result.first_step_s)
    if share >= FIXED_COST_STANDS_OUT:
        compile_s = result.first_step_compile_s
        compiling = f", {compile_s:.1f} s of them compiling" if compile_s else ""
        sentence = (
            f"start-up was {share:.0%} of this run ({result.first_step_s:.1f} of {wall} until the end of the "
            f"first step{compiling}): a fixed cost; longer runs amortise it"
        )
        yield Diagnosis("start-up", sentence, share, share)
    share = run.of_wall(run.ending_s)
    if share >= FIXED_COST_STANDS_OUT:
        sentence = (
            f"{share:.0%} of this run was spent after training and evaluation ({run.ending_s:.1f} of {wall}: "
            "saving the model, closing the ledger, tracking): a fixed cost; longer runs amortise it"
        )
        yield Diagnosis("ending", sentence, share, share)
    share = run.of_wall(run.compile_s)
    if share >= STANDS_OUT:
        fixed = "a fixed cost of compile=true; longer runs amortise it"
        cause = fixed if run.compiled else "each batch shape is a separate program; use fewer device.length_buckets"
        sentence = f"compiling took {share:.0%} of this run ({run.compile_s:.1f} s): {cause}"
        settings: tuple[str, ...] = () if run.compiled else ("device.length_buckets",)
        yield Diagnosis("compiling", sentence, share, share, settings)
    share = run.of_wall(result.evaluation_s)
    if share >= STANDS_OUT:
        settings = ("evaluation.every_steps", "evaluation.micro_batch")
        sentence = f"evaluation took {share:.0%} of this run: use a larger {' or '.join(settings)}"
        yield Diagnosis("evaluation", sentence, share, share, settings)


def _nothing(run: RunNumbers) -> Iterator[Diagnosis]:
    if run.result.samples_per_s is None:
        return
    share = None if run.step_share is None else run.in_steps(*PER_SAMPLE, "optimizer")
    no_phases = "no per-phase times: a step is one compiled program"
    computed = no_phases if share is None else f"{share:.0%} of a step was computation"
    efficiency = run.scaling_efficiency
    slow = f", but scaling efficiency is {efficiency:.0%}" if efficiency and efficiency < 1 - STANDS_OUT else ""
    used = run.model_flops_utilization
    computed += f"; model FLOPs utilization {used:.0%}" if used is not None else ""
    yield Diagnosis("nothing", f"{computed}; no single bottleneck found{slow}", 0.0, share)
