"""What an audit finds wrong, from what every process has recorded.

A finding names a cause only where the records show it. Otherwise it says what was seen, and which causes would fit.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from runner.tools.audit.gradient_findings import checked, followed
from runner.tools.audit.records import Finding, ProcessRecord
from runner.tools.audit.sample_findings import (
    EpochCoverage,
    Samples,
    discarded_batches,
    left_early,
    sample_findings,
)

#: Share of the steps at the end of a run in which a learning rate of 0 is normal.
_END = 0.05
#: What is left of a falling learning rate if its schedule was as long as the run, at most.
_LEFT = 0.25


def find(records: Sequence[ProcessRecord]) -> tuple[list[Finding], list[EpochCoverage]]:
    """What is wrong, and the coverage of each epoch. `records`: of all processes, by rank."""
    samples = Samples(records)
    epochs = list(samples.coverage())
    if (nothing := _not_followed(records)) is not None:
        return [nothing], epochs
    gradient, apart = followed(records)
    if apart and not _different(record.ended for record in records):
        gradient = None  # weights were averaged later: local SGD
    parts: tuple[Iterable[Finding], ...] = (
        *(_outside(records), [] if gradient is None else [gradient], _starts(records), _steps(records)),
        *(_ends(records, gradient), [] if apart else _buffers(records), sample_findings(samples)),
        # A run on all samples in each process has more steps than its schedule was made for.
        *([] if samples.all_on_all else _schedule(records), checked(records, gradient is not None)),
        *(discarded_batches(records), _evaluating(records), left_early(records)),
    )
    return [one for part in parts for one in part], epochs


def _not_followed(records: Sequence[ProcessRecord]) -> Finding | None:
    """A finding if the loop did not use what the audit follows, so that there is nothing to check."""
    steps = [step for record in records for step in record.steps]
    if not all(record.steps for record in records):
        return Finding("nothing", "no optimizer step was followed: give Audit the optimizer that is stepped")
    without = sum(not step.batches for step in steps)
    if without:
        return Finding(
            "nothing",
            f"{without:,} of {len(steps):,} optimizer steps took no batch that was followed: give Audit the loader "
            "that is iterated and the model that is called with each batch, as they are after prepare or DDP",
        )
    return None


def _outside(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Parameters that no optimizer trains."""
    record = records[0]
    if record.outside:
        others = (
            f", which has {record.foreign} tensors that are not the model's: make it after the model has its last form"
            if record.foreign
            else ": give it all parameters, or set requires_grad to False"
        )
        yield Finding(
            "parameters",
            f"{len(record.outside)} of {len(record.ended)} parameters got gradients and never changed, since they are "
            f"not in the optimizer ({_names(record.outside)}){others}",
        )


