"""Print a comparison in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.tools.compare.results import Block, RunComparison
from runner.tools.compare.text import (
    RowText,
    direction,
    nothing_compared,
    remarks,
    row_text,
    shows_predictions,
    skipped_sentence,
    summary,
)

#: From this width on, a value and its interval are on one line.
_WIDE = 130
_HEADINGS = ("setup", "seeds", "metric", "difference", "verdict", "seconds", "predicted", "speed-up", "notes")
#: Widths below which an ordinary word in the column would be broken.
_MIN_WIDTH = {"setup": 12, "verdict": len("comparable"), "notes": len("notes")}
_STYLES = {"equivalent": "green", "better": "green", "different": "red", "undecided": "yellow", "no-verdict": "dim"}


def print_comparison(comparison: RunComparison, console: Console) -> None:
    """Tables, verdicts and flags, block by block."""
    for block in comparison.blocks:
        console.print(_block(block, console.width))
    for sentence in filter(None, (nothing_compared(comparison), skipped_sentence(comparison))):
        console.print(Text(sentence, style="yellow"))
        console.print()
    rule = "equivalent: 90% interval inside the margin; different: 95% interval excludes 0; see the report for details"
    console.print(Text(rule, style="dim"))


def _block(block: Block, width: int) -> RenderableType:
    rows = [row_text(block, row) for row in block.rows]
    counts = {row.seeds for row in rows}
    headline = Text(block.title, style="bold underline")
    headline.append(f"   {direction(block)}", style="not underline dim")
    if len(counts) == 1:
        seeds = counts.pop()
        headline.append(f", {seeds} seed{'s' if seeds != '1' else ''} each", style="not underline dim")
        return Group(headline, _table(block, rows, width, with_seeds=False), *_below(block))
    return Group(headline, _table(block, rows, width, with_seeds=True), *_below(block))


def _table(block: Block, rows: list[RowText], width: int, with_seeds: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    predicted = shows_predictions(block)
    left_out = (*(() if with_seeds else ("seeds",)), *(() if predicted else ("predicted",)))
    for heading in _HEADINGS:
        if heading not in left_out:
            table.add_column(
                Text(block.key.metric if heading == "metric" else heading),
                justify="left" if heading in ("setup", "verdict", "notes") else "right",
                overflow="fold",
                no_wrap=heading == "seconds",
                min_width=_MIN_WIDTH.get(heading, 6),
            )
    for row in rows:
        table.add_row(
            Text(row.setup, style="bold"),
            *([Text(row.seeds)] if with_seeds else []),
            _pair(row.metric, width),
            _pair(row.difference, width),
            Text(row.verdict, style=_STYLES.get(row.style, "")),
            Text(row.seconds),
            *([_pair(row.predicted, width)] if predicted else []),
            _pair(row.speed_up, width),
            Text(row.notes),
        )
    return table


def _pair(texts: tuple[str, str], width: int) -> Text:
    value, interval = texts
    text = Text(value)
    if interval:
        text.append(" " if width >= _WIDE else "\n").append(interval, style="dim")
    return text


def _below(block: Block) -> Iterator[RenderableType]:
    yield Text(summary(block))
    for line in remarks(block):
        yield _hanging("·", Text(line, style="dim"))
    if block.flags:
        yield Text("Flags (flagged runs still count in the means)", style="bold")
    for flag in block.flags:
        text = Text.assemble((f"{flag.kind}: ", "yellow"), flag.text)
        for detail in flag.details:
            text.append(f"\n  {detail}", style="dim")
        yield _hanging(str(flag.number), text)
    yield Text("")


def _hanging(label: str, text: Text) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", min_width=2)
    grid.add_column(overflow="fold")
    grid.add_row(label, text)
    return grid
