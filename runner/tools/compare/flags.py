"""Flags: what is unusual about the runs of a block. A flag excludes no value from a mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from runner.plan.levels import IDENTICAL
from runner.tools.compare.comparability import comparability
from runner.tools.compare.results import Block, Flag, SetupResult
from runner.tools.compare.rows import metric_difference
from runner.tools.compare.runs import Run, grouped
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

#: A run whose time is unusual: its setup, and its seconds ÷ the median of the setup.
_Outlier = tuple[SetupResult, Run, float]


def find_flags(block: Block) -> Iterator[Flag]:
    """All flags of a block, those that put numbers in doubt first."""
    outliers = [outlier for row in block.rows for outlier in _timing_outliers(row, block.rows)]
    yield from _outlier_flags(block, outliers)
    with_outlier = {row.setup.name for row, _, _ in outliers}
    setups = [row.setup for row in block.rows]
    yield from _spread_timings(block, [setup for setup in setups if setup.name not in with_outlier])
    for setup in setups:
        yield from _diverged(block, setup) if setup.diverged else _collapsed(block, setup)
    for a, b in itertools.combinations(setups, 2):
        yield from _twins(block, a, b)
    for a, b in itertools.combinations(setups, 2):
        yield from _other_bits(block, a, b)
    yield from _unexpected_speed(block)
    yield from _conditions(setups)
    for row in block.rows:
        if row.comparability is not None and row.comparability.forbids:
            reasons = "; ".join(row.comparability.reasons)
            yield _of_runs(
                "not comparable",
                f"{row.setup.name} is not comparable to {block.baseline.name}: {reasons}",
                [(row.setup, run) for run in row.setup.runs],
            )


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
    ratios = {seed: seconds / median(times.values()) for seed, seconds in times.items()}
    found = [(run, ratios.get(run.seed, 1.0)) for run in row.setup.runs]
    return [(row, run, ratio) for run, ratio in found if abs(math.log(ratio)) > limit]


def _off_median(row: SetupResult) -> list[float]:
    """The log of each time ÷ the median, without the middle one, which is 0 by construction; from three seeds on."""
    times = sorted(row.setup.seconds.values())
    if len(times) < OUTLIER_FROM:
        return []
    off = [math.log(seconds / median(times)) for seconds in times]
    return off if len(off) % 2 == 0 else off[: len(off) // 2] + off[len(off) // 2 + 1 :]


def _outlier_flags(block: Block, outliers: Sequence[_Outlier]) -> Iterator[Flag]:
    """One flag for a seed that is an outlier in several setups, then one for each other outlier."""
    groups = grouped(outliers, lambda one: (one[1].seed, one[2] > 1))
    for (seed, slow), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        sentences = tuple(_outlier_sentence(block, *one) for one in members)
        runs = [(row.setup, run) for row, run, _ in members]
        if len(members) == 1:
            yield _of_runs("timing outlier", sentences[0], runs, doubtful=True, value=members[0][2])
        else:
            why = "another machine, or another job at the same time?" if slow else "another machine?"
            where = _shares(block, [row.setup.family for row, _, _ in members])
            text = f"seed {seed} is {'slow' if slow else 'fast'} in {where}: {why}"
            yield _of_runs("timing outlier", text, runs, doubtful=True, details=sentences)


def _shares(block: Block, families: Sequence[tuple[int, str]]) -> str:
    """`5 of the 8 setups with 4 workers by accumulation`, for each family."""
    timed = [row.setup.family for row in block.rows if len(row.setup.seconds) >= OUTLIER_FROM]
    parts = []
    for family in dict.fromkeys(families):
        workers, method = family
        what = "one worker" if workers == 1 else f"{workers} workers by {method}"
        parts.append(f"{families.count(family)} of the {timed.count(family)} setups with {what}")
    return " and ".join(parts)


def _outlier_sentence(block: Block, row: SetupResult, run: Run, ratio: float) -> str:
    times = row.setup.seconds
    name = _full_name(block, row.setup)
    text = f"{name}, seed {run.seed}: {_seconds(times[run.seed])} s, {ratio:.2f} × the median of its setup"
    if row.setup is block.baseline:
        return f"{text}; it belongs to the baseline, so it changes every speed-up of this block"
    if row.speed_up is None:
        return text
    without = speed_up({seed: one for seed, one in times.items() if seed != run.seed}, block.baseline.seconds).value
    return f"{text}; without it {without:.1f}×, not {row.speed_up.value:.1f}×"


def _spread_timings(block: Block, setups: Sequence[SetupRuns]) -> Iterator[Flag]:
    for setup in setups:
        times = list(setup.seconds.values())
        if len(times) >= 2 and max(times) > (1 + TIME_TOLERANCE) * min(times):
            which = "two seeds cannot show which is usual" if len(times) == 2 else "no seed stands out"
            spread = max(times) / min(times)
            text = (
                f"{_full_name(block, setup)}: times range from {_seconds(min(times))} to {_seconds(max(times))} s "
                f"({spread:.2f} ×); {which}"
            )
            yield Flag("timings spread", text, (setup.name,), tuple(run.source for run in setup.runs), value=spread)


def _diverged(block: Block, setup: SetupRuns) -> Iterator[Flag]:
    reasons = dict.fromkeys(run.diverged or f"{block.key.metric} is {run.metric}" for run in setup.diverged)
    seeds = _seeds(setup.diverged)
    consequence = "so the setup has no mean and gets no verdict"
    text = f"{_full_name(block, setup)}, {seeds} diverged, {consequence}: {'; '.join(reasons)}"
    yield _of_runs("diverged", text, [(setup, run) for run in setup.diverged], doubtful=True)


def _collapsed(block: Block, setup: SetupRuns) -> Iterator[Flag]:
    """Seeds that are far worse than the other seeds of the setup, or than half of the baseline."""
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
    name, numbers = _full_name(block, setup), ", ".join(f"{run.metric:.4g}" for run in collapsed)
    if len(collapsed) == len(setup.runs):
        share = "half" if sign > 0 else "twice"
        text = f"{name}: every seed collapsed ({numbers}; all worse than {share} of the baseline's mean)"
    else:
        text = f"{name}, {_seeds(collapsed)} collapsed: {numbers}; the median of the setup is {middle:.4g}"
    yield _of_runs("collapsed", text, [(setup, run) for run in collapsed], doubtful=True)


def _twins(block: Block, a: SetupRuns, b: SetupRuns) -> Iterator[Flag]:
    """Published setups that are the same synchronous experiment under two labels, and do not have the same result.

    Runs of the runner have a digest of their settings, by which the same experiment is one setup.
    """
    one, other = a.first, b.first
    published = one.certificate is None and other.certificate is None and not one.values and not other.values
    synchronous = {(one.accumulation, one.k), (other.accumulation, other.k)} == {(1, 1)}
    if not (published and synchronous and one.workers == other.workers) or a.rehearsed or b.rehearsed:
        return
    differences = []
    if a.seconds and b.seconds:
        ratio = speed_up(a.seconds, b.seconds).value
        if max(ratio, 1 / ratio) > 1 + TIME_TOLERANCE:
            times = " and ".join(f"{_seconds(mean(setup.seconds.values()))} s" for setup in (a, b))
            differences.append(f"their times differ by a factor of {max(ratio, 1 / ratio):.2f} ({times})")
    if decide(metric_difference(a, b, block.margin), block.margin.value, block.key.goal).kind == DIFFERENT:
        means = " and ".join(f"{mean(setup.metrics.values()):.4g}" for setup in (a, b))
        differences.append(f"their {block.key.metric} differs ({means})")
    if differences:
        text = f"{_full_name(block, a)} and {b.name} are the same experiment, both synchronised at every step, but "
        yield Flag("twins", text + " and ".join(differences), (a.name, b.name))


def _other_bits(block: Block, a: SetupRuns, b: SetupRuns) -> Iterator[Flag]:
    """Runs with the same seed that should have ended with the same bits."""
    partners = {run.seed: run for run in b.runs}
    for run in a.runs:
        other = partners.get(run.seed)
        if other is None or None in (run.weights, other.weights) or run.weights == other.weights:
            continue
        if comparability([run], [other]).level == IDENTICAL:
            text = (
                f"{_full_name(block, a)} and {b.name} should end with the same bits (equivalence=identical), but "
                f"with seed {run.seed} their weights are {run.weights} and {other.weights}: "
                "python -m runner.verify finds the first step that differs"
            )
            yield _of_runs("other bits", text, [(a, run), (b, other)], doubtful=True)


def _unexpected_speed(block: Block) -> Iterator[Flag]:
    """Several workers that are slower than one, or faster than their number explains in the baseline's precision."""
    one = block.baseline.first
    slow, fast = [], []
    for row in block.rows if one.workers == 1 else ():
        name, workers, speed = _full_name(block, row.setup), row.setup.first.workers, row.speed_up
        if workers == 1 or speed is None or block.uncertain_speed(row):
            continue
        if speed.interval.high < 1:
            interval = f"{speed.value:.2f}×, 95% interval {speed.interval.low:.3g} to {speed.interval.high:.3g}"
            text = f"{name}: {workers} workers are slower than one ({interval})"
            slow.append(Flag("slower than one worker", text, (row.setup.name,), value=speed.value))
        if speed.value > MOST_PER_WORKER * workers and row.setup.first.precision == one.precision:
            text = (
                f"{name}: {speed.value:.1f}× with {workers} workers is more than they explain: something else has "
                f"slowed down {block.baseline.name}, or changed the machine"
            )
            fast.append(Flag("implausible speed-up", text, (row.setup.name,), doubtful=True, value=speed.value))
    yield from (*slow, *fast)


