"""A comparison in Markdown, as MLflow shows it in the description of a run."""

from __future__ import annotations

from runner.compare import shown
from runner.compare.comparison import Block, Comparison
from runner.compare.shown import ShownRow

#: What every MLflow store takes as the value of a tag.
MOST_CHARACTERS = 5_000
_HEADINGS = ("setup", "seeds", "{metric}", "difference", "verdict", "speed-up")


def description(comparison: Comparison) -> str:
    """The answer for each block as a table, without the tables where that would be too long for a store."""
    tables = "\n\n".join(_block(block) for block in comparison.blocks)
    text = f"{tables}\n\nThe report is among the artifacts: `compare/report.html`."
    if len(text) <= MOST_CHARACTERS:
        return text
    sentences = "\n".join(f"- {_plain(block.title)}: {_plain(shown.summary(block))}" for block in comparison.blocks)
    return f"{sentences}\n\nThe report is among the artifacts: `compare/report.html`."[:MOST_CHARACTERS]


def _block(block: Block) -> str:
    headings = [heading.format(metric=block.key.metric) for heading in _HEADINGS]
    rows = [headings, ["---"] * len(headings)]
    rows += [_cells(shown.shown_row(block, row)) for row in block.rows]
    table = "\n".join(f"| {' | '.join(map(_plain, cells))} |" for cells in rows)
    return f"**{_plain(block.title)}**: {_plain(shown.summary(block))}\n\n{table}"


def _cells(row: ShownRow) -> list[str]:
    pairs = (row.metric, row.difference, row.speed_up)
    metric, difference, speed_up = (" ".join(part for part in pair if part) for pair in pairs)
    return [row.setup, row.seeds, metric, difference, row.verdict, speed_up]


def _plain(text: str) -> str:
    """Text that names come into from anywhere: it must neither end a cell nor become markup."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
