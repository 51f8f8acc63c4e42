"""What an audit finds wrong, from what every process has recorded."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Share of the steps at the end of a run in which a learning rate of 0 is normal.
_END = 0.05
#: What is left of a falling learning rate if its schedule was as long as the run, at most.
_LEFT = 0.25
#: Differences of a gradient from that of the whole batch: by rounding, also in bf16; and times what chance makes.
_ROUNDING, _CHANCE = 0.02, 3.0
#: Share of an epoch that is repeated to give all processes equal batches, at most.
_PADDING = 0.2


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of one process. `batches`: epoch, from 0, and sample ids of each forward pass."""

    step: int
    lr: float
    batches: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class GradientCheck:
    """The gradient of a step, compared with that of its samples in one batch.

    `scale`: how long it is in the direction of the other; `difference`: of the rest, relative to the other's length;
    `chance`: the same of two gradients of that batch, which dropout makes different.
    """

    step: int
    scale: float
    difference: float
    chance: float


@dataclass(frozen=True)
class ProcessRecord:
    """All that one process has recorded.

    `weights`: a checksum of its weights at the end, None if they are sharded. `untrained`: batches of each epoch that
    were made before the next began, and never trained on.
    """

    steps: tuple[StepRecord, ...]
    weights: str | None
    gradient: GradientCheck | None
    untrained: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class EpochCoverage:
    """One epoch over all processes. `missing`, `repeated`: samples that were never, and more than once, trained on."""

    epoch: int
    samples_seen: int
    unique: int
    missing: int
    repeated: int


@dataclass(frozen=True)
class Finding:
    """Something wrong. `kind`: coverage, order, schedule, gradient or weights; `sentence`: what, and what to do."""

    kind: str
    sentence: str


@dataclass(frozen=True)
class Found:
    """What was found, and the coverage of each epoch."""

    findings: tuple[Finding, ...]
    epochs: tuple[EpochCoverage, ...]


def find(records: Sequence[ProcessRecord], samples: int) -> Found:
    """`records`: of all processes; `samples`: of the data set."""
    epochs = tuple(_epochs(records, samples))
    if (nothing := _followed(records)) is not None:
        return Found((nothing, *_weights(records)), epochs)
    whole = any(_on_all(one, len(records), samples) for one in epochs)
    parts = (
        *(_weights(records), _steps(records), _coverage(records, epochs, samples), _order(records)),
        *(() if whole else (_schedule(records),)),  # such a run has more steps than its schedule was made for
        *(_gradient(records), _untrained(records)),
    )
    return Found(tuple(one for part in parts for one in part), epochs)


def _followed(records: Sequence[ProcessRecord]) -> Finding | None:
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


def _on_all(epoch: EpochCoverage, workers: int, samples: int) -> bool:
    """Whether every process has trained on all samples."""
    return workers > 1 and epoch.samples_seen >= 0.9 * workers * samples


def _epochs(records: Sequence[ProcessRecord], samples: int) -> Iterator[EpochCoverage]:
    seen: dict[int, Counter[int]] = {}
    for record in records:
        for epoch, ids in (batch for step in record.steps for batch in step.batches):
            seen.setdefault(epoch, Counter()).update(ids)
    for epoch, counts in sorted(seen.items()):
        repeated = sum(times > 1 for times in counts.values())
        yield EpochCoverage(epoch, sum(counts.values()), len(counts), samples - len(counts), repeated)