def _different(values: Iterable[Mapping[str, str]]) -> list[str]:
    """Names whose checksums are not the same in all processes."""
    first, *others = values
    return [name for name, one in first.items() if any(other.get(name) != one for other in others)]


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _starts(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    if names := _different(record.started for record in records):
        yield Finding(
            "weights",
            f"the {len(records)} processes started with different weights ({len(names)} of {len(records[0].started)} "
            f"parameters: {_names(names)}): broadcast them before training, as DistributedDataParallel does",
        )


def _steps(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Settings of the optimizer, and steps, that are not the same in all processes."""
    counts = [len(record.steps) for record in records]
    if len(set(counts)) > 1:
        yield Finding("steps", f"the processes took different numbers of optimizer steps: {counts}")
    for steps in zip(*(record.steps for record in records), strict=False):
        for group, rates in enumerate(zip(*(step.lrs for step in steps), strict=False)):
            if len(set(rates)) > 1:
                shown = ", ".join(f"{lr:.4g}" for lr in rates)
                place = f"of parameter group {group} " if len(steps[0].lrs) > 1 else ""
                sentence = f"in step {steps[0].step} the processes have different learning rates {place}({shown})"
                yield Finding("schedule", f"{sentence}: set the same in all, so that weights stay equal")
                return


def _ends(records: Sequence[ProcessRecord], gradient: Finding | None) -> Iterator[Finding]:
    """Weights that differ at the end, without another finding that explains it."""
    names = _different(record.ended for record in records)
    if names and gradient is None and not [*_starts(records), *_steps(records)]:
        yield Finding(
            "weights",
            f"the {len(records)} processes end with different weights ({len(names)} of {len(records[0].ended)} "
            f"parameters: {_names(names)}); causes that fit: gradients were not averaged in later steps, or weights "
            "were changed outside of the optimizer",
        )


def _buffers(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    if len({len(record.steps) for record in records}) == 1 and (names := _different(one.buffers for one in records)):
        yield Finding(
            "buffers",
            f"{len(names)} buffers are not the same in all processes, and those of one are saved ({_names(names)}): "
            "DistributedDataParallel broadcasts them (broadcast_buffers=True), SyncBatchNorm shares statistics",
        )


def _evaluating(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    steps = [step.step for step in records[0].steps if step.evaluating]
    if steps:
        yield Finding(
            "mode",
            f"{len(steps):,} of {len(records[0].steps):,} steps, from step {steps[0]}, were trained in evaluation "
            "mode, without dropout and with fixed running statistics: call model.train() before each epoch",
        )


def _schedule(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """A scheduler that is stepped too often, or whose schedule has another length than the run."""
    steps, schedules, workers = records[0].steps, records[0].schedules, len(records)
    rates, total = [max(step.lrs) for step in steps], len(steps)
    at_0 = next((number for number, lr in enumerate(rates) if lr == 0 and not any(rates[number:])), total)
    early = total - at_0 > max(1, _END * total)
    place = f"the learning rate is 0 from step {at_0 + 1} of {total}; " if early else ""
    counts = [step.scheduled[-1] for step in steps]
    ratio = statistics.mode(b - a for a, b in itertools.pairwise(counts)) if total > 1 else 0
    inside = [step for step in steps if len(step.batches) > 1 and len({*step.scheduled[:-1]}) == len(step.batches)]
    multiplied = any(one.multiplied for one in schedules)
    ends = [one for one in schedules if one.length is not None]
    as_long = any(abs(one.stepped - one.length) <= max(ratio, _END * one.length) for one in ends if one.length)
    if ratio > 1 and not as_long and (early or not multiplied):
        seen = f"{place}the scheduler was stepped {ratio} times for each optimizer step"
        if len(inside) > total / 2:
            why = f", in each of its {len(inside[0].batches)} batches: step it after optimizer.step() only"
        elif multiplied and ratio == workers:
            why = f", by Accelerate for each of {workers} processes: let its length count the steps of all processes"
        elif ratio == workers:
            why = f", as once for each of {workers} processes: step it once"
        else:
            why = ": step it once"
        yield Finding("schedule", seen + why)
    elif early and any(one.length < one.stepped for one in ends if one.length):
        one = min(ends, key=lambda one: one.length or 0)
        yield Finding(
            "schedule", f"{place}the schedule is {one.length} steps long, and was stepped {one.stepped} times"
        )
    elif early:
        fits = "a schedule that is shorter than the run, or that is stepped more than once for each optimizer step"
        yield Finding("schedule", f"{place}causes that fit: {fits}")
    epochs = {epoch for step in steps for epoch, _ in step.batches}
    several = len(epochs) > 1 or records[0].sampler.whole  # a scheduler may be stepped after each epoch
    if ends and several and all(one.stepped <= 0 for one in schedules):
        yield Finding(
            "schedule",
            f"the scheduler was never stepped, and its schedule is {ends[0].length} steps long: call scheduler.step() "
            "after each optimizer.step(), or after each epoch if it counts epochs",
        )
    for one in ends if ratio == 1 and not early else []:
        after = [lr for lr, count in zip(rates, counts, strict=True) if count >= (one.length or total)]
        if one.stepped > (1 + _END) * (one.length or total) and max(after) > after[0] + _LEFT * max(rates):
            yield Finding(
                "schedule",
                f"the learning rate has risen again: the schedule is {one.length} steps long, and was stepped "
                f"{one.stepped} times; causes that fit: its length (T_max) counts epochs and it is stepped for each "
                "batch, it is shorter than the run, or these are restarts on purpose",
            )
            return
    by_epoch = "" if ratio else "its length counts optimizer steps and it is stepped once in each epoch, "
    for one in ends:
        if rates[-1] > _LEFT * max(rates) and one.length and 0 < one.stepped < 0.9 * one.length:
            yield Finding(
                "schedule",
                f"the learning rate has fallen to {100 * rates[-1] / max(rates):.0f}% of its peak at the end: the "
                f"schedule is {one.length} steps long, and was stepped {one.stepped} times; causes that fit: {by_epoch}"
                "its length counts the batches of all processes or of accumulation, or the run has ended early",
            )
            return
