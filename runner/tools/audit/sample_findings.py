"""Mistakes in the samples that an audited loop trained on, and in their order."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.tools.audit.records import Finding, ProcessRecord, SamplerFacts

#: Batches of a process, by epoch, in order: their ids, and whether an optimizer step used them.
Read = dict[int, list[tuple[tuple[Any, ...], bool]]]


@dataclass(frozen=True)
class EpochCoverage:
    """One epoch over all processes. `missing`, `repeated`: samples that were never, and more than once, trained on.

    `discarded`: samples whose gradients were cleared before an optimizer step, so that they were not trained on.
    """

    epoch: int
    samples_seen: int
    unique: int
    missing: int
    repeated: int
    discarded: int


class Samples:
    """Samples that all processes took from their loaders. Processes with different data sets get different ids."""

    def __init__(self, records: Sequence[ProcessRecord]) -> None:
        self.facts = [record.sampler for record in records]
        self.whole = sorted(frozenset.intersection(*(one.whole for one in self.facts)))
        apart = len({record.data for record in records} - {None}) > 1
        #: Whether data sets that differ are cut into parts for the processes as well.
        self.mixed = apart and any(one.shards > 1 for one in self.facts)
        self.size = sum(record.samples for record in records) if apart else records[0].samples
        self.reads: list[Read] = [{} for _ in records]
        for rank, (record, read) in enumerate(zip(records, self.reads, strict=True)):
            parts = [part for step in record.steps for part in ((step.discarded, False), (step.batches, True))]
            for batches, trained in [*parts, (record.left_over, False)]:
                for epoch, ids in batches:
                    own = tuple(one * len(records) + rank for one in ids) if apart else ids
                    read.setdefault(epoch, []).append((own, trained))

    def parts(self, epoch: int) -> list[list[Any]]:
        """The samples of each process in an epoch, also those that were then discarded."""
        return [_ids(read.get(epoch, [])) for read in self.reads]

    @property
    def all_on_all(self) -> bool:
        """Return whether each of several processes has trained on all samples in an epoch."""
        return len(self.reads) > 1 and any(
            all(len(set(part)) >= 0.9 * self.size for part in self.parts(epoch)) for epoch in self.whole
        )

    def coverage(self) -> Iterator[EpochCoverage]:
        for epoch in sorted(set().union(*self.reads)):
            batches = [one for read in self.reads for one in read.get(epoch, [])]
            counts = Counter(_ids([one for one in batches if one[1]]))
            repeated = sum(times > 1 for times in counts.values())
            discarded = sum(len(ids) for ids, trained in batches if not trained)
            missing = self.size - len(counts)
            yield EpochCoverage(epoch, sum(counts.values()), len(counts), missing, repeated, discarded)


def _ids(batches: Sequence[tuple[tuple[Any, ...], bool]]) -> list[Any]:
    return [one for ids, _ in batches for one in ids]


def sample_findings(samples: Samples) -> Iterator[Finding]:
    if samples.mixed:
        fits = (
            "random_split or shuffling that is seeded by rank",
            "an unsorted list of files",
            "data that are sharded by hand as well as by the sampler",
        )
        seen = "the processes have different data sets, and their samplers deal parts of them as if it was one"
        yield Finding("coverage", "different data", seen, fits=fits)
        yield from _order(samples)
        return
    if samples.all_on_all:
        times = f"epoch {samples.whole[0]} saw each {len(samples.reads)} times"
        seen = f"every process trains on all {samples.size:,} samples ({times})"
        fix = "shard the loader by accelerator.prepare(loader), or a DistributedSampler, or the data by rank"
        yield Finding("coverage", "not sharded", seen, fix)
    else:
        yield from list(_repeated(samples))[:1]
    missing = list(_missing(samples))
    yield from missing
    if not (missing and all(map(_ascending, samples.reads))):  # which names both
        yield from _order(samples)


def _repeated(samples: Samples) -> Iterator[Finding]:
    """Samples of which an epoch has several."""
    workers = len(samples.reads)
    if any(one.replacement for one in samples.facts):
        first, *others = samples.parts(min(samples.reads[0], default=0))
        if others and len(set(first)) > 1 and all(part == first for part in others):
            seen = f"all {workers} processes draw the same {len(first):,} samples in the same order, with replacement"
            fix = "give each process's sampler a generator with a seed by rank"
            yield Finding("coverage", "the same random state", seen, fix)
        return
    for epoch in samples.whole or sorted(samples.reads[0])[:1]:  # what a part of one repeats is repeated all the same
        parts = samples.parts(epoch)
        counts = Counter(one for part in parts for one in part)
        repeated, missing = [one for one, times in counts.items() if times > 1], samples.size - len(counts)
        if not repeated:
            continue
        seen = f"epoch {epoch} saw {len(repeated):,} of {samples.size:,} samples more than once{_some(repeated)}"
        before_last = Counter(one for read in samples.reads for one in _ids(read.get(epoch, [])[:-1]))
        if epoch in samples.whole and workers > 1 and not missing and max(before_last.values(), default=1) == 1:
            fix = "even_batches=False (Accelerate) or drop_last=True (DistributedSampler) avoids it"
            yield Finding("coverage", "padded", f"{seen}, all in the last batches, to give all equal batches", fix)
        elif workers > 1 and len({frozenset(part) for part in parts}) == 1:
            what = f"the same {len(counts):,} of {samples.size:,} samples in epoch {epoch}{_some(repeated)}"
            yield _shared(samples.facts, epoch, f"all {workers} processes train on {what}")
        elif all(len(set(part)) == len(part) for part in parts):
            never = f" and {missing:,} never" if epoch in samples.whole and missing else ""
            yield _shared(samples.facts, epoch, f"{seen}{never}, each in different processes")
        else:
            fits = ("a sampler with replacement or that oversamples", "batches that are trained on twice")
            yield Finding("coverage", "repeated", f"{seen}, also within a process", fits=fits)


def _shared(facts: Sequence[SamplerFacts], epoch: int, seen: str) -> Finding:
    """Find why several processes have the same samples, by what their samplers say of themselves."""
    ranks, seeds = [one.rank for one in facts], [one.seed for one in facts]
    epochs = [one.epochs_set[epoch] if one.epochs_set else None for one in facts]
    if len(set(ranks)) == 1 and None not in ranks:
        seen = f"{seen}; their samplers all have rank {ranks[0]}"
        return Finding("coverage", "one rank for all", seen, "give each the rank of its process")
    for name, values in (("seeds", seeds), ("epochs", epochs)):
        if len(set(values)) > 1 and None not in values:
            shown = ", ".join(map(str, values))
            seen = f"{seen}; their samplers have the {name} {shown} and so deal from different orders"
            return Finding("coverage", f"different {name}", seen, "give all the same")
    fits = (
        "samplers that are seeded by rank or from each process's random state",
        "a wrong rank or num_replicas",
        "a loader that is not sharded",
    )
    return Finding("coverage", "shared", seen, fits=fits)


def _missing(samples: Samples) -> Iterator[Finding]:
    """Samples that the loader should have, and that all epochs, or a large part of them one epoch, leave out."""
    facts, whole = samples.facts, samples.whole
    expected = samples.size if facts[0].replicas is not None else facts[0].length
    if not whole or any(one.replacement for one in facts):
        return
    trained = [{one for part in samples.parts(epoch) for one in part} for epoch in whole]
    repeats = any(len(one) < sum(map(len, samples.parts(epoch))) for one, epoch in zip(trained, whole, strict=True))
    ever = set().union(*trained)
    indices = set(range(samples.size))
    absent = indices - ever if expected == samples.size and ever <= indices else set()  # else a sampler of a part
    global_batch = len(samples.reads) * max(len(ids) for read in samples.reads for ids, _ in read[whole[0]])
    if 0 < len(absent) < global_batch and all(_ascending(read) or _repeating(read) for read in samples.reads):
        seen = f"{len(absent):,} of {expected:,} samples are left out at the end of each epoch{_some(absent)}"
        if any(one.drop_last for one in facts):
            seen = f"{seen}, since the order is always the same, and drop_last=True"
            fix = "shuffle anew in each epoch, or leave out drop_last"
            yield Finding("coverage", "the same tail dropped", seen, fix)
            return
        dropped = "a loader that drops an incomplete batch without shuffling"
        yield Finding("coverage", "a tail left out", seen, fits=(dropped, "a sampler of a part"))
    elif len(trained[0]) <= expected - global_batch and not repeats:
        fits = (
            "a loader that is sharded twice (a DistributedSampler and accelerator.prepare)",
            "num_replicas above the number of processes",
            "a sampler of a part of the data",
        )
        seen = f"epoch {whole[0]} trained on {len(trained[0]):,} of {expected:,} samples"
        yield Finding("coverage", "a part only", seen, fits=fits)


def _order(samples: Samples) -> Iterator[Finding]:
    """The order of the data set, or each epoch in the same one."""
    if max(len(batches) for read in samples.reads for batches in read.values()) == 1:
        return  # in an epoch of one batch there is none
    read, epochs = samples.reads[0], samples.facts[0].epochs_set or ()
    set_epoch = "call sampler.set_epoch(epoch) before each epoch"
    if all(map(_ascending, samples.reads)):
        fix = "shuffle=True, and set_epoch(epoch) of a DistributedSampler; not needed for one epoch of shuffled data"
        seen = "the samples come in the order of the data set in each epoch, without shuffling"
        yield Finding("order", "not shuffled", seen, fix)
    elif _repeating(read):
        seen = f"all {len(read)} epochs have the same shuffled order"
        if len(set(epochs)) == 1:
            yield Finding("order", "epoch not set", f"{seen}, since the sampler's epoch was always the same", set_epoch)
        else:
            fits = ("a seed that is set again in each epoch", "a sampler with a fixed order")
            yield Finding("order", "always the same", seen, fits=fits)
    else:
        for epoch, (one, other) in enumerate(itertools.pairwise(epochs)):
            if one == other and _repeating({number: read.get(number, []) for number in (epoch, epoch + 1)}):
                same = f"epochs {epoch} and {epoch + 1} have the same shuffled order"
                seen = f"{same}, since the sampler's epoch was {one} in both"
                yield Finding("order", "epoch set late", seen, f"{set_epoch}, not after it")
                return


def _ascending(read: Read) -> bool:
    """Return whether a process saw its samples in the order of the data set, and so many that this is no chance."""
    orders = [_ids(batches) for batches in read.values()]
    return max(map(len, orders)) > 5 and all(one == sorted(one) for one in orders)


def _repeating(read: Read) -> bool:
    """Return whether a process saw its samples in the same order in each of several epochs."""
    first, *others = (_ids(batches) for batches in read.values())
    return max(map(len, others), default=0) > 5 and all(one == first[: len(one)] for one in others)


def _some(ids: Collection[Any]) -> str:
    shown = sorted(set(ids))
    return f" (ids {', '.join(map(str, shown[:5]))}{', …' if len(shown) > 5 else ''})"


def discarded_batches(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Batches whose gradients were cleared before an optimizer step."""
    for rank, record in enumerate(records):
        usual = statistics.mode(len(step.batches) for step in record.steps)
        cleared = [step for step in record.steps if step.discarded and step.discarded[-1][0] == step.batches[0][0]]
        if 2 * len(cleared) > len(record.steps) > 1:
            one = cleared[0]
            used = f"step {one.step} used {len(one.batches)} of {len(one.batches) + len(one.discarded)} batches"
            steps = f"in {len(cleared):,} of {len(record.steps):,} steps"
            seen = f"{steps} the gradients of earlier batches were cleared before the step ({used})"
            yield Finding("discarded", "cleared per batch", seen, "call zero_grad() only after optimizer.step()")
            return
        parts = [[one for one in step.discarded if one[0] != step.batches[0][0]] for step in record.steps]
        # Without whole steps: these a GradScaler has skipped.
        tails = [one for part in (*parts, record.left_over) if len(part) % usual for one in part]
        counts = [len(step.batches) for step in record.steps]
        epochs = ", ".join(map(str, sorted({epoch for epoch, _ in tails})))
        ids = _some([one for _, ids in tails for one in ids])
        batches = f"{len(tails)} batch{'es' * (len(tails) > 1)} at the end of epoch {epochs}"
        unused = f"process {rank} computed {batches} that no optimizer step used{ids}"
        if counts[0] == 1 < usual == counts[min(1, len(counts) - 1)]:
            seen = f"optimizer steps come after batches 1, {usual + 1}, {2 * usual + 1}, …: step 1 has 1 batch where "
            seen += f"others have {usual}, as with `if i % {usual} == 0` and i from 0" + f"; {unused}" * bool(tails)
            fix = f"step if (i + 1) % {usual} == 0, and after the last batch of an epoch"
            yield Finding("discarded", "stepped one batch early", seen, fix)
            return
        if tails:
            seen = f"{unused}, since the last step of an epoch is incomplete"
            yield Finding("discarded", "incomplete step", seen, "step also after the last batch of an epoch")
            return


def left_early(records: Sequence[ProcessRecord]) -> Iterator[Finding]:
    """Batches that were made and not trained on."""
    for epoch, batches in records[0].sampler.left_early[:1]:
        seen = f"{batches} batch{'es' * (batches > 1)} of epoch {epoch} were made and not trained on"
        fits = (
            "the loop left the epoch early",
            "it skipped batches, such as one that is not full, and the samples listed for later steps are earlier ones",
        )
        yield Finding("coverage", "left early", seen, fits=fits)
