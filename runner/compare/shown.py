"""Numbers as a reader wants them, the same in the terminal and in the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runner.compare.comparison import Block, Comparison, Row
from runner.compare.published_layout import Cell, Column
from runner.compare.verdict import DIFFERENCE_LEVEL, EQUIVALENCE_LEVEL

NOTHING = "–"
HEADINGS = ("setup", "seeds", "metric", "difference", "verdict", "seconds", "speed-up", "notes")


@dataclass(frozen=True)
class ShownRow:
    """A row of the table as text. Pairs are (value, its uncertainty), the second empty where there is none."""

    setup: str
    seeds: str
    metric: tuple[str, str]
    difference: tuple[str, str]
    verdict: str
    kind: str
    seconds: str
    speed_up: tuple[str, str]
    notes: str


def shown_row(block: Block, row: Row) -> ShownRow:
    digits = decimals(block)
    verdict = row.verdict.text if row.verdict is not None else "baseline"
    return ShownRow(
        setup=row.setup.name,
        seeds=str(len(row.setup.runs)),
        metric=_mean(row, digits),
        difference=_difference(row, digits),
        verdict=verdict,
        kind="better" if row.verdict and row.verdict.better else verdict.partition(":")[0].replace(" ", "-"),
        seconds=_seconds(row),
        speed_up=_speed_up(block, row),
        notes=", ".join(str(found.number) for found in block.about(row.setup)),
    )


def _mean(row: Row, digits: int) -> tuple[str, str]:
    interval = row.metric.interval(DIFFERENCE_LEVEL)
    known = interval is not None and not math.isnan(interval.half_width)
    return (number(row.metric.value, digits), f"± {number(interval.half_width, digits)}" if interval and known else "")


def _difference(row: Row, digits: int) -> tuple[str, str]:
    if row.difference is None or math.isnan(row.difference.value):
        return (NOTHING, "")
    narrow, value = row.difference.interval(EQUIVALENCE_LEVEL), signed(row.difference.value, digits)
    return (value, f"[{signed(narrow.low, digits)}, {signed(narrow.high, digits)}]" if narrow is not None else "")


def _seconds(row: Row) -> str:
    if row.setup.rehearsed:
        return "rehearsed"
    if row.seconds is None:
        return "no time"
    text = seconds(row.seconds)
    return f"({text})" if row.setup.side_by_side else text


def _speed_up(block: Block, row: Row) -> tuple[str, str]:
    if row.speed_up is None:
        return (NOTHING, "")
    interval = row.speed_up.interval
    texts = (f"{factor(row.speed_up.value)}×", f"[{factor(interval.low)}, {factor(interval.high)}]" if interval else "")
    return (f"({texts[0]})", texts[1] and f"({texts[1]})") if block.side_by_side(row) else texts


def factor(value: float) -> str:
    """A speed-up, in about three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def decimals(block: Block) -> int:
    """Of the metric: two where it is in percent, more for a small number such as a loss."""
    size = abs(block.rows[0].metric.value)
    return 2 if not size or not math.isfinite(size) else max(2, min(8, 3 - math.floor(math.log10(size))))


def number(value: float, digits: int) -> str:
    return "no number" if math.isnan(value) else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int) -> str:
    return number(value, digits) if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def published_cell(cell: Cell | None) -> tuple[str, str]:
    """Metric over speed-up, as the published tables print them: to a tenth of a percent, or to three digits."""
    if cell is None:
        return ("", "")
    metric = f"{cell.metric:.1f}" if abs(cell.metric) >= 10 or not cell.metric else f"{cell.metric:.3g}"
    metric += "*" if cell.doubtful else ""
    if cell.speed_up is None:
        return (metric, "")
    speed_up = f"{cell.speed_up:.1f}×"
    return (metric, f"({speed_up})" if cell.aside else speed_up)


def column_heading(column: Column) -> tuple[str, str]:
    """Group and step of a published column."""
    method, step = column
    return ("one worker", "") if method is None else (method, str(step))


def relations(block: Block) -> list[str]:
    """What the setups are to the baseline, one sentence for all setups of which the same is true."""
    groups: dict[str, list[str]] = {}
    for row in block.rows[1:]:
        relation = row.comparability
        if relation is None:
            continue
        groups.setdefault(relation.text, []).append(row.setup.name)
    return [f"{'; '.join(names)}: {_to_baseline(text, block)}" for text, names in groups.items()]


def _to_baseline(text: str, block: Block) -> str:
    level, colon, rest = text.partition(":")
    return f"{level} to {block.baseline.name}{colon}{rest}" if level != "not known" else f"comparability {text}"


def direction(block: Block) -> str:
    return f"{'less' if block.key.goal == 'min' else 'more'} {block.key.metric} is better"


def summary(block: Block) -> str:
    """`Against cpu: 2 equivalent, 1 different: worse, 3 undecided.`"""
    verdicts = [row.verdict for row in block.rows if row.verdict is not None]
    words = [v.in_short for v in verdicts]
    counts = ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
    return f"Against {block.baseline.name}: {counts}." if verdicts else f"One setup only, {block.baseline.name}."


def refused_sentence(comparison: Comparison) -> str:
    """`3 runs are not compared: a (FAILED), …`, or nothing."""
    refused = comparison.refused
    if not refused:
        return ""
    names = "; ".join(f"{one.source}: {one.reason}" for one in refused)
    return f"{len(refused)} run{'s are' if len(refused) > 1 else ' is'} not compared: {names}"


def seeds_in_common(rows: Sequence[ShownRow]) -> str | None:
    """The number of seeds, if every row has the same."""
    counts = {row.seeds for row in rows}
    return counts.pop() if len(counts) == 1 else None
