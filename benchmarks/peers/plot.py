"""Samples per second of all variants beside the limit, one panel per task."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.peers.cells import BASE, LIMIT, OURS, PROGRAMS, TASKS
from benchmarks.peers.records import Row
from benchmarks.peers.table import Measured

_LABELS = {
    OURS: "runner",
    BASE: "Accelerate",
    "trainer": "Trainer",
    "trainer_grouped": "Trainer, grouped by length",
    "plain": "plain PyTorch",
}
_LIMIT_LABEL = "limit: matrix products and optimizer alone"
_TITLES = {"cola": "CoLA, MiniLM", "squad": "SQuAD at 384 tokens, MiniLM", "gpt2": "text, a small GPT-2"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Medians with their range. The limit is a line across each group of bars."""
    measured = Measured(rows)
    tasks = [name for name in TASKS if any(cell.task == name for cell in measured.cells)]
    widths = [len({(cell.workers, cell.precision) for cell in measured.cells if cell.task == name}) for name in tasks]
    size = (2.2 + 1.2 * sum(widths), 4.4)
    figure, panels = pyplot.subplots(1, len(tasks), figsize=size, layout="constrained", width_ratios=widths)
    for name, axes in zip(tasks, [panels] if len(tasks) == 1 else panels, strict=True):
        _panel(axes, measured, name)
        axes.set_title(_TITLES[name], fontsize=10)
    first = figure.axes[0]
    first.set_ylabel("samples/s")
    known = dict(zip(*reversed(first.get_legend_handles_labels()), strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=2 * len(tasks), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axes: Axes, measured: Measured, task: str) -> None:
    cells = [cell for cell in measured.cells if cell.task == task]
    groups = list(dict.fromkeys((cell.workers, cell.precision) for cell in cells))
    others = dict.fromkeys(cell.variant for cell in cells)
    variants = [name for name in dict.fromkeys([*PROGRAMS, *others]) if name in others and name != LIMIT]
    bar = 0.8 / len(variants)
    for place, group in enumerate(groups):
        own = {cell.variant: cell for cell in cells if (cell.workers, cell.precision) == group}
        for number, name in enumerate(variants):
            if name not in own:
                continue
            values = [row.samples_per_s for row in measured.of(own[name])]
            middle = statistics.median(values)
            error = [[middle - min(values)], [max(values) - middle]]
            colour = f"C{[*PROGRAMS, *others].index(name) - 1}"
            x = place - 0.4 + bar * (number + 0.5)
            axes.bar(x, middle, bar * 0.92, yerr=error, capsize=2, color=colour, label=_LABELS.get(name, name))
        for limit in measured.like(next(iter(own.values())), LIMIT):
            level = statistics.median(row.samples_per_s for row in measured.of(limit))
            axes.hlines(level, place - 0.42, place + 0.42, color="black", label=_LIMIT_LABEL)
    axes.set_xticks(range(len(groups)), [f"{workers} worker{'s' * (workers > 1)}\n{name}" for workers, name in groups])
    axes.set_ylim(bottom=0)