def _weights(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    known = [record.weights for record in records if record.weights is not None]
    if len(set(known)) > 1:
        rule = "gradients were not averaged; wrap the model in DistributedDataParallel, or accelerator.prepare(model)"
        yield Finding("weights", f"the {len(records)} processes end with different weights: {rule}")


def _steps(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    counts = [len(record.steps) for record in records]
    if len(set(counts)) > 1:
        yield Finding("steps", f"the processes took different numbers of optimizer steps: {counts}")
    for steps in zip(*(record.steps for record in records), strict=False):
        if len({step.lr for step in steps}) > 1:
            rates = ", ".join(f"{step.lr:.4g}" for step in steps)
            yield Finding("schedule", f"in step {steps[0].step} the processes have different learning rates: {rates}")
            return


def _coverage(records: Sequence[ProcessRecord], epochs: Sequence[EpochCoverage], samples: int) -> Iterator[Finding]:
    workers = len(records)
    for one in epochs[:-1] or epochs:  # the last epoch may have been left early
        if _on_all(one, workers, samples):
            yield Finding(
                "coverage",
                f"every process trains on all {samples:,} samples: epoch {one.epoch} saw each {workers} times; shard "
                "the loader by accelerator.prepare(loader), or a DistributedSampler",
            )
            return
        if one.repeated:
            padded = workers > 1 and one.samples_seen <= (1 + _PADDING) * samples
            why = (
                "to give all processes equal batches; even_batches=False (Accelerate) or drop_last=True "
                "(DistributedSampler) avoids it"
                if padded
                else "a sampler with replacement, or one that is not shared by the processes?"
            )
            times = f"epoch {one.epoch} saw {one.repeated:,} of {samples:,} samples more than once"
            yield Finding("coverage", f"{times}: {why}")
            return
    if any(one.missing for one in epochs[:-1]) and len(_ever(records)) > max(one.unique for one in epochs[:-1]):
        worst = max(epochs[:-1], key=lambda one: one.missing)
        yield Finding(
            "coverage",
            f"epoch {worst.epoch} left out {worst.missing:,} of {samples:,} samples: drop_last, or an epoch that was "
            "left early?",
        )


def _ever(records: Sequence[ProcessRecord]) -> set[int]:
    """The samples of all epochs: a sampler may be of a part of the data set."""
    return {one for record in records for step in record.steps for _, ids in step.batches for one in ids}


def _untrained(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Batches that were made and not trained on."""
    for epoch, batches in records[0].untrained:
        yield Finding(
            "coverage",
            f"{batches} batches of epoch {epoch} were made and not trained on: the loop left the epoch early, or "
            "skipped its first batches, and then the samples that are listed for its steps are earlier ones",
        )
        return


def _order(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Each epoch in the same order: a DistributedSampler whose epoch is not set."""
    orders: dict[int, list[int]] = {}
    for epoch, ids in (batch for step in records[0].steps for batch in step.batches):
        orders.setdefault(epoch, []).extend(ids)
    first, *others = orders.values()
    if others and first != sorted(first) and all(one == first[: len(one)] for one in others):
        rule = "call sampler.set_epoch(epoch) before each epoch"
        yield Finding("order", f"all {len(orders)} epochs have the same shuffled order: {rule}")


def _schedule(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """A schedule that ended long before the run, or long after: it was stepped too often, or too rarely."""
    rates = [step.lr for step in records[0].steps]
    peak, total = max(rates), len(rates)
    at_0 = next((number for number, lr in enumerate(rates) if lr == 0 and not any(rates[number:])), total)
    workers, batches = len(records), max(len(step.batches) for step in records[0].steps)
    if total - at_0 > max(1, _END * total):
        ratio = total / at_0 if at_0 else float("inf")
        yield Finding(
            "schedule",
            f"the learning rate is 0 from step {at_0 + 1} of {total}, after {100 * at_0 / total:.0f}%: the schedule "
            f"was stepped {ratio:.2g} times for each optimizer step{_cause(ratio, workers, batches)}",
        )
        return
    after_peak = rates[rates.index(peak) :]
    falls = all(b < a for a, b in itertools.pairwise(after_peak)) and len(after_peak) > total / 2
    if falls and rates[-1] > _LEFT * peak:
        yield Finding(
            "schedule",
            f"the learning rate has fallen to {100 * rates[-1] / peak:.0f}% of its peak at the end: if it should reach "
            "0, the schedule is longer than the run; its length counts the batches of all processes, or those of "
            "accumulation, and it is stepped once for each optimizer step",
        )


def _cause(ratio: float, workers: int, batches: int) -> str:
    if workers > 1 and abs(ratio - workers) < 0.2 * workers:
        return (
            f", as by each of {workers} processes: let accelerator.prepare(scheduler) count, or its length be shorter"
        )
    if batches > 1 and abs(ratio - batches) < 0.2 * batches:
        return f", as in each of {batches} batches of a step: step it after optimizer.step() only"
    return ": step it once for each optimizer step"


def _gradient(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    check, steps = records[0].gradient, records[0].steps
    if check is None:
        return
    usual = statistics.mode(len(step.batches) for step in steps)
    if len(steps[check.step - 1].batches) > usual:  # with those of a step that fp16's scaler skipped, or of an end
        return
    noise = max(_ROUNDING, _CHANCE * check.chance)
    if check.difference > noise:
        rule = "losses are averaged by batch, whatever number of labels each has; divide sums by the global number"
        sentence = f"differs by {100 * check.difference:.2g}% from that of its samples in one batch: {rule}"
        yield Finding("gradient", f"the gradient of step {check.step} {sentence}")
    elif check.scale > 1 + noise:  # a shorter one was clipped
        rule = "divide each loss by the number of batches that are accumulated, once; DDP averages over processes"
        sentence = f"is {check.scale:.3g} times that of its samples in one batch: {rule}"
        yield Finding("gradient", f"the gradient of step {check.step} {sentence}")
