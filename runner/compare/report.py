"""The folder of a comparison: tables, plots, and one HTML file that needs no other."""

from __future__ import annotations

import base64
import datetime
from dataclasses import dataclass
from pathlib import Path

from runner import __version__
from runner.compare import shown
from runner.compare.comparison import Block, Comparison
from runner.compare.plots import write_plots
from runner.compare.published_layout import Column, PublishedTable, published_tables
from runner.compare.remarks import remarks
from runner.compare.verdict import rule
from runner.compare.write_csv import write_tables
from runner.track.card import git_commit

_CAPTIONS = {
    "metric_vs_speed.png": "Metric against speed-up, one point per setup; setups that differ in one number are joined "
    "and labelled by it. Rehearsed setups and those without a time are not drawn.",
    "loss_vs_samples.png": "Training loss against samples seen: each seed thin, the mean of a setup's seeds thick.",
    "time_breakdown.png": "Where a run's time goes, mean over a setup's seeds; steps as worker 0 spent them. "
    "Communication is what it waited for, not what travelled meanwhile. Rehearsed setups are not drawn.",
}


@dataclass(frozen=True)
class Image:
    name: str
    source: str
    caption: str


def write_report(comparison: Comparison, folder: Path, command: str) -> None:
    """Write `runs.csv`, `setups.csv`, the plots and `report.html`. `command`: as typed, without credentials."""
    write_tables(comparison, folder)
    images = [_image(path) for path in write_plots(comparison, folder)]
    (folder / "report.html").write_text(html(comparison, images, command), encoding="utf-8")


def _image(path: Path) -> Image:
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    return Image(path.name, f"data:image/png;base64,{content}", _CAPTIONS[path.name])


def html(comparison: Comparison, images: list[Image], command: str) -> str:
    """The report. Every name in it comes from a file or a store that anybody may have written: all is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    runs = sum(len(row.setup.runs) for block in comparison.blocks for row in block.rows)
    return environment.get_template("report.html.j2").render(
        runs=runs,
        setups=sum(len(block.rows) for block in comparison.blocks),
        blocks=[_block(block, comparison.margin) for block in comparison.blocks],
        tables=[_published(table) for table in published_tables(comparison.blocks)],
        images=images,
        refused=shown.refused_sentence(comparison),
        rule=rule(comparison.margin, "of the metric (points where it is in percent)"),
        command=command,
        date=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=_version(),
    )


def _block(block: Block, margin: float) -> dict[str, object]:
    return {
        "title": block.title,
        "direction": shown.direction(block),
        "metric": block.key.metric,
        "summary": shown.summary(block),
        "rows": [shown.shown_row(block, row) for row in block.rows],
        "sentences": [*shown.relations(block), *remarks(block, margin)],
        "findings": block.findings,
    }


def _published(table: PublishedTable) -> dict[str, object]:
    return {
        "title": table.title,
        "groups": _column_groups(table.columns),
        "steps": [shown.column_heading(column)[1] for column in table.columns],
        "rows": [
            (f"{samples:,}", [shown.published_cell(cells.get(column)) for column in table.columns])
            for samples, cells in table.rows
        ],
        "doubtful": table.has_doubtful,
    }


def _column_groups(columns: tuple[Column, ...]) -> list[tuple[str, int]]:
    """Headings of neighbouring columns of one method, with how many they span."""
    names = [shown.column_heading(column)[0] for column in columns]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _version() -> str:
    """The runner's version, with its commit where it lies in a repository."""
    commit = git_commit()
    return f"{__version__}, commit {commit[:12]}" if commit else __version__
