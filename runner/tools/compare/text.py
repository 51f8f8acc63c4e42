"""Sentences about a comparison, the same in the terminal, the report and MLflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from runner.folder.evaluation_rows import FILE_NAME as EVALUATION_ROWS
from runner.tools.compare.results import Block, RunComparison, SetupResult
from runner.tools.compare.statistics import t_quantile
from runner.tools.compare.verdict import DIFFERENCE_LEVEL, EQUIVALENCE_LEVEL, UNKNOWN

FEW_SEEDS = 5
#: Share of the baseline's metric above which a margin is called wide; 1 point of accuracy is one or two percent.
WIDE_MARGIN = 0.1


def direction(block: Block) -> str:
    return f"{'lower' if block.key.goal == 'min' else 'higher'} {block.key.metric} is better"


def summary(block: Block) -> str:
    """A line such as `Compared with cpu: 2 equivalent, 1 different (worse), 3 undecided.`"""
    words = [row.verdict.short for row in block.rows if row.verdict is not None]
    if not words:
        return f"Only one setup, {block.baseline.name}."
    counts = ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
    return f"Compared with {block.baseline.name}: {counts}."


def notices(comparison: RunComparison) -> Iterator[str]:
    """Sentences about what was not compared, and why."""
    yield from _nothing_compared(comparison)
    if skipped := comparison.skipped:
        reasons = "; ".join(f"{one.source}: {one.reason}" for one in skipped)
        yield f"{len(skipped)} run{'s are' if len(skipped) > 1 else ' is'} not compared: {reasons}"


def _nothing_compared(comparison: RunComparison) -> Iterator[str]:
    """The reason for no verdict where each of several blocks has one setup."""
    keys = [block.key for block in comparison.blocks]
    if len(keys) < 2 or any(len(block.rows) > 1 for block in comparison.blocks):
        return
    properties: dict[str, set[Any]] = {
        "recipe or experiment": {key.experiment for key in keys},
        "data": {key.data for key in keys},
        "number of samples": {(key.samples, key.epochs) for key in keys},
        "metric": {key.metric for key in keys},
    }
    differ = [name for name, values in properties.items() if len(values) > 1] or ["what the headings name"]
    yield (
        "Nothing was compared: only runs with the same recipe, data, number of samples and metric are compared, and "
        f"these {len(keys)} tables differ in {', '.join(differ)}."
    )


def remarks(block: Block) -> Iterator[str]:
    """Sentences about a block as a whole, for below its table."""
    if block.baseline_note:
        yield f"Baseline: {block.baseline_note}."
    if len(block.rows) > 1:
        yield f"Equivalence margin: {block.margin.text}."
    if any(row.metric.interval(DIFFERENCE_LEVEL).known for row in block.rows):
        yield f"±: half of the {100 * DIFFERENCE_LEVEL:g}% confidence interval of the mean over seeds."
    yield from _comparability(block)
    yield from _wide_margin(block)
    yield from _few_seeds(block)
    yield from _several_verdicts(block)
    yield from _sampling(block)
    for row in block.rows:
        name, pairs = row.setup.name, row.difference.pairs if row.difference is not None else ()
        if row.left_out:
            seeds = ", ".join(map(str, row.left_out))
            yield f"{name}: the paired difference excludes seed {seeds}, which only one of the two setups ran."
        no_rows = row.difference is not None and row.difference.sampling is None
        if no_rows and len(pairs) > 1 and pairs[0] and min(pairs) == max(pairs):
            yield (
                f"{name}: all {len(pairs)} seeds have the same difference, so the interval has zero width. This can be "
                "coincidence with few evaluation samples: run more seeds."
            )
        yield from _bootstrap(row)
        if row.comparability is not None and row.comparability.unknown:
            names, several = ", ".join(row.comparability.unknown), len(row.comparability.unknown) > 1
            yield (
                f"{name}: {names} {'are' if several else 'is'} recorded in only one of the two certificates and "
                f"{'were' if several else 'was'} not compared."
            )


def _comparability(block: Block) -> Iterator[str]:
    """One sentence for all setups with the same level and differences."""
    groups: dict[str, list[str]] = {}
    for row in block.rows:
        if row.comparability is not None:
            groups.setdefault(row.comparability.text, []).append(row.setup.name)
    for text, names in groups.items():
        level, colon, differences = text.partition(":")
        relation = (
            f"comparability {text}" if level == "unknown" else f"{level} to {block.baseline.name}{colon}{differences}"
        )
        yield f"{'; '.join(names)}: {relation}"


def _wide_margin(block: Block) -> Iterator[str]:
    margin, base = block.margin.value, abs(block.rows[0].metric.value)
    if len(block.rows) > 1 and margin is not None and base and margin > WIDE_MARGIN * base:
        share = f"{100 * margin / base:.0f}% of the baseline's {block.key.metric} ({base:.3g})"
        yield f'The margin of {margin:g} is {share}, so "equivalent" is a weak claim: choose a smaller --margin.'


def _few_seeds(block: Block) -> Iterator[str]:
    few = min(len(row.setup.runs) for row in block.rows)
    if block.baseline.first.design is not None or few >= FEW_SEEDS or all(row.difference is None for row in block.rows):
        return
    if few == 1:
        yield "A setup with one seed has no interval and stays undecided: run at least 2 more seeds."
        return
    intervals = [row.difference.interval(DIFFERENCE_LEVEL) for row in block.rows if row.difference is not None]
    widths = [one.half_width for one in intervals if one.known]
    factor = t_quantile(DIFFERENCE_LEVEL, few - 1) / math.sqrt(few)
    sentence = f"{few} seeds are rarely enough: the 95% interval is ±{factor:.1f} standard deviations"
    if widths and max(widths) > 0:
        sentence += f", here ±{min(widths):.2g} to ±{max(widths):.2g} (median {median(widths):.2g})"
    yield sentence + "."


def _sampling(block: Block) -> Iterator[str]:
    """A sentence about whether intervals allow for other evaluation rows."""
    known = [one.sampling for _, one in block.tests.values()]
    if None in known and block.margin.unit != UNKNOWN:
        counts = block.margin.width is not None
        why = "their number is not known" if counts else f"{block.key.metric} was not kept by row"
        yield f"Intervals are for these evaluation rows only, since {why}."
    elif any(one is not None and not one.by_row for one in known):
        yield (
            "Intervals allow for other evaluation rows, but not for setups that always differ on more rows than their "
            f"difference shows, some better and some worse: that takes {EVALUATION_ROWS} of two common seeds."
        )


def _several_verdicts(block: Block) -> Iterator[str]:
    """The probability of a wrong one among several tests; it is less for tests that share a baseline (Šidák 1967)."""
    raced = block.corrected_for > (count := len(block.tests))
    if raced and count:
        yield f"The verdicts are Holm's for all {block.corrected_for + 1} setups of a race, which stopped the others."
    if raced or count < 2:
        return
    if block.baseline.first.design is not None:
        yield f"The {count} verdicts share one error: at most 5% for any wrong one of a kind, over all looks."
        return
    if block.corrected_for:
        yield f"The {count} verdicts are Holm's: at most 5% for any wrong one of a kind. Intervals are not corrected."
        return
    any_wrong = 1 - DIFFERENCE_LEVEL**count
    yield (
        f"{count} separate verdicts: if all these setups are truly like the baseline, the chance that at least one is "
        f"called different is up to {any_wrong:.0%}; --family-wise keeps it at 5%."
    )


def _bootstrap(row: SetupResult) -> Iterator[str]:
    levels = (EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL) if row.difference is not None else ()
    intervals = [(level, row.difference.bootstrap(level)) for level in levels if row.difference is not None]
    texts = [
        f"{100 * level:.0f}% from {one.low:+.3g} to {one.high:+.3g}" for level, one in intervals if one is not None
    ]
    if texts and row.verdict is not None:
        sentence = f"{row.setup.name}: the bootstrap interval is {' and '.join(texts)}"
        if row.verdict.bootstrap is not None:
            by_t = f"the verdict uses the t interval: {row.verdict.kind}"
            sentence += f"; by the bootstrap interval: {row.verdict.bootstrap}; {by_t}"
        yield sentence + "."
