"""What is odd about the runs: found, named and shown. Nothing here takes a value out of a mean."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from runner.compare.comparability import EQUIVALENT, comparability
from runner.compare.comparison import Block, Finding
from runner.compare.runs import SINGLE, Run
from runner.compare.setups import Setup
from runner.compare.statistics import difference, mean, modified_z, speed_up
from runner.compare.verdict import DIFFERENT, decide

#: Iglewicz & Hoaglin (1993): a modified z beyond this is a potential outlier. The MAD of three values can be tiny by
#: luck, hence the second condition on the size.
OUTLIER_Z, OUTLIER_FROM = 3.5, 3
TIME_TOLERANCE = 0.10
COLLAPSED_MARGINS = 5


def with_findings(blocks: Sequence[Block], margin: float) -> tuple[Block, ...]:
    """The blocks with what was found in each, numbered through the whole report."""
    numbers = itertools.count(1)
    return tuple(
        dataclasses.replace(
            block,
            findings=tuple(dataclasses.replace(found, number=next(numbers)) for found in find(block, margin)),
        )
        for block in blocks
    )


def find(block: Block, margin: float) -> Iterator[Finding]:
    """All findings of a block, those that put numbers in doubt first."""
    setups = [row.setup for row in block.rows]
    outliers = [outlier for setup in setups for outlier in _timing_outliers(setup)]
    yield from _named_outliers(block, outliers)
    yield from _spread_timings(block, setups, {outlier.setup.name for outlier in outliers})
    for setup in setups:
        yield from _collapsed(block, setup, margin)
    yield from _twins(block, setups, margin)
    yield from _slower(block)
    yield from _machines(setups)
    yield from _side_by_side(setups)
    yield from _rehearsed(setups)
    yield from _untimed(setups)
    yield from _not_comparable(block)


@dataclass(frozen=True)
class _Outlier:
    setup: Setup
    run: Run
    seconds: float
    ratio: float

    @property
    def slow(self) -> bool:
        return self.ratio > 1


def _timing_outliers(setup: Setup) -> list[_Outlier]:
    times = setup.seconds
    if len(times) < OUTLIER_FROM:
        return []
    middle = median(times.values())
    scores = modified_z(list(times.values()))
    runs = {run.seed: run for run in setup.runs}
    return [
        _Outlier(setup, runs[seed], value, value / middle)
        for (seed, value), score in zip(times.items(), scores, strict=True)
        if abs(score) > OUTLIER_Z and abs(value / middle - 1) > TIME_TOLERANCE
    ]


def _named_outliers(block: Block, outliers: Sequence[_Outlier]) -> Iterator[Finding]:
    """One finding for a seed that is off in several setups, the single ones after it."""
    groups: dict[tuple[int, bool], list[_Outlier]] = {}
    for outlier in outliers:
        groups.setdefault((outlier.run.seed, outlier.slow), []).append(outlier)
    for (seed, slow), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        sentences = tuple(_outlier_sentence(block, outlier) for outlier in members)
        names, sources = tuple(one.setup.name for one in members), tuple(one.run.source for one in members)
        if len(members) == 1:
            yield Finding("timing outlier", sentences[0], names, sources, marks=True)
            continue
        why = "another machine, or another job beside it?" if slow else "another machine?"
        text = f"seed {seed} is {'slow' if slow else 'fast'} in {_shares(block, members)}: {why}"
        yield Finding("timing outlier", text, names, sources, sentences, marks=True)


def _shares(block: Block, members: Sequence[_Outlier]) -> str:
    """`5 of the 8 setups with 4 workers by accumulation`, family by family."""
    parts = []
    for family in dict.fromkeys(one.setup.family for one in members):
        having = sum(one.setup.family == family for one in members)
        timed = sum(row.setup.family == family and len(row.setup.seconds) >= OUTLIER_FROM for row in block.rows)
        workers, method = family
        what = "one worker" if workers == 1 else f"{workers} workers{'' if method == SINGLE else f' by {method}'}"
        parts.append(f"{having} of the {timed} setups with {what}")
    return " and ".join(parts)


def _outlier_sentence(block: Block, outlier: _Outlier) -> str:
    text = (
        f"{_full_name(block, outlier.setup)}, seed {outlier.run.seed}: {seconds(outlier.seconds)} s, "
        f"{outlier.ratio:.2f} × the median of its setup"
    )
    if outlier.setup is block.baseline:
        return f"{text}; it is the baseline's, so every speed-up here rests on it"
    row = next(row for row in block.rows if row.setup is outlier.setup)
    if row.speed_up is None:
        return text
    rest = {seed: value for seed, value in outlier.setup.seconds.items() if seed != outlier.run.seed}
    without = speed_up(rest, block.baseline.seconds).value
    return f"{text}; without it {without:.1f}×, not {row.speed_up.value:.1f}×"


def seconds(value: float) -> str:
    """To a tenth of a second, or to three digits where that is finer."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _full_name(block: Block, setup: Setup) -> str:
    return f"{setup.name} · {block.key.samples * block.key.epochs:,} samples"


