"""`table.md`, and a plot for each task: the metric of each setup against one worker's, and its speed on a slow link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.slow_link import records
from benchmarks.slow_link.table import ratios
from benchmarks.sync_frontier.plan import ONE, SETUPS, TASKS, TUNING_SEEDS, Task, is_planned
from benchmarks.sync_frontier.rows import FINISHED, Row
from runner.tools.compare.columns import cells_of, number
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.plots import plot_file
from runner.tools.compare.results import Block, SetupResult
from runner.tools.compare.runs import ACCUMULATION, SINGLE, BlockKey, FoundRuns, K, Run, newest_of_each_seed
from runner.tools.compare.statistics import deviation

_SPEEDS = Path(__file__).parents[1] / "results" / "slow-link" / "measurements.csv"


def write_report(rows: Sequence[Row], folder: Path) -> None:
    """Write them for the tasks of which one worker has run, with the planned runs on each task's newest data."""
    rows = [row for row in rows if is_planned(row)]
    newest = {row["task"]: row["data"] for row in rows if row["status"] == FINISHED}
    rows = [row for row in rows if row["data"] == newest.get(row["task"])]
    blocks = {task.name: block for task in TASKS.values() if (block := _block(task, rows)) is not None}
    if not blocks:
        print(f"{folder}: no seed of one worker has run, so there is nothing to compare with")
        return
    speeds = {rate: _speeds(rate) for rate in ("1gbit", "100mbit")}
    parts = [_section(TASKS[name], block, rows, speeds) for name, block in blocks.items()]
    (folder / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    for name, block in blocks.items():
        _plot(TASKS[name], block, speeds, folder / f"{name}.png")
    print(f"{folder / 'table.md'}")


def _speeds(rate: str) -> dict[str, float]:
    """By setup: samples per second against one worker's, the median of all repetitions."""
    rows = records.read(_SPEEDS, rate) if _SPEEDS.exists() else []
    found = {name: ratios(rows, setup.on_a_link) for name, setup in SETUPS.items()}
    return {name: median(values) for name, values in found.items() if values}


def _block(task: Task, rows: Sequence[Row]) -> Block | None:
    own = [row for row in rows if row["task"] == task.name and row["status"] == FINISHED]
    runs = [_run(task, number, row) for number, row in enumerate(own) if int(row["seed"]) in task.seeds]
    if not any(run.setup == ONE for run in runs):
        return None
    (block,) = compare_runs(newest_of_each_seed(FoundRuns(runs)), ONE, task.margin).blocks
    return block


def _run(task: Task, position: int, row: Row) -> Run:
    setup = SETUPS[row["setup"]]
    return Run(
        source=f"{row['setup']} seed {row['seed']}",
        block=BlockKey(task.name, (), int(row["samples_seen"]), 1, task.metric, "max", row["data"]),
        setup=row["setup"],
        digest=row["digest"],
        seed=int(row["seed"]),
        workers=setup.workers,
        accumulation=1,
        k=setup.k,
        precision="bf16",
        method=SINGLE if setup.workers == 1 else K if setup.k > 1 else ACCUMULATION,
        metric=float(row["metric"]),
        seconds=None,
        machine=row["machine"] or None,
        order=f"{position:06d}",
    )


def _section(task: Task, block: Block, rows: Sequence[Row], speeds: Mapping[str, Mapping[str, float]]) -> str:
    heads = ["setup", "learning rate", "seeds", task.metric, "difference, 90% interval", f"margin {task.margin:g}"]
    heads += ["speed at 1 Gbit/s", "at 100 Mbit/s"]
    lines = [heads, ["---", *("--:" for _ in heads[1:])]]
    for result in block.rows:
        name, shown = result.setup.name, cells_of(block, result)
        rates = {f"{float(row['lr']):g}" for row in rows if row["task"] == task.name and row["setup"] == name
                 and int(row["seed"]) in task.seeds}  # fmt: skip
        at = [f"{found[name]:.2f}" if name in found else "" for found in speeds.values()]
        difference = shown["difference"].in_one_line if result.difference else ""
        seeds, verdict = shown["seeds"].text, shown["verdict"].text
        cells = [f"`{name}`", ", ".join(sorted(rates)), seeds, _metric(result), difference, verdict, *at]
        lines.append(cells)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {task.name}\n\n{text}\n\n{_tuning(task, rows)}"


def _metric(result: SetupResult) -> str:
    values = list(result.setup.metrics.values())
    spread = f" ± {number(deviation(values), 1)}" if len(values) > 1 else ""
    return f"{number(result.metric.value, 1)}{spread}"


def _tuning(task: Task, rows: Sequence[Row]) -> str:
    """What each learning rate gave with the tuning seeds."""
    lines = [["setup", *(f"{lr:g}" for lr in task.rates)], ["---", *("--:" for _ in task.rates)]]
    own = [row for row in rows if row["task"] == task.name and int(row["seed"]) in TUNING_SEEDS and row["metric"]]
    for setup in dict.fromkeys(row["setup"] for row in own):
        found = [[float(r["metric"]) for r in own if r["setup"] == setup and float(r["lr"]) == lr] for lr in task.rates]
        lines.append([f"`{setup}`", *(", ".join(number(value, 1) for value in values) for values in found)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{task.metric} of two other seeds, by learning rate:\n\n{table}"


def _plot(task: Task, block: Block, speeds: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """A line for each setup but the baseline: at the left what it is and how fast, its interval, its verdict."""
    compared = [result for result in block.rows if result.difference is not None]
    with plot_file(path, 7.6, 1.1 + 0.4 * len(compared)) as (axes,):
        axes.axvspan(-task.margin, task.margin, color="#e3ecf4", zorder=0)
        axes.axvline(0, color="#111418", lw=0.8)
        for line, result in enumerate(compared):
            value, interval = result.difference.value, result.difference.interval(0.9)
            low, high = (interval.low, interval.high) if math.isfinite(interval.low) else (value, value)
            axes.errorbar([value], [line], xerr=[[value - low], [high - value]], fmt="o", capsize=3, color="#1b6ca8")
            verdict = result.verdict.text if result.verdict is not None else "baseline"
            axes.annotate(verdict, (1, line), (6, 0), ("axes fraction", "data"), "offset points", va="center")
        axes.set_yticks(range(len(compared)), [_label(result.setup.name, speeds) for result in compared])
        axes.set_ylim(len(compared) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_title(f"{task.name}: {task.metric}, difference to one worker")
        axes.set_xlabel(f"points, 90% interval; shaded: margin of {task.margin:g}")


def _label(name: str, speeds: Mapping[str, Mapping[str, float]]) -> str:
    """The setup as its settings, and its speed at 1 Gbit/s."""
    setup = SETUPS[name]
    settings = " ".join(setup.overrides[1:]).replace("sync=streaming ", "streaming ").replace("sync.", "")
    rate = "at bf16's learning rate, " if setup.rate_of else ""
    speed = f"{speeds['1gbit'][name]:.2f} × one worker's speed" if name in speeds["1gbit"] else "speed not measured"
    return f"{settings}\n{rate}{speed}"
