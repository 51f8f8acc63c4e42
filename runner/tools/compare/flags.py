"""Flags: what is unusual about the runs of a block. A flag excludes no value from a mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from runner.plan.levels import EQUIVALENT, IDENTICAL
from runner.tools.compare.comparability import comparability
from runner.tools.compare.results import Block, Flag, SetupResult
from runner.tools.compare.rows import metric_difference
from runner.tools.compare.runs import SINGLE, Run
from runner.tools.compare.setups import SetupRuns
from runner.tools.compare.statistics import NORMAL_MAD, mean, modified_z, speed_up
from runner.tools.compare.verdict import DIFFERENT, decide

#: Iglewicz & Hoaglin (1993): a modified z above this is a potential outlier, among at least this many values.
OUTLIER_Z, OUTLIER_FROM = 3.5, 3
#: Times that differ by a smaller factor are never unusual; a time this factor off the median of its setup always is.
TIME_TOLERANCE, OUTLIER_FACTOR = 0.10, 1.5
COLLAPSED_MARGINS = 5
#: Times as fast as one worker, for each worker. Smaller working sets, which fit into caches, give a little more than 1.
MOST_PER_WORKER = 1.25


def find_flags(block: Block) -> Iterator[Flag]:
    """All flags of a block, those that put numbers in doubt first."""
    setups = [row.setup for row in block.rows]
    outliers = [outlier for row in block.rows for outlier in _timing_outliers(row, block.rows)]
    yield from _outlier_flags(block, outliers)
    yield from _spread_timings(block, setups, {outlier.setup.name for outlier in outliers})
    for setup in setups:
        yield from _collapsed(block, setup)
    yield from _twins(block, setups)
    yield from _other_bits(block, setups)
    yield from _slower(block)
    yield from _too_fast(block)
    yield from _conditions(setups)
    yield from _not_comparable(block)


@dataclass(frozen=True)
class _Outlier:
    row: SetupResult
    run: Run
    seconds: float
    ratio: float

    @property
    def setup(self) -> SetupRuns:
        return self.row.setup


def _timing_outliers(row: SetupResult, rows: Sequence[SetupResult]) -> list[_Outlier]:
    """Runs whose time is off the median of their setup by more than the times of the other setups are off theirs.

    A setup's own spread is no yardstick: among three values it is tiny by chance, or it is that of the outlier.
    """
    times = row.setup.seconds
    if len(times) < OUTLIER_FROM:
        return []
    others = [abs(one) for other in rows if other is not row for one in _off_median(other)]
    # Without others, or if they are as noisy, the largest factor that can be accepted is the limit.
    spread = NORMAL_MAD * median(others) if others else math.inf
    limit = min(max(OUTLIER_Z * spread, math.log(1 + TIME_TOLERANCE)), math.log(OUTLIER_FACTOR))
    middle = median(times.values())
    return [
        _Outlier(row, run, times[run.seed], times[run.seed] / middle)
        for run in row.setup.runs
        if run.seed in times and abs(math.log(times[run.seed] / middle)) > limit
    ]


def _off_median(row: SetupResult) -> list[float]:
    """The log of each time ÷ the median, without the middle one, which is 0 by construction; from three seeds on."""
    times = sorted(row.setup.seconds.values())
    if len(times) < OUTLIER_FROM:
        return []
    off = [math.log(seconds / median(times)) for seconds in times]
    return off if len(off) % 2 == 0 else off[: len(off) // 2] + off[len(off) // 2 + 1 :]


def _outlier_flags(block: Block, outliers: Sequence[_Outlier]) -> Iterator[Flag]:
    """One flag for a seed that is an outlier in several setups, then one for each other outlier."""
    groups: dict[tuple[int, bool], list[_Outlier]] = {}
    for outlier in outliers:
        groups.setdefault((outlier.run.seed, outlier.ratio > 1), []).append(outlier)
    for (seed, slow), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        sentences = tuple(_outlier_sentence(block, outlier) for outlier in members)
        names, sources = tuple(one.setup.name for one in members), tuple(one.run.source for one in members)
        if len(members) == 1:
            ratio = members[0].ratio
            yield Flag("timing outlier", sentences[0], names, sources, doubtful=True, seeds=(seed,), value=ratio)
        else:
            why = "another machine, or another job at the same time?" if slow else "another machine?"
            text = f"seed {seed} is {'slow' if slow else 'fast'} in {_shares(block, members)}: {why}"
            yield Flag("timing outlier", text, names, sources, sentences, doubtful=True, seeds=(seed,))


def _shares(block: Block, members: Sequence[_Outlier]) -> str:
    """`5 of the 8 setups with 4 workers by accumulation`, for each family."""
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
        f"{_full_name(block, outlier.setup)}, seed {outlier.run.seed}: {_seconds(outlier.seconds)} s, "
        f"{outlier.ratio:.2f} × the median of its setup"
    )
    if outlier.setup is block.baseline:
        return f"{text}; it belongs to the baseline, so it changes every speed-up of this block"
    if outlier.row.speed_up is None:
        return text
    others = {seed: value for seed, value in outlier.setup.seconds.items() if seed != outlier.run.seed}
    without = speed_up(others, block.baseline.seconds).value
    return f"{text}; without it {without:.1f}×, not {outlier.row.speed_up.value:.1f}×"


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _full_name(block: Block, setup: SetupRuns) -> str:
    return f"{setup.name} · {block.key.total_samples:,} samples"


def _spread_timings(block: Block, setups: Sequence[SetupRuns], with_outlier: set[str]) -> Iterator[Flag]:
    for setup in setups:
        times = list(setup.seconds.values())
        if len(times) >= 2 and setup.name not in with_outlier and max(times) > (1 + TIME_TOLERANCE) * min(times):
            which = "two seeds cannot show which is usual" if len(times) == 2 else "no seed stands out"
            spread = max(times) / min(times)
            text = (
                f"{_full_name(block, setup)}: times range from {_seconds(min(times))} to {_seconds(max(times))} s "
                f"({spread:.2f} ×); {which}"
            )
            yield Flag("timings spread", text, (setup.name,), tuple(run.source for run in setup.runs), value=spread)


def _collapsed(block: Block, setup: SetupRuns) -> Iterator[Flag]:
    """Seeds that are far worse than the other seeds of the setup, or than half of the baseline."""
    name = _full_name(block, setup)
    if diverged := setup.diverged:
        reasons = dict.fromkeys(run.diverged or f"{block.key.metric} is {run.metric}" for run in diverged)
        text = (
            f"{name}, {_seeds(diverged)} diverged, so the setup has no mean and gets no verdict: {'; '.join(reasons)}"
        )
        yield _of_seeds("diverged", text, setup, diverged)
        return
    sign = 1.0 if block.key.goal == "max" else -1.0
    values = [run.metric for run in setup.runs]
    scores = modified_z(values) if len(values) >= OUTLIER_FROM else [0.0] * len(values)
    middle = median(values)
    far = COLLAPSED_MARGINS * block.margin.value if block.margin.value is not None else math.inf
    base = mean(run.metric for run in block.baseline.runs)
    # Half of the baseline's mean, or twice it if lower is better; meaningless if the mean is not positive.
    limit = base * (0.5 if sign > 0 else 2.0) if base > 0 else -sign * math.inf
    collapsed = [
        run
        for run, score in zip(setup.runs, scores, strict=True)
        if (sign * (middle - run.metric) >= far and abs(score) > OUTLIER_Z) or sign * (limit - run.metric) > 0
    ]
    if not collapsed:
        return
    numbers = ", ".join(f"{run.metric:.4g}" for run in collapsed)
    if len(collapsed) == len(setup.runs):
        share = "half" if sign > 0 else "twice"
        text = f"{name}: every seed collapsed ({numbers}; all worse than {share} of the baseline's mean)"
    else:
        text = f"{name}, {_seeds(collapsed)} collapsed: {numbers}; the median of the setup is {middle:.4g}"
    yield _of_seeds("collapsed", text, setup, collapsed)


def _of_seeds(kind: str, text: str, setup: SetupRuns, runs: Sequence[Run]) -> Flag:
    """A flag for runs of a setup whose numbers are in doubt."""
    sources, seeds = tuple(run.source for run in runs), tuple(run.seed for run in runs)
    return Flag(kind, text, (setup.name,), sources, doubtful=True, seeds=seeds)


def _seeds(runs: Sequence[Run]) -> str:
    return f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(run.seed) for run in runs)}"


def _twins(block: Block, setups: Sequence[SetupRuns]) -> Iterator[Flag]:
    for a, b in itertools.combinations(setups, 2):
        if not _same_experiment(a, b):
            continue
        differences = []
        if a.seconds and b.seconds:
            ratio = speed_up(a.seconds, b.seconds).value
            if max(ratio, 1 / ratio) > 1 + TIME_TOLERANCE:
                times = " and ".join(f"{_seconds(mean(one.seconds.values()))} s" for one in (a, b))
                differences.append(f"their times differ by a factor of {max(ratio, 1 / ratio):.2f} ({times})")
        if decide(metric_difference(a, b, block.margin), block.margin.value, block.key.goal).kind == DIFFERENT:
            means = " and ".join(f"{mean(one.metrics.values()):.4g}" for one in (a, b))
            differences.append(f"their {block.key.metric} differs ({means})")
        if differences:
            text = f"{_full_name(block, a)} and {b.name} are the same experiment, both synchronised at every step, but "
            yield Flag("twins", text + " and ".join(differences), (a.name, b.name))


def _other_bits(block: Block, setups: Sequence[SetupRuns]) -> Iterator[Flag]:
    """Runs with the same seed that should have ended with the same bits."""
    for a, b in itertools.combinations(setups, 2):
        partners = {run.seed: run for run in b.runs if run.weights is not None}
        for run in a.runs:
            other = partners.get(run.seed)
            if run.weights is None or other is None or run.weights == other.weights or run.withdrawn or other.withdrawn:
                continue
            if comparability([run], [other]).level == IDENTICAL:
                text = (
                    f"{_full_name(block, a)} and {b.name} should end with the same bits (equivalence=identical), but "
                    f"with seed {run.seed} their weights are {run.weights} and {other.weights}: "
                    "python -m runner.verify finds the first step that differs"
                )
                both = (run.source, other.source)
                yield Flag("other bits", text, (a.name, b.name), both, doubtful=True, seeds=(run.seed,))


def _same_experiment(a: SetupRuns, b: SetupRuns) -> bool:
    """Whether two setups, fully synchronous, differ in nothing but their label."""
    if any((one.first.accumulation, one.first.k) != (1, 1) or one.rehearsed for one in (a, b)):
        return False
    if a.first.workers != b.first.workers:
        return False
    own, other = a.first.certificate, b.first.certificate
    if own is None or other is None:
        return own is other
    if comparability(a.runs, b.runs).level not in (IDENTICAL, EQUIVALENT):
        return False
    return all(own[name].value == other[name].value for name in ("device", "world_size") if name in own.keys() & other)


def _slower(block: Block) -> Iterator[Flag]:
    if block.baseline.first.workers != 1:
        return
    for row in block.rows:
        speed, workers = row.speed_up, row.setup.first.workers
        if workers > 1 and speed is not None and speed.interval.high < 1 and not block.uncertain_speed(row):
            text = (
                f"{_full_name(block, row.setup)}: {workers} workers are slower than one "
                f"({speed.value:.2f}×, 95% interval {speed.interval.low:.3g} to {speed.interval.high:.3g})"
            )
            yield Flag("slower than one worker", text, (row.setup.name,), value=speed.value)


def _too_fast(block: Block) -> Iterator[Flag]:
    """Speed-ups that the number of workers cannot explain, in the baseline's precision."""
    one = block.baseline.first
    for row in block.rows:
        speed, run = row.speed_up, row.setup.first
        if one.workers != 1 or run.workers == 1 or speed is None or run.precision != one.precision:
            continue
        if block.uncertain_speed(row):  # which explains it
            continue
        if speed.value > MOST_PER_WORKER * run.workers:
            text = (
                f"{_full_name(block, row.setup)}: {speed.value:.1f}× with {run.workers} workers is more than they "
                f"explain: something else has slowed down {block.baseline.name}, or changed the machine"
            )
            yield Flag("implausible speed-up", text, (row.setup.name,), doubtful=True, value=speed.value)


