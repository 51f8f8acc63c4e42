"""What a reader has to know of a block's intervals: few seeds, seeds without a partner, the bootstrap's opinion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from runner.compare.comparison import Block
from runner.compare.statistics import BOOTSTRAP_FROM, bootstrap_interval, t_quantile
from runner.compare.verdict import DIFFERENCE_LEVEL, EQUIVALENCE_LEVEL

FEW_SEEDS = 5
#: Share of the baseline's metric above which a margin is called wide; 1 point of an accuracy is one or two percent.
WIDE_MARGIN = 0.1


def remarks(block: Block, margin: float) -> Iterator[str]:
    """Sentences, none of them about one run."""
    if block.baseline_note:
        yield f"Baseline: {block.baseline_note}."
    yield from _wide_margin(block, margin)
    yield from _few_seeds(block)
    for row in block.rows:
        if row.left_out:
            seeds = ", ".join(map(str, row.left_out))
            yield f"{row.setup.name}: seed {seeds} has no partner and is left out of the paired difference."
    yield from _without_spread(block)
    yield from _bootstrap(block)
    for row in block.rows:
        if row.comparability is not None and row.comparability.unknown:
            names = ", ".join(row.comparability.unknown)
            yield f"{row.setup.name}: its certificate and the baseline's do not both record {names}: unknown."


def _wide_margin(block: Block, margin: float) -> Iterator[str]:
    """A margin made for percentages makes everything equivalent where the metric is a small number."""
    mean = abs(block.rows[0].metric.value)
    if len(block.rows) > 1 and mean and margin > WIDE_MARGIN * mean:
        share = f"{100 * margin / mean:.0f}% of the baseline's {block.key.metric} ({mean:.3g})"
        yield f"The margin of {margin:g} is {share}, so that equivalent says little: choose a smaller --margin."


def _few_seeds(block: Block) -> Iterator[str]:
    few = min(len(row.setup.runs) for row in block.rows)
    if few >= FEW_SEEDS or all(row.difference is None for row in block.rows):
        return
    if few == 1:
        yield "Setups with one seed have no interval at all, and no verdict but undecided: run at least 2 more seeds."
        return
    widths = [
        interval.half_width
        for row in block.rows
        if row.difference is not None
        and (interval := row.difference.interval(DIFFERENCE_LEVEL)) is not None
        and math.isfinite(interval.half_width)
    ]
    factor = t_quantile(DIFFERENCE_LEVEL, few - 1) / math.sqrt(few)
    sentence = f"{few} seeds rarely decide: a 95% interval of {few} pairs reaches {factor:.1f} standard deviations "
    sentence += "each way"
    if widths and max(widths) > 0:
        sentence += f", here ±{min(widths):.2g} to ±{max(widths):.2g} ({median(widths):.2g} in the middle)"
    yield sentence + "."


def _without_spread(block: Block) -> Iterator[str]:
    """Metrics of few evaluated samples have few values, so that differences can be equal by chance."""
    for row in block.rows:
        pairs = row.difference.pairs if row.difference is not None else ()
        if len(pairs) > 1 and pairs[0] and min(pairs) == max(pairs):
            yield (
                f"{row.setup.name}: the differences of its {len(pairs)} seeds are equal, which makes an interval "
                "without width; with few evaluated samples that can be chance, and more seeds would tell."
            )


def _bootstrap(block: Block) -> Iterator[str]:
    for row in block.rows:
        if row.difference is None or row.verdict is None or len(row.difference.pairs) < BOOTSTRAP_FROM:
            continue
        if not math.isfinite(row.difference.value):
            continue
        intervals = [bootstrap_interval(row.difference.pairs, level) for level in (EQUIVALENCE_LEVEL, DIFFERENCE_LEVEL)]
        shown = " and ".join(
            f"{100 * one.level:.0f}% from {one.low:+.3g} to {one.high:+.3g}" for one in intervals if one is not None
        )
        if not shown:
            continue
        sentence = f"{row.setup.name}: the bootstrap's interval is {shown}"
        if row.verdict.disagreement is not None:
            sentence += f"; it would say {row.verdict.disagreement}, where t says {row.verdict.kind}, which stands"
        yield sentence + "."
