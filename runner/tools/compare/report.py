"""Write a comparison: `runs.csv`, `setups.csv`, plots, `report.html`, and Markdown for MLflow."""

from __future__ import annotations

import base64
import csv
import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import __version__
from runner.tools.compare.columns import COLUMNS, NOTHING, cells_of, run_rows, setup_rows, table_of
from runner.tools.compare.plots import write_plots
from runner.tools.compare.results import Block, RunComparison, SetupResult
from runner.tools.compare.text import direction, notices, remarks, summary
from runner.tools.compare.verdict import DIFFERENT
from runner.track.card import git_commit
from runner.track.description import DIFFERENCE, NOTE_TAG, SPEED_UP, VERDICT_TAG

#: The longest tag value that every MLflow store accepts.
MAX_TAG_CHARACTERS = 5_000
#: A space at which a line does not break: each row of a table is one line.
_NO_BREAK = "\N{NO-BREAK SPACE}"
#: The columns of MLflow's description: what decides comes first.
_MARKDOWN = ("setup", "verdict", "speed-up", "metric", "difference")
_CAPTIONS = {
    "metric_vs_speed.png": "Metric against speed-up, one point per setup. Setups that differ in one number only are "
    "connected and labelled with it. Setups that were rehearsed or not timed are not drawn.",
    "looks.png": "Difference to the baseline while seeds were added, with the interval that decides. Dotted: margin.",
    "loss_vs_samples.png": "Training loss against samples seen: thin lines are seeds, thick lines their mean.",
    "time_breakdown.png": "Where the time of a run goes, mean over the seeds of a setup; steps as worker 0 measured "
    "them. Communication is time spent waiting, without transfers in the background. Rehearsed setups are not drawn.",
}


@dataclass(frozen=True)
class Image:
    name: str
    source: str
    caption: str


def write_report(comparison: RunComparison, folder: Path, command: str) -> None:
    """Write all files. `command`: as typed, without credentials."""
    _write_csv(folder / "runs.csv", run_rows(comparison))
    _write_csv(folder / "setups.csv", setup_rows(comparison))
    images = [_image(path) for path in write_plots(comparison, folder)]
    (folder / "report.html").write_text(_html(comparison, images, command), encoding="utf-8")


def _image(path: Path) -> Image:
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    return Image(path.name, f"data:image/png;base64,{content}", _CAPTIONS[path.name])


def _html(comparison: RunComparison, images: list[Image], command: str) -> str:
    """The report. Everything is escaped: its names come from files and stores that others may have written."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    blocks, commit = comparison.blocks, git_commit()
    return environment.get_template("report.html.j2").render(
        runs=sum(len(row.setup.runs) for block in blocks for row in block.rows),
        setups=sum(len(block.rows) for block in blocks),
        blocks=blocks,
        images=images,
        notices=list(notices(comparison)),
        command=command,
        date=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=f"{__version__}, commit {commit[:12]}" if commit else __version__,
        names=[column.name for column in COLUMNS],
        table_of=table_of,
        direction=direction,
        remarks=remarks,
        summary=summary,
    )


def logged_metrics(comparison: RunComparison) -> dict[str, float]:
    """Difference and speed-up of each setup, as the metrics of a sweep's run in MLflow; a single setup is not named."""
    rows = _compared(comparison)
    found: dict[str, float | None] = {}
    for name, (_, row) in rows.items():
        end = "/" + re.sub(r"[^\w.-]+", "_", name) if len(rows) > 1 else ""  # MLflow allows few characters
        found[f"{DIFFERENCE}{end}"] = row.difference.value if row.difference is not None else None
        found[f"{SPEED_UP}{end}"] = row.speed_up.value if row.speed_up is not None else None
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def logged_tags(comparison: RunComparison) -> dict[str, str]:
    """Verdicts with speed-ups in one line, for the list of runs, and the tables for the page of a sweep's run."""
    verdicts = []
    for name, (block, row) in _compared(comparison).items():
        speed_up = f", {cells_of(block, row)['speed-up'].text}" if row.speed_up is not None else ""
        verdicts.append(f"{name}: {_word(row)}{speed_up}")
    return {VERDICT_TAG: "; ".join(verdicts)[:MAX_TAG_CHARACTERS] or NOTHING, NOTE_TAG: markdown(comparison)}


def _compared(comparison: RunComparison) -> dict[str, tuple[Block, SetupResult]]:
    """The setups that are compared with a baseline by name, which has the block's title if there are several."""
    several = len(comparison.blocks) > 1
    return {
        f"{block.title} · {row.setup.name}" if several else row.setup.name: (block, row)
        for block in comparison.blocks
        for row in block.rows[1:]
    }


def markdown(comparison: RunComparison) -> str:
    """The tables as MLflow shows them in a run's description; only the summaries where tables would be too long.

    MLflow shows 100 pixels of it, five lines. So the first is a table with a line for each setup, or what several
    tables say.
    """
    end = "The report is among the artifacts: `compare/report.html`."
    titles = [_escaped(block.title) for block in comparison.blocks]
    sentences = [_escaped(summary(block)) for block in comparison.blocks]
    summaries = [f"- {title}: {sentence}" for title, sentence in zip(titles, sentences, strict=True)]
    tables = [_markdown_table(block) for block in comparison.blocks]
    if len(tables) == 1:
        text = f"{tables[0]}\n\n{titles[0]}: {sentences[0]}\n\n{end}"
    else:
        titled = [f"**{title}**\n\n{table}" for title, table in zip(titles, tables, strict=True)]
        text = "\n\n".join(["\n".join(summaries), *titled, end])
    if len(text) > MAX_TAG_CHARACTERS:
        text = "\n".join([*summaries, "", end])
    return text[:MAX_TAG_CHARACTERS]


def _markdown_table(block: Block) -> str:
    columns, cells = table_of(block, _MARKDOWN)
    rows = [[column.heading(block) for column in columns], ["---"] * len(columns)]
    for result, row in zip(block.rows, cells, strict=True):
        texts = {column.name: cell.in_one_line for column, cell in zip(columns, row, strict=True)}
        texts |= {"setup": f"{result.setup.name} ({len(result.setup.runs)} seeds)", "verdict": _word(result)}
        rows.append(list(texts.values()))
    lines = [" | ".join(_escaped(cell).replace(" ", _NO_BREAK) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _word(row: SetupResult) -> str:
    """The verdict without details, such as `different (worse)`."""
    verdict = row.verdict
    return "baseline" if verdict is None else verdict.short if verdict.kind == DIFFERENT else verdict.kind


def _escaped(text: str) -> str:
    """Names may contain anything: they must neither end a cell nor become markup."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, tuple(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