def _conditions(setups: Sequence[SetupRuns]) -> Iterator[Flag]:
    """Different machines, jobs at the same time, rehearsals, and runs without a time."""

    def runs_that(hold: Callable[[Run], bool]) -> list[tuple[SetupRuns, Run]]:
        return [(setup, run) for setup in setups for run in setup.runs if hold(run)]

    # A job of several at a time knows the GPUs that it had, not all of the machine's.
    known = runs_that(lambda run: run.machine is not None and (run.jobs_at_once or 1) == 1)
    machines = [run.machine for _, run in known]
    if len(set(machines)) > 1:
        counts = "; ".join(f"{name}: {machines.count(name)} runs" for name in dict.fromkeys(machines))
        text = f"the runs are from different machines ({counts}), whose times cannot be compared"
        yield Flag("machines differ", text, _names(known))
    if shared := runs_that(lambda run: (run.jobs_at_once or 1) > 1):
        most = max(run.jobs_at_once or 1 for _, run in shared)
        text = f"{_count(shared)} shared the machine with other jobs (up to {most} at once): speeds are in parentheses"
        yield _of_runs("side by side", text, shared, value=most)
    if busy := runs_that(lambda run: run.busy):
        of_baseline = any(setup is setups[0] for setup, _ in busy)
        names = tuple(setup.name for setup in setups) if of_baseline else _names(busy)
        which = "all speed-ups of this block" if of_baseline else f"speed-ups of {', '.join(names)}"
        text = f"{_count(busy)} shared the machine with other programs: {which} are unreliable, and in parentheses"
        yield Flag("busy machine", text, names, tuple(run.source for _, run in busy))
    if rehearsed := runs_that(lambda run: run.rehearsed):
        names = _names(rehearsed)
        text = f"run on other hardware than named: {', '.join(names)}; compared by metric, not by speed"
        yield _of_runs("rehearsed", text, rehearsed)
    if untimed := runs_that(lambda run: run.seconds is None and not run.rehearsed and not run.diverged):
        text = f"too short to time, or without a time: {_count(untimed)} of {', '.join(_names(untimed))}"
        yield _of_runs("no time", text, untimed)


def _of_runs(
    kind: str,
    text: str,
    runs: Sequence[tuple[SetupRuns, Run]],
    doubtful: bool = False,
    value: float | None = None,
    details: tuple[str, ...] = (),
) -> Flag:
    """A flag for single runs of setups; `seeds` are named if their numbers are in doubt."""
    seeds = tuple(dict.fromkeys(run.seed for _, run in runs)) if doubtful else ()
    return Flag(kind, text, _names(runs), tuple(run.source for _, run in runs), details, doubtful, seeds, value)


def _names(runs: Sequence[tuple[SetupRuns, Run]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(setup.name for setup, _ in runs))


def _count(runs: Sequence[object]) -> str:
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}"


def _seeds(runs: Sequence[Run]) -> str:
    return f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(run.seed) for run in runs)}"


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _full_name(block: Block, setup: SetupRuns) -> str:
    return f"{setup.name} · {block.key.total_samples:,} samples"
