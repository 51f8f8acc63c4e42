"""The results in Markdown, in the layout of the published tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.sync_table.compared import MARGIN, compare_rows
from benchmarks.sync_table.rows import Row as Line
from benchmarks.sync_table.setups import COLUMNS, ONE, POLICIES, WORKERS, K
from runner.compare.results import Block
from runner.compare.results import SetupResult as Row
from runner.compare.statistics import deviation
from runner.compare.text import NOTHING, number, row_text
from runner.compare.verdict import rule

_TITLES = {
    "none": "The learning rate of one worker (`scaling=none`)",
    "linear": "The learning rate times the global batch over one worker's (`scaling=linear`)",
}
#: Where accuracy is near that of one answer for all, these tell more. No verdict: the margin is one of accuracy.
_BESIDE = {"matthews": ("Matthews correlation", 1), "eval_loss": ("Evaluation loss", 3)}
#: Findings about a metric; the others are about times, and this table makes no claim on those.
_ABOUT_METRICS = ("collapsed", "diverged")


def markdown(rows: Sequence[Line], set_aside: Sequence[Line]) -> str:
    """All tables. `rows`: of one experiment; `set_aside`: runs of others, which are counted."""
    accuracy = compare_rows(rows, "accuracy")
    if not accuracy:
        return "One worker has not run yet, so there is nothing to compare with.\n"
    parts = ["# Four workers against one, on CoLA", _introduction(rows, set_aside)]
    for scaling, block in accuracy.items():
        parts += [f"## {_TITLES[scaling]}", _layout(block, scaling), _policies(block, scaling)]
        parts += [_details(block, rows), *_findings(block)]
    for metric, (title, digits) in _BESIDE.items():
        for scaling, block in compare_rows(rows, metric).items():
            parts += [f"## {title}, `scaling={scaling}`", _layout(block, scaling, False, digits)]
            parts.append(_policies(block, scaling, False, digits))
    sentences = [one for one in rule(f"±{MARGIN:g} points of accuracy") if not one.startswith("Speed-up")]
    parts += ["## The rule", "\n".join(f"- {sentence}" for sentence in sentences)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(rows: Sequence[Line], set_aside: Sequence[Line]) -> str:
    first = rows[0]
    commits = ", ".join(f"`{one}`" for one in dict.fromkeys(row["commit"] for row in rows))
    text = (
        f"{len(rows)} runs, one worker and {WORKERS} workers, 8 samples a worker and forward pass; base learning rate "
        f"{float(first['base_lr']):g}, {first['epochs']} epochs. One answer for all sentences has an accuracy of "
        f"{float(first['majority']):.2f}%. ± is the standard deviation over seeds; verdicts are those of "
        f"`runner.compare` against one worker, margin {MARGIN:g} point of accuracy. Runner at {commits}; every run is "
        "a line of [runs.csv](runs.csv)."
    )
    if set_aside:
        runs = f"{len(set_aside)} runs of that file are" if len(set_aside) > 1 else "1 run of that file is"
        text += f" {runs} no part of this: other settings, or failed."
    return f"{text}\n\n![Accuracy](plot.png)"


def _layout(block: Block, scaling: str, verdicts: bool = True, digits: int = 1) -> str:
    """Accumulation and k down, their steps across; accumulation 1 and k = 1 are one setup and stand in both rows."""
    by_name = {row.setup.name: row for row in block.rows}
    one = cell(by_name[ONE], verdicts, digits)
    lines = [
        ["", *map(str, COLUMNS)],
        ["---", *("--:" for _ in COLUMNS)],
        ["one worker", one, *("" for _ in COLUMNS[1:])],
    ]
    for title, prefix in ((f"{WORKERS} workers, accumulation", "accumulation"), (f"{WORKERS} workers, k", "k")):
        names = [f"{prefix}{step}-{scaling}" if step > 1 else f"sync-{scaling}" for step in COLUMNS]
        lines.append([title, *(cell(by_name.get(name), verdicts, digits) for name in names)])
    return _table(lines)


def _policies(block: Block, scaling: str, verdicts: bool = True, digits: int = 1) -> str:
    by_name = {row.setup.name: row for row in block.rows}
    names = {"periodic": f"k{K}-{scaling}", **{name: f"{name}-{scaling}" for name in POLICIES}}
    heads = [[f"k = {K}", *names], ["---", *("--:" for _ in names)]]
    return _table([*heads, [block.key.metric, *(cell(by_name.get(name), verdicts, digits) for name in names.values())]])


def cell(row: Row | None, verdict: bool, digits: int = 1) -> str:
    """Mean ± standard deviation, and the verdict below it."""
    if row is None:
        return NOTHING
    values = list(row.setup.metrics.values())
    text = number(row.metric.value, digits)
    if len(values) > 1:
        text += f" ± {number(deviation(values), digits)}"
    if verdict and row.verdict is not None:
        text += f"<br>{row.verdict.text}"
    return text


def _details(block: Block, rows: Sequence[Line]) -> str:
    """Every setup with the difference that its verdict rests on, and what its replicas did."""
    heads = [
        "setup",
        "seeds",
        "accuracy",
        "difference, 90% interval",
        "verdict",
        "drift at the end",
        "cosine",
        "MB sent",
    ]
    lines = [heads, ["---", *("--:" for _ in heads[1:])]]
    for row in block.rows:
        shown = row_text(block, row)
        own = [line for line in rows if line["setup"] == row.setup.name]
        bytes_sent, drift = _mean(own, "comm_bytes"), _mean(own, "drift_last")
        lines.append(
            [
                f"`{shown.setup}`",
                shown.seeds,
                cell(row, False),
                " ".join(part for part in shown.difference if part) if row.difference else "",
                shown.verdict,
                f"{drift:.1e}" if drift is not None else "",  # as small as the learning rate has become by then
                _text(_mean(own, "cosine_mean"), 2),
                f"{bytes_sent / 1e6:,.0f}" if bytes_sent is not None else "",
            ]
        )
    return _table(lines)


def _mean(lines: Sequence[Mapping[str, str]], column: str) -> float | None:
    values = [float(line[column]) for line in lines if line[column]]
    return fmean(values) if values else None


def _text(value: float | None, digits: int) -> str:
    return number(value, digits) if value is not None else ""


def _findings(block: Block) -> list[str]:
    found = [one for one in block.flags if one.kind in _ABOUT_METRICS]
    return ["\n".join(f"- {one.kind}: {one.text}" for one in found)] if found else []


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
