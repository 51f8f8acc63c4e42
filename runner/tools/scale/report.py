"""The findings of a branch test: a sentence, a table, a picture, and a run in MLflow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runner.config.plain import to_plain
from runner.cost.sample_cost import Beyond, SampleCost
from runner.folder.files import sha256, write_json, write_text
from runner.folder.metrics_log import FILE_NAME as METRICS_FILE
from runner.folder.metrics_log import MetricsLog
from runner.folder.record import FINISHED
from runner.plan.experiment import Experiment
from runner.plan.tables import plain_table
from runner.tools.compare.plots import plot_file
from runner.tools.scale.branches import LONGER, SAME, UNDECIDED, Cell, Findings
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord, user_tags
from runner.track.description import NOTE_TAG
from runner.track.secrets import masked
from runner.track.store import store_of
from runner.track.tracker import build_tracker

#: The tag with a digest of the result.
_RESULT_TAG = "scale.result"
#: Percent; what is lost beyond it is not worth a number.
_MOST_SHOWN = 1000
_HEADS = ("batch", "rule", "progress lost", "90% interval", "verdict")


def answer(findings: Findings, experiment: Experiment) -> str:
    """Return what the test has found, in one sentence."""
    unit, reference = experiment.facts.unit, findings.reference
    if findings.rule is None:
        same = f"no batch above the reference batch ({reference} {unit}) was shown to reach the same {findings.by}"
    else:
        workers = findings.largest // reference
        each = f" ({workers} workers × {reference})" if findings.largest % reference == 0 else ""
        same = (
            f"up to {findings.largest} {unit}{each} the held-out {findings.by} is the same with scaling={findings.rule}"
        )
    cell = findings.beyond
    if cell is None:
        return f"{same}; larger batches were not tried"
    return f"{same}; at {cell.batch} {_beyond(findings, cell)}"


def _beyond(findings: Findings, cell: Cell) -> str:
    if cell.verdict == UNDECIDED:
        lost, interval = _share(cell.difference.value, findings), cell.interval
        between = f"{_share(interval.low, findings)} to {_share(interval.high, findings)}"
        lost = lost.removeprefix("+")
        of_progress = f"scaling={cell.rule} loses {lost} of the progress, {between}"
        return f"{findings.seeds} seeds are too few to decide ({of_progress})"
    if cell.diverged or findings.more_samples is None:
        return "every rule diverged"
    if math.isinf(findings.more_samples):
        return f"it needs more than {LONGER[-1]:g} times the samples with scaling={cell.rule}, the best rule"
    return f"it needs about {findings.more_samples:.2g} times the samples with scaling={cell.rule}, the best rule"


def _rows(findings: Findings) -> list[tuple[str, str, str, str, str]]:
    """Batch, rule, what is lost as a share of the progress, its interval, and the verdict."""
    rows = [(str(findings.reference), "reference", "0%", "", "")]
    for cell in sorted(findings.cells, key=lambda cell: (cell.batch, cell.difference.value)):
        interval = cell.interval if not cell.diverged else None
        lost = "diverged" if cell.diverged else _share(cell.difference.value, findings)
        between = f"{_share(interval.low, findings)} to {_share(interval.high, findings)}" if interval else ""
        rows.append((str(cell.batch), cell.rule, lost, between, cell.verdict))
    return rows


def _share(value: float, findings: Findings) -> str:
    if not math.isfinite(value):
        return "unknown"
    share = 100 * value / findings.progress
    return f"{share:+.0f}%" if abs(share) < _MOST_SHOWN else f"over {_MOST_SHOWN:,}%"


def print_findings(findings: Findings, experiment: Experiment, console: Console) -> None:
    """Print the table."""
    limit = f"{100 * findings.limit / findings.progress:g}%"
    table: Table = plain_table(f"Held-out {findings.by} after equal {experiment.facts.unit}")
    table.caption, table.caption_justify = (
        f"{findings.seeds} seeds; the same: at most {limit} lost, one-sided test at 5%",
        "left",
    )
    for name in _HEADS:
        table.add_column(name, justify="left" if name in ("rule", "verdict") else "right")
    for row in _rows(findings):
        table.add_row(*row, style="bold" if row[4] == SAME else "")
    console.print(table)


def write_report(findings: Findings, experiment: Experiment, folder: Path) -> None:
    """Write `result.json`, `table.md` and `scale.png`."""
    cells = [
        {**dataclasses.asdict(cell), "low": cell.interval.low, "high": cell.interval.high} for cell in findings.cells
    ]
    beyond = None if findings.beyond is None else Beyond(findings.beyond.batch, findings.beyond.rule)
    cost = SampleCost(
        recipe=experiment.config.recipe["name"],
        model=experiment.model_name,
        data=experiment.facts.digest,
        reference=findings.reference,
        largest=findings.largest,
        rule=findings.rule,
        beyond=beyond,
        more_samples=findings.more_samples,
        more_samples_range=findings.more_samples_range,
    )
    compared = {"by": findings.by, "start": findings.start, "limit": findings.limit}
    found = {"gained": dataclasses.asdict(findings.gained), "cells": cells, "answer": answer(findings, experiment)}
    write_json(folder / "result.json", {**to_plain(cost), **compared, **found})
    lines = [_HEADS, ("--:", "---", "--:", "--:", "---"), *_rows(findings)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    write_text(folder / "table.md", f"{table}\n\n{answer(findings, experiment)}\n")
    _plot(findings, folder / "scale.png")


def _plot(findings: Findings, path: Path) -> None:
    with plot_file(path) as (axes,):
        share = 100 / findings.progress
        axes.axhspan(-1e6, findings.limit * share, color="#3f8f5b", alpha=0.08, label="the same")
        axes.axhline(0, color="#4a4e57", linewidth=1)
        rules = list(dict.fromkeys(cell.rule for cell in findings.cells))
        batches = sorted({cell.batch for cell in findings.cells})
        highest = findings.limit * share
        for number, rule in enumerate(rules):
            cells = [cell for cell in findings.cells if cell.rule == rule and not cell.diverged]
            x = [batches.index(cell.batch) + 1 + 0.08 * (number - (len(rules) - 1) / 2) for cell in cells]
            y = [cell.difference.value * share for cell in cells]
            spread = [min(cell.interval.half_width, 10 * findings.progress) * share for cell in cells]
            axes.errorbar(x, y, yerr=spread, marker="o", markersize=4, capsize=3, linewidth=1, label=rule)
            highest = max([highest, *y])
        axes.set_ylim(min(-0.3 * highest, -5), 1.25 * min(highest, 150) + 5)
        axes.plot([0], [0], marker="o", markersize=4, color="#4a4e57")
        axes.set_xlim(-0.3, len(batches) + 0.4)
        axes.set_xticks(range(len(batches) + 1), [str(findings.reference), *map(str, batches)])
        axes.set_xlabel("global batch")
        axes.set_ylabel("progress lost, % (90% interval)")
        axes.set_title(f"Held-out {findings.by} after equal samples, against the reference batch")
        axes.legend(loc="upper left")


def send(findings: Findings, experiment: Experiment, folder: Path) -> Sequence[str]:
    """Log the result as a run to the trackers; lines that say how to open it. One that fails costs a warning.

    A test that was continued, and has another result, is another run.
    """
    tracking = experiment.config.tracking
    uri = store_of(tracking)
    if uri is None and not tracking.local:
        return []
    result = sha256(folder / "result.json")[:16]
    card = TrackingRecord.read(folder) if (folder / CARD_FILE).exists() else None
    again = card is not None and card.tags.get(_RESULT_TAG) == result
    if card is None or not again:
        (folder / METRICS_FILE).unlink(missing_ok=True)
        store = None if uri is None else masked(uri)
        card = _card(findings, experiment, store, result, (folder / "table.md").read_text(encoding="utf-8"))
    log = MetricsLog(folder)
    for cell in findings.cells:
        if not cell.diverged:
            log.write(cell.batch, {f"eval/lost_share/{cell.rule}": cell.difference.value / findings.progress})
    log.close()
    tracker = build_tracker(tracking, card, folder, resumed=again)
    tracker.start()
    tracker.finish(FINISHED)
    return tracker.how_to_open()


def _card(findings: Findings, experiment: Experiment, store: str | None, result: str, table: str) -> TrackingRecord:
    config, sentence = experiment.config, answer(findings, experiment)
    params = {
        "recipe": str(config.recipe["name"]),
        "model": experiment.model_name,
        "reference_batch": str(findings.reference),
        "base_lr": f"{config.optimizer.lr:.12g}",
        "rules": ",".join(dict.fromkeys(cell.rule for cell in findings.cells)),
        "seeds": str(findings.seeds),
    }
    tags = {
        **user_tags(),
        NOTE_TAG: f"{sentence}\n\n{table}",
        _RESULT_TAG: result,
        "scale.answer": sentence,
        "scale.largest_batch": str(findings.largest),
    }
    name = f"scale · {config.recipe['name']} · from {findings.reference}"
    return TrackingRecord(experiment=config.tracking.experiment, run_name=name, params=params, tags=tags, store=store)
