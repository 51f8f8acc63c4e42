"""Findings of an audit, from what every process has recorded.

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
    """Find what is wrong, and the coverage of each epoch. `records`: of all processes, by rank."""
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
        fix = "give Audit the optimizer that is stepped"
        return Finding("nothing", "no step", "no optimizer step was followed", fix)
    without = sum(not step.batches for step in steps)
    if without:
        seen = f"{without:,} of {len(steps):,} optimizer steps took no batch that was followed"
        what = "the loader that is iterated and the model that is called with each batch"
        return Finding("nothing", "no batch", seen, f"give Audit {what}, as they are after prepare or DDP")
    return None


def _outside(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Parameters that no optimizer trains."""
    record = records[0]
    if record.outside:
        seen = (
            f"{len(record.outside)} of {len(record.ended)} parameters got gradients and never changed, since they are "
            f"not in the optimizer ({_names(record.outside)})"
        )
        fix = "give it all parameters, or set requires_grad to False"
        if record.foreign:
            seen += f", which has {record.foreign} tensors that are not the model's"
            fix = "make it after the model has its last form"
        yield Finding("parameters", "outside the optimizer", seen, fix)


def _different(values: Iterable[Mapping[str, str]]) -> list[str]:
    """Names whose checksums are not the same in all processes."""
    first, *others = values
    return [name for name, one in first.items() if any(other.get(name) != one for other in others)]


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _starts(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    if names := _different(record.started for record in records):
        which = f"{len(names)} of {len(records[0].started)} parameters: {_names(names)}"
        seen = f"the {len(records)} processes started with different weights ({which})"
        fix = "broadcast them before training, as DistributedDataParallel does"
        yield Finding("weights", "different at the start", seen, fix)


def _steps(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Settings of the optimizer, and steps, that are not the same in all processes."""
    counts = [len(record.steps) for record in records]
    if len(set(counts)) > 1:
        yield Finding("steps", "different numbers", f"the processes took {counts} optimizer steps")
    for steps in zip(*(record.steps for record in records), strict=False):
        for group, rates in enumerate(zip(*(step.lrs for step in steps), strict=False)):
            if len(set(rates)) > 1:
                shown = ", ".join(f"{lr:.4g}" for lr in rates)
                place = f"of parameter group {group} " if len(steps[0].lrs) > 1 else ""
                seen = f"in step {steps[0].step} the processes have different learning rates {place}({shown})"
                yield Finding("schedule", "differs by process", seen, "set the same in all, so that weights stay equal")
                return


def _ends(records: Sequence[ProcessRecord], gradient: Finding | None) -> Iterator[Finding]:
    """Weights that differ at the end, without another finding that explains it."""
    names = _different(record.ended for record in records)
    if names and gradient is None and not [*_starts(records), *_steps(records)]:
        which = f"{len(names)} of {len(records[0].ended)} parameters: {_names(names)}"
        seen = f"the {len(records)} processes end with different weights ({which})"
        fits = ("gradients were not averaged in later steps", "weights were changed outside of the optimizer")
        yield Finding("weights", "different at the end", seen, fits=fits)


def _buffers(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    if len({len(record.steps) for record in records}) == 1 and (names := _different(one.buffers for one in records)):
        seen = f"{len(names)} buffers are not the same in all processes, and those of one are saved ({_names(names)})"
        fix = "DistributedDataParallel broadcasts them (broadcast_buffers=True), SyncBatchNorm shares statistics"
        yield Finding("buffers", "different", seen, fix)


def _evaluating(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    steps = [step.step for step in records[0].steps if step.evaluating]
    if steps:
        seen = (
            f"{len(steps):,} of {len(records[0].steps):,} steps, from step {steps[0]}, were trained in evaluation "
            "mode, without dropout and with fixed running statistics"
        )
        yield Finding("mode", "evaluation mode", seen, "call model.train() before each epoch")


def _schedule(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """A scheduler that is stepped too often or never, or whose schedule has another length than the run."""
    steps, schedules = records[0].steps, records[0].schedules
    rates, counts, total = [max(step.lrs) for step in steps], [step.scheduled[-1] for step in steps], len(steps)
    ratio = statistics.mode(b - a for a, b in itertools.pairwise(counts)) if total > 1 else 0
    ends = [(one.stepped, one.length) for one in schedules if one.length]
    at_0 = next((number for number, lr in enumerate(rates) if lr == 0 and not any(rates[number:])), total)
    early = total - at_0 > max(1, _END * total)
    place = f"the learning rate is 0 from step {at_0 + 1} of {total}" if early else ""
    as_long = any(abs(stepped - length) <= max(ratio, _END * length) for stepped, length in ends)
    if ratio > 1 and not as_long and (early or not any(one.multiplied for one in schedules)):
        seen = "; ".join(filter(None, (place, f"the scheduler was stepped {ratio} times for each optimizer step")))
        yield _stepped_often(records, seen, ratio)
    elif early:
        shortest = min((one for one in ends if one[1] < one[0]), key=lambda one: one[1], default=None)
        shorter, more = "a schedule that is shorter than the run", "one that is stepped more than once for each step"
        if shortest is not None:
            yield Finding("schedule", "too short", f"{place}; {_lengths(*shortest)}")
        else:
            yield Finding("schedule", "0 early", place, fits=(shorter, more))
    epochs = {epoch for step in steps for epoch, _ in step.batches}
    several = len(epochs) > 1 or records[0].sampler.whole  # a scheduler may be stepped after each epoch
    if ends and several and all(one.stepped <= 0 for one in schedules):
        seen = f"the scheduler was never stepped, and its schedule is {ends[0][1]} steps long"
        fix = "call scheduler.step() after each optimizer.step(), or after each epoch if it counts epochs"
        yield Finding("schedule", "never stepped", seen, fix)
    for stepped, length in ends:
        after = [lr for lr, count in zip(rates, counts, strict=True) if count >= length]
        longer = ratio == 1 and not early and stepped > (1 + _END) * length
        if longer and max(after) > after[0] + _LEFT * max(rates):
            seen = f"the learning rate has risen again: {_lengths(stepped, length)}"
            by_epoch = "its length (T_max) counts epochs and it is stepped for each batch"
            others = ("it is shorter than the run", "these are restarts on purpose")
            yield Finding("schedule", "rises again", seen, fits=(by_epoch, *others))
            return
        if rates[-1] > _LEFT * max(rates) and 0 < stepped < 0.9 * length:
            share = f"{100 * rates[-1] / max(rates):.0f}%"
            seen = f"the learning rate has fallen to {share} of its peak at the end: {_lengths(stepped, length)}"
            fits = ["its length counts the batches of all processes or of accumulation", "the run has ended early"]
            if not ratio:
                fits.insert(0, "its length counts optimizer steps and it is stepped once in each epoch")
            yield Finding("schedule", "too long", seen, fits=tuple(fits))
            return


def _stepped_often(records: Sequence[ProcessRecord], seen: str, ratio: int) -> Finding:
    steps, workers = records[0].steps, len(records)
    inside = [step for step in steps if len(step.batches) > 1 and len({*step.scheduled[:-1]}) == len(step.batches)]
    if len(inside) > len(steps) / 2:
        seen = f"{seen}, in each of its {len(inside[0].batches)} batches"
        return Finding("schedule", "stepped per batch", seen, "step it after optimizer.step() only")
    if ratio == workers and any(one.multiplied for one in records[0].schedules):
        seen = f"{seen}, by Accelerate for each of {workers} processes"
        return Finding("schedule", "stepped by Accelerate", seen, "let its length count the steps of all processes")
    by_process = f", as once for each of {workers} processes" if ratio == workers else ""
    return Finding("schedule", "stepped too often", seen + by_process, "step it once")


def _lengths(stepped: int, length: int) -> str:
    return f"the schedule is {length} steps long, and was stepped {stepped} times"
