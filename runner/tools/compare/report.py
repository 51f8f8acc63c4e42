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
from runner.tools.compare.plots import write_plots
from runner.tools.compare.results import Block, RunComparison, SetupResult
from runner.tools.compare.runs import prediction_error
from runner.tools.compare.statistics import SINGLE_VALUE, Interval, standard_error
from runner.tools.compare.text import (
    NOTHING,
    direction,
    nothing_compared,
    remarks,
    row_text,
    shows_predictions,
    shows_use_of_devices,
    skipped_sentence,
    summary,
)
from runner.tools.compare.verdict import DIFFERENCE_LEVEL, DIFFERENT, EQUIVALENCE_LEVEL, rule
from runner.track.card import git_commit
from runner.track.description import DIFFERENCE, NOTE_TAG, SPEED_UP, VERDICT_TAG

#: The longest tag value that every MLflow store accepts.
MAX_TAG_CHARACTERS = 5_000
#: A space at which a line does not break: each row of a table is one line.
_NO_BREAK = "\N{NO-BREAK SPACE}"
_CAPTIONS = {
    "metric_vs_speed.png": "Metric against speed-up, one point per setup. Setups that differ in one number only are "
    "connected and labelled with it. Setups that were rehearsed or not timed are not drawn.",
    "loss_vs_samples.png": "Training loss against samples seen: thin lines are seeds, thick lines their mean.",
    "prediction.png": "Seconds of training that were predicted before each run, and what it took: a point per run. "
    "The line is a perfect prediction, the bands are errors of 10% and 25%.",
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
        notices=list(filter(None, (nothing_compared(comparison), skipped_sentence(comparison)))),
        rule=rule("the margin given below each table"),
        command=command,
        date=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=f"{__version__}, commit {commit[:12]}" if commit else __version__,
        direction=direction,
        remarks=remarks,
        row_text=row_text,
        shows_predictions=shows_predictions,
        shows_use_of_devices=shows_use_of_devices,
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
        speed_up, _ = row_text(block, row).speed_up
        verdicts.append(f"{name}: {_word(row)}{f', {speed_up}' if row.speed_up is not None else ''}")
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
    rows = [["setup", "verdict", "speed-up", block.key.metric, "difference"], ["---"] * 5]
    for row, result in ((row_text(block, one), one) for one in block.rows):
        metric, difference, speed_up = (
            " ".join(filter(None, pair)) for pair in (row.metric, row.difference, row.speed_up)
        )
        rows.append([f"{row.setup} ({row.seeds} seeds)", _word(result), speed_up, metric, difference])
    lines = [" | ".join(_escaped(cell).replace(" ", _NO_BREAK) for cell in cells) for cells in rows]
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


def run_rows(comparison: RunComparison) -> list[dict[str, Any]]:
    """One row per run. Runs that are not compared have only a source and a flag."""
    rows = []
    for block in comparison.blocks:
        for row in block.rows:
            for run in row.setup.runs:
                rows.append(
                    {
                        "source": run.source,
                        "block": block.title,
                        "setup": row.setup.name,
                        "seed": run.seed,
                        "metric_name": block.key.metric,
                        "metric": run.metric,
                        "train_seconds": run.seconds,
                        "workers": run.workers,
                        "accumulation_steps": run.accumulation,
                        "k": run.k,
                        "precision": run.precision,
                        "rehearsed": run.rehearsed,
                        "machine": run.machine,
                        "jobs_at_once": run.jobs_at_once,
                        "busy": run.busy,
                        "tokens_per_s": run.tokens_per_s,
                        "model_flops_utilization": run.model_flops_utilization,
                        "peak_memory_bytes": run.peak_memory_bytes,
                        "predicted_seconds": run.predicted_seconds,
                        "prediction_error": prediction_error(run),
                        "mlflow_run_id": run.mlflow_run_id,
                        "baseline": row.setup is block.baseline,
                        "flags": "; ".join(flag.kind for flag in block.flags if run.source in flag.runs),
                    }
                )
    return rows + [{"source": one.source, "flags": f"not compared: {one.reason}"} for one in comparison.skipped]


def setup_rows(comparison: RunComparison) -> list[dict[str, Any]]:
    """One row per setup with all its numbers; None: unknown."""
    return [_setup_row(block, row) for block in comparison.blocks for row in block.rows]


def _setup_row(block: Block, row: SetupResult) -> dict[str, Any]:
    difference, speed = row.difference, row.speed_up
    narrow = difference.interval(EQUIVALENCE_LEVEL) if difference is not None else None
    wide = difference.interval(DIFFERENCE_LEVEL) if difference is not None else None
    error, df = standard_error(difference.how, difference.spreads, difference.sizes) if difference else (None, None)
    sampling = difference.sampling if difference is not None else None
    spread = difference is not None and difference.how != SINGLE_VALUE
    return {
        "block": block.title,
        "setup": row.setup.name,
        "baseline": block.baseline.name,
        "seeds": " ".join(map(str, row.setup.seeds)),
        "metric_name": block.key.metric,
        "metric_mean": row.metric.value,
        **_bounds("metric", row.metric.interval(DIFFERENCE_LEVEL), "95"),
        "metric_sd": row.metric.spreads[0] if len(row.setup.runs) > 1 else None,
        "difference": difference.value if difference is not None else None,
        "difference_by": difference.how if difference is not None else None,
        "difference_df": df if spread else None,
        "difference_standard_error": error if spread else None,
        "evaluation_rows": sampling.rows if sampling else None,
        "rows_standard_error": sampling.error if sampling else None,
        **_bounds("difference", narrow, "90"),
        **_bounds("difference", wide, "95"),
        "verdict": row.verdict.text if row.verdict is not None else None,
        "train_seconds": row.seconds,
        "speed_up": speed.value if speed is not None else None,
        **_bounds("speed_up", speed.interval if speed is not None else None, "95"),
        "speed_up_unreliable": block.uncertain_speed(row) if speed is not None else None,
        "comparability": row.comparability.text if row.comparability is not None else None,
        "findings": " ".join(str(flag.number) for flag in block.flags_of(row.setup)),
        "margin": block.margin.value,
        "margin_unit": block.margin.unit,
        "margin_source": block.margin.source,
    }


def _bounds(name: str, interval: Interval | None, level: str) -> dict[str, float | None]:
    return {
        f"{name}_low_{level}": interval.low if interval is not None and interval.known else None,
        f"{name}_high_{level}": interval.high if interval is not None and interval.known else None,
    }
