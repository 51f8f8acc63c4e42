"""Print a comparison in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.tools.compare.columns import Cell, table_of
from runner.tools.compare.results import Block, RunComparison
from runner.tools.compare.text import direction, notices, remarks, summary

#: From this width on, a value and its interval are on one line.
_WIDE = 130
_COLUMNS = ("setup", "metric", "difference", "verdict", "seconds", "predicted", "speed-up", "notes")
#: Widths below which an ordinary word in the column would be broken.
_MIN_WIDTH = {"setup": 12, "verdict": len("comparable"), "notes": len("notes")}
_STYLES = {"equivalent": "green", "better": "green", "different": "red", "undecided": "yellow", "no-verdict": "dim"}


def print_comparison(comparison: RunComparison, console: Console) -> None:
    """Tables, verdicts and flags, block by block."""
    for block in comparison.blocks:
        console.print(_block(block, console.width))
    for sentence in notices(comparison):
        console.print(Text(sentence, style="yellow"))
        console.print()
    rule = "equivalent: 90% interval inside the margin; different: 95% interval excludes 0; see the report for details"
    if any(block.baseline.first.design for block in comparison.blocks):
        rule = (
            "seeds were added until setups were decided: intervals are so wide that over all looks at most 5 of 100 "
            "verdicts of each kind are wrong; see the report for details"
        )
    console.print(Text(rule, style="dim"))


def _block(block: Block, width: int) -> RenderableType:
    headline = Text(block.title, style="bold underline")
    headline.append(f"   {direction(block)}", style="not underline dim")
    names: Sequence[str] = _COLUMNS
    counts = {len(row.setup.runs) for row in block.rows}
    if len(counts) == 1:
        seeds = counts.pop()
        headline.append(f", {seeds} seed{'s' if seeds != 1 else ''} each", style="not underline dim")
    else:
        names = ("setup", "seeds", *names[1:])
    return Group(headline, _table(block, names, width), *_below(block))


def _table(block: Block, names: Sequence[str], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    columns, rows = table_of(block, names)
    for column in columns:
        table.add_column(
            Text(column.heading(block)),
            justify="left" if column.is_text else "right",
            style="bold" if column.name == "setup" else "",
            overflow="fold",
            no_wrap=column.name == "seconds",
            min_width=_MIN_WIDTH.get(column.name, 6),
        )
    for row in rows:
        table.add_row(*(_text(cell, width) for cell in row))
    return table


def _text(cell: Cell, width: int) -> Text:
    text = Text(cell.text, style=_STYLES.get(cell.style, ""))
    if cell.detail:
        text.append(" " if width >= _WIDE else "\n").append(cell.detail, style="dim")
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