def _spread_timings(block: Block, setups: Sequence[Setup], with_outlier: set[str]) -> Iterator[Finding]:
    for setup in setups:
        times = list(setup.seconds.values())
        if len(times) < 2 or setup.name in with_outlier or max(times) <= (1 + TIME_TOLERANCE) * min(times):
            continue
        text = (
            f"{_full_name(block, setup)}: times spread from {seconds(min(times))} to {seconds(max(times))} s "
            f"({max(times) / min(times):.2f} ×), none of them an outlier by the rule"
        )
        yield Finding("timings spread", text, (setup.name,), tuple(run.source for run in setup.runs))


def _collapsed(block: Block, setup: Setup, margin: float) -> Iterator[Finding]:
    """Seeds far worse than their setup's others, or than half of the baseline."""
    values = [run.metric for run in setup.runs]
    diverged = [run for run in setup.runs if not math.isfinite(run.metric)]
    if diverged:
        seeds = _seeds(diverged)
        text = f"{_full_name(block, setup)}, {seeds}: {block.key.metric} is no number, so the setup has no mean"
        yield Finding("diverged", text, (setup.name,), tuple(run.source for run in diverged), marks=True)
        return
    sign = 1.0 if block.key.goal == "max" else -1.0
    middle, limit = median(values), _hopeless(block)
    scores = modified_z(values) if len(values) >= OUTLIER_FROM else [0.0] * len(values)
    collapsed = [
        run
        for run, score in zip(setup.runs, scores, strict=True)
        if (sign * (middle - run.metric) >= COLLAPSED_MARGINS * margin and abs(score) > OUTLIER_Z)
        or (limit is not None and sign * (limit - run.metric) > 0)
    ]
    if not collapsed:
        return
    numbers = ", ".join(f"{run.metric:.4g}" for run in collapsed)
    if len(collapsed) == len(setup.runs):
        half = "half" if sign > 0 else "twice"
        text = f": every seed collapsed ({numbers}; all worse than {half} of the baseline's mean)"
    else:
        text = f", {_seeds(collapsed)} collapsed: {numbers}, the setup's median is {middle:.4g}"
    text = _full_name(block, setup) + text
    yield Finding("collapsed", text, (setup.name,), tuple(run.source for run in collapsed), marks=True)


def _hopeless(block: Block) -> float | None:
    """Half of the baseline's mean, or twice it where less is better; None where that says nothing."""
    middle = mean(run.metric for run in block.baseline.runs)
    if math.isnan(middle) or middle <= 0:
        return None
    return middle / 2 if block.key.goal == "max" else middle * 2


def _seeds(runs: Sequence[Run]) -> str:
    numbers = [str(run.seed) for run in runs]
    if len(numbers) == 1:
        return f"seed {numbers[0]}"
    return f"seeds {', '.join(numbers[:-1])} and {numbers[-1]}"