def _conditions(setups: Sequence[SetupRuns]) -> Iterator[Flag]:
    """Different machines, jobs at the same time, rehearsals, and runs without a time."""
    runs = [(setup, run) for setup in setups for run in setup.runs]
    # A job of several at a time knows the GPUs that it had, not all of the machine's.
    known = [(setup, run) for setup, run in runs if run.machine is not None and (run.jobs_at_once or 1) == 1]
    machines = [run.machine for _, run in known]
    if len(set(machines)) > 1:
        counts = "; ".join(f"{name}: {machines.count(name)} runs" for name in dict.fromkeys(machines))
        text = f"the runs are from different machines ({counts}), whose times cannot be compared"
        yield Flag("machines differ", text, _names(known))
    if shared := [(setup, run) for setup, run in runs if (run.jobs_at_once or 1) > 1]:
        most = max(run.jobs_at_once or 1 for _, run in shared)
        text = f"{_count(shared)} shared the machine with other jobs (up to {most} at once): speeds are in parentheses"
        yield Flag("side by side", text, _names(shared), _sources(shared), value=most)
    if busy := [(setup, run) for setup, run in runs if run.busy]:
        of_baseline = any(setup is setups[0] for setup, _ in busy)
        which = "all speed-ups of this block" if of_baseline else f"speed-ups of {', '.join(_names(busy))}"
        names = tuple(setup.name for setup in setups) if of_baseline else _names(busy)
        text = f"{_count(busy)} shared the machine with other programs: {which} are unreliable, and in parentheses"
        yield Flag("busy machine", text, names, _sources(busy))
    if rehearsed := [(setup, run) for setup, run in runs if run.rehearsed]:
        text = f"run on other hardware than named: {', '.join(_names(rehearsed))}; compared by metric, not by speed"
        yield Flag("rehearsed", text, _names(rehearsed), _sources(rehearsed))
    if untimed := [
        (setup, run) for setup, run in runs if run.seconds is None and not run.rehearsed and not run.diverged
    ]:
        text = f"too short to time, or without a time: {_count(untimed)} of {', '.join(_names(untimed))}"
        yield Flag("no time", text, _names(untimed), _sources(untimed))


def _names(runs: Sequence[tuple[SetupRuns, Run]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(setup.name for setup, _ in runs))


def _sources(runs: Sequence[tuple[SetupRuns, Run]]) -> tuple[str, ...]:
    return tuple(run.source for _, run in runs)


def _count(runs: Sequence[object]) -> str:
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}"


def _not_comparable(block: Block) -> Iterator[Flag]:
    for row in block.rows:
        if row.comparability is not None and row.comparability.forbids:
            reasons = "; ".join(row.comparability.reasons)
            text = f"{row.setup.name} is not comparable to {block.baseline.name}: {reasons}"
            yield Flag("not comparable", text, (row.setup.name,), tuple(run.source for run in row.setup.runs))
