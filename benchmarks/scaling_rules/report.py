"""`table.md` and `plot.png`: the metric of each rule at each batch size against the reference batch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.scaling_rules.plan import BASELINE, RULES, TASKS, Task
from benchmarks.sync_frontier.plan import TUNING_SEEDS
from benchmarks.sync_frontier.rows import FINISHED, Row
from runner.tools.compare.columns import cells_of
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.plots import plot_file
from runner.tools.compare.results import Block, SetupResult
from runner.tools.compare.runs import ACCUMULATION, BlockKey, FoundRuns, Run, newest_of_each_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_report(rows: Sequence[Row], folder: Path) -> None:
    """Write both files for the tasks of which the baseline has run, on each task's newest data."""
    newest = {row["task"]: row["data"] for row in rows if row["status"] == FINISHED}
    rows = [row for row in rows if row["data"] == newest.get(row["task"]) and int(row["seed"]) not in TUNING_SEEDS]
    blocks = {task.name: block for task in TASKS.values() if (block := _block(task, rows)) is not None}
    if not blocks:
        print(f"{folder}: no seed of the reference batch has run, so there is nothing to compare with")
        return
    parts = [_section(TASKS[name], block, _failed(TASKS[name], rows)) for name, block in blocks.items()]
    (folder / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    _plot(blocks, folder / "plot.png")
    print(f"{folder / 'table.md'}")


def _setup(ratio: str | float, rule: str) -> str:
    return rule if rule == BASELINE else f"× {float(ratio):g} {rule}"


def _block(task: Task, rows: Sequence[Row]) -> Block | None:
    own = [row for row in rows if row["task"] == task.name and row["status"] == FINISHED]
    runs = [_run(task, number, row) for number, row in enumerate(own)]
    if not any(run.setup == BASELINE for run in runs):
        return None
    (block,) = compare_runs(newest_of_each_seed(FoundRuns(runs)), BASELINE, task.margin).blocks
    return block


def _run(task: Task, position: int, row: Row) -> Run:
    return Run(
        source=f"{_setup(row['ratio'], row['rule'])} seed {row['seed']}",
        block=BlockKey(task.name, (), int(row["samples_seen"]), 1, task.metric, "max", row["data"]),
        setup=_setup(row["ratio"], row["rule"]),
        digest=row["digest"],
        seed=int(row["seed"]),
        workers=1,
        accumulation=1,
        k=1,
        precision="bf16",
        method=ACCUMULATION,
        metric=float(row["metric"]),
        seconds=None,
        machine=row["machine"] or None,
        order=f"{position:06d}",
    )


def _failed(task: Task, rows: Sequence[Row]) -> Counter[str]:
    """Seeds of each setup of which no run finished."""
    seeds: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row["task"] == task.name:
            seeds.setdefault(_setup(row["ratio"], row["rule"]), {}).setdefault(row["seed"], []).append(row["status"])
    return Counter({name: sum(FINISHED not in tried for tried in own.values()) for name, own in seeds.items()})


def _section(task: Task, block: Block, failed: Counter[str]) -> str:
    heads = ["batch", "rule", "seeds", task.metric, "difference, 90% interval", f"margin {task.margin:g}"]
    lines = [heads, ["--:", "---", *("--:" for _ in heads[2:])]]
    for result in sorted(block.rows, key=lambda result: _place(result.setup.name)):
        ratio, rule = _place(result.setup.name)
        shown = cells_of(block, result)
        difference = shown["difference"].in_one_line if result.difference else ""
        name = BASELINE if result.setup.name == BASELINE else f"`{RULES[rule]}`"
        batch = f"{int(task.reference_batch * ratio)}"
        runs = failed[result.setup.name]
        verdict = f"{runs} run{'s' * (runs > 1)} failed" if runs else shown["verdict"].text
        lines.append([batch, name, shown["seeds"].text, _metric(result), difference, verdict])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {task.name}\n\n{text}"


def _place(setup: str) -> tuple[float, int]:
    if setup == BASELINE:
        return 1.0, -1
    _, ratio, rule = setup.split()
    return float(ratio), RULES.index(rule)


def _metric(result: SetupResult) -> str:
    values = sorted(run.metric for run in result.setup.runs if run.metric is not None)
    mean = sum(values) / len(values)
    return f"{mean:.1f} ({values[0]:.1f} to {values[-1]:.1f})"


def _plot(blocks: dict[str, Block], path: Path) -> None:
    with plot_file(path, width=5 * len(blocks), panels=len(blocks)) as panels:
        for axes, (name, block) in zip(panels, blocks.items(), strict=True):
            _draw(axes, TASKS[name], block)


def _draw(axes: Axes, task: Task, block: Block) -> None:
    means = {
        _place(result.setup.name): [run.metric for run in result.setup.runs if run.metric is not None]
        for result in block.rows
    }
    reference = means[1.0, -1]
    axes.axhline(sum(reference) / len(reference), color="grey", linewidth=1)
    for number, rule in enumerate(RULES):
        points = sorted((ratio, values) for (ratio, at), values in means.items() if at == number)
        if points:
            points = sorted([(1.0, reference), *points])
            ratios = [ratio for ratio, _ in points]
            axes.plot(ratios, [sum(values) / len(values) for _, values in points], marker="o", label=rule)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("batch ÷ reference batch")
    axes.set_ylabel(task.metric)
    axes.set_title(task.name)
    axes.legend()