def _twins(block: Block, setups: Sequence[Setup], margin: float) -> Iterator[Finding]:
    for a, b in itertools.combinations(setups, 2):
        if not _same_but_for_the_label(a, b):
            continue
        odd = []
        if a.seconds and b.seconds:
            ratio = speed_up(a.seconds, b.seconds).value
            if max(ratio, 1 / ratio) > 1 + TIME_TOLERANCE:
                times = " and ".join(f"{seconds(fmean(one.seconds.values()))} s" for one in (a, b))
                odd.append(f"their times differ by a factor of {max(ratio, 1 / ratio):.2f} ({times})")
        verdict = decide(difference(a.metrics, b.metrics), margin, block.key.goal)
        if verdict.kind == DIFFERENT:
            means = " and ".join(f"{mean(one.metrics.values()):.4g}" for one in (a, b))
            odd.append(f"their {block.key.metric} is different ({means})")
        if odd:
            text = f"{_full_name(block, a)} and {b.name} are the same experiment, both synchronous at every step, yet "
            yield Finding("twins", text + " and ".join(odd), (a.name, b.name))


def _same_but_for_the_label(a: Setup, b: Setup) -> bool:
    if any((one.first.accumulation, one.first.k) != (1, 1) or one.rehearsed for one in (a, b)):
        return False
    if a.first.workers != b.first.workers:
        return False
    own, other = a.first.certificate, b.first.certificate
    if own is None and other is None:
        return True
    if comparability(a.runs, b.runs).level != EQUIVALENT or own is None or other is None:
        return False
    return all(own[name].value == other[name].value for name in ("device", "world_size") if name in own.keys() & other)


def _slower(block: Block) -> Iterator[Finding]:
    if block.baseline.first.workers != 1:
        return
    for row in block.rows:
        interval = row.speed_up.interval if row.speed_up is not None else None
        if row.setup.first.workers > 1 and interval is not None and interval.high < 1 and row.speed_up is not None:
            text = (
                f"{_full_name(block, row.setup)}: {row.setup.first.workers} workers are slower than one "
                f"({row.speed_up.value:.2f}×, 95% interval {interval.low:.3g} to {interval.high:.3g})"
            )
            yield Finding("slower than one worker", text, (row.setup.name,))


def _machines(setups: Sequence[Setup]) -> Iterator[Finding]:
    machines: dict[str, list[Setup]] = {}
    for setup in setups:
        for run in setup.runs:
            if run.machine is not None:
                machines.setdefault(run.machine, []).append(setup)
    if len(machines) > 1:
        counts = "; ".join(f"{machine}: {len(members)} runs" for machine, members in machines.items())
        text = f"the runs are not from one machine ({counts}), and times of different machines do not compare"
        names = tuple(setup.name for setup in setups if any(run.machine is not None for run in setup.runs))
        yield Finding("machines differ", text, names)


def _side_by_side(setups: Sequence[Setup]) -> Iterator[Finding]:
    runs = [run for setup in setups for run in setup.runs if (run.jobs_at_once or 1) > 1]
    if runs:
        most = max(run.jobs_at_once or 1 for run in runs)
        text = f"{len(runs)} run{'s' * (len(runs) > 1)} shared the machine with other jobs (up to {most} at once): "
        text += "their speeds stand in parentheses"
        names = tuple(setup.name for setup in setups if setup.side_by_side)
        yield Finding("side by side", text, names, tuple(run.source for run in runs))


def _rehearsed(setups: Sequence[Setup]) -> Iterator[Finding]:
    names = tuple(setup.name for setup in setups if setup.rehearsed)
    if names:
        text = f"run on other hardware than the named: {', '.join(names)}; the metric is compared, the speed is not"
        yield Finding("rehearsed", text, names, tuple(run.source for s in setups for run in s.runs if run.rehearsed))


def _untimed(setups: Sequence[Setup]) -> Iterator[Finding]:
    runs = [(setup, run) for setup in setups for run in setup.runs if run.seconds is None and not run.rehearsed]
    if runs:
        names = tuple(dict.fromkeys(setup.name for setup, _ in runs))
        text = f"too short to time, or without a time: {len(runs)} run{'s' * (len(runs) > 1)} of {', '.join(names)}"
        yield Finding("no time", text, names, tuple(run.source for _, run in runs))


def _not_comparable(block: Block) -> Iterator[Finding]:
    for row in block.rows:
        if row.comparability is not None and row.comparability.forbids:
            reasons = "; ".join(row.comparability.reasons)
            text = f"{row.setup.name} is not comparable to {block.baseline.name}: {reasons}"
            runs = tuple(run.source for run in row.setup.runs)
            yield Finding("not comparable", text, (row.setup.name,), runs)
