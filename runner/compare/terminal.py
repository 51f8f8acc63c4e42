"""A comparison on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.compare import shown
from runner.compare.comparison import Block, Comparison
from runner.compare.published_layout import PublishedTable, published_tables
from runner.compare.remarks import remarks

#: From this width on a value and its interval stand in one line.
_WIDE = 130
#: Columns that an ordinary word of theirs needs, or it would be broken.
_LEAST = {"setup": 12, "verdict": len("comparable"), "notes": len("notes")}
_STYLES = {"equivalent": "green", "better": "green", "different": "red", "undecided": "yellow", "no-verdict": "dim"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Tables, verdicts and findings, block by block; then the published layout where blocks have that shape."""
    for block in comparison.blocks:
        console.print(_block(block, comparison.margin, console.width))
    for table in published_tables(comparison.blocks):
        console.print(_published(table, console.width))
    if sentence := shown.refused_sentence(comparison):
        console.print(Text(sentence, style="yellow"))
        console.print()
    rule = (
        f"equivalent: 90% interval inside ±{comparison.margin:g}; different: 95% interval without 0; more in the report"
    )
    console.print(Text(rule, style="dim"))


def _block(block: Block, margin: float, width: int) -> RenderableType:
    rows = [shown.shown_row(block, row) for row in block.rows]
    common = shown.seeds_in_common(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in shown.HEADINGS:
        if heading == "seeds" and common is not None:
            continue
        table.add_column(
            Text(block.key.metric if heading == "metric" else heading),
            justify="left" if heading in ("setup", "verdict", "notes") else "right",
            overflow="fold",
            no_wrap=heading == "seconds",
            min_width=_LEAST.get(heading, 6),
        )
    for row in rows:
        cells = [
            Text(row.setup, style="bold"),
            *([] if common is not None else [Text(row.seeds)]),
            _pair(row.metric, width),
            _pair(row.difference, width),
            Text(row.verdict, style=_STYLES.get(row.kind, "")),
            Text(row.seconds),
            _pair(row.speed_up, width),
            Text(row.notes),
        ]
        table.add_row(*cells)
    headline = Text(block.title, style="bold underline")
    headline.append(f"   {shown.direction(block)}", style="not underline dim")
    if common is not None:
        headline.append(f", {common} seed{'s' if common != '1' else ''} each", style="not underline dim")
    return Group(headline, table, *_below(block, margin))


def _pair(texts: tuple[str, str], width: int) -> Text:
    value, uncertainty = texts
    text = Text(value)
    if uncertainty:
        text.append(" " if width >= _WIDE else "\n").append(uncertainty, style="dim")
    return text


def _below(block: Block, margin: float) -> Iterator[RenderableType]:
    yield Text(shown.summary(block))
    for line in [*shown.relations(block), *remarks(block, margin)]:
        yield _hanging("·", Text(line, style="dim"))
    if block.findings:
        yield Text("Findings (nothing is left out of a mean)", style="bold")
    for finding in block.findings:
        text = Text.assemble((f"{finding.kind}: ", "yellow"), finding.text)
        for detail in finding.details:
            text.append(f"\n  {detail}", style="dim")
        yield _hanging(str(finding.number), text)
    yield Text("")


def _hanging(label: str, text: Text) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", min_width=2)
    grid.add_column(overflow="fold")
    grid.add_row(label, text)
    return grid


def _published(table: PublishedTable, width: int) -> RenderableType:
    title = Text(f"{table.title}: metric over speed-up", style="bold")
    fits = 10 + 8 * len(table.columns) <= width
    parts = [table] if fits else [table.only("accumulation"), table.only("k")]
    footnote = [Text("* a seed collapsed or its time is an outlier: see the findings", style="dim")]
    return Group(title, *map(_published_part, parts), *(footnote if table.has_doubtful else []), "")


def _published_part(table: PublishedTable) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    drawn.add_column("samples", justify="right", vertical="bottom")
    group = None
    for column in table.columns:
        name, step = shown.column_heading(column)
        label = {"accumulation": "acc"}.get(name, name)
        heading = "one" if not step else f"{label} {step}" if name != group else step
        group = name
        drawn.add_column(heading, justify="right", no_wrap=True)
    for samples, cells in table.rows:
        pairs = [shown.published_cell(cells.get(column)) for column in table.columns]
        drawn.add_row(f"{samples:,}", *[f"{metric}\n{speed_up}" for metric, speed_up in pairs])
    return drawn
