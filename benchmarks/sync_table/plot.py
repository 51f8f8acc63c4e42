"""The picture: accuracy against the number of steps, seeds as points, one worker and the margin as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import runner.compare
from benchmarks.sync_table.compared import MARGIN
from benchmarks.sync_table.setups import COLUMNS, POLICIES, WORKERS, K
from runner.compare.results import Block
from runner.compare.results import SetupResult as Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = Path(runner.compare.__file__).with_name("plots.mplstyle")
_SERIES = {"accumulation": "#c8553d", "k": "#1b6ca8"}
_MARKERS = {"s": "#3f8f5b", "^": "#8a5aab", "v": "#b98b1d", "D": "#2fa4a9", "P": "#c2518b", "X": "#4a4e57"}
_ONE_WORKER = "#111418"


def write_plot(blocks: Mapping[str, Block], majority: float, path: Path) -> None:
    """One panel per learning rate. `majority`: accuracy in percent of one answer for all sentences."""
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(fname=_STYLE):
        figure, panels = _panels(len(blocks))
        for (scaling, block), axes in zip(blocks.items(), panels, strict=True):
            _draw(axes, block, scaling, majority)
        panels[0].set_ylabel("accuracy in %, seeds and their mean")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
        figure.savefig(path, facecolor="white")


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 4.4 * number, 4.2), layout="constrained")
    return figure, list(figure.subplots(1, number, sharey=True, squeeze=False).flat)


def _draw(axes: Axes, block: Block, scaling: str, majority: float) -> None:
    one = block.rows[0].metric.value
    axes.axhspan(one - MARGIN, one + MARGIN, color="#eef3f7", zorder=0)
    axes.axhline(one, color=_ONE_WORKER, lw=0.8, label=f"one worker, ± {MARGIN:g} point")
    axes.axhline(majority, color=_ONE_WORKER, lw=0.8, ls=":", label="one answer for all")
    by_name = {row.setup.name: row for row in block.rows}
    for shift, (series, colour) in zip((0.96, 1.04), _SERIES.items(), strict=True):
        names = {step: f"{series}{step}-{scaling}" if step > 1 else f"sync-{scaling}" for step in COLUMNS}
        found = [(step * shift, by_name[name]) for step, name in names.items() if name in by_name]
        _points(axes, found, colour, "o")
        means = [row.metric.value for _, row in found]
        axes.plot([x for x, _ in found], means, color=colour, lw=1.4, label=f"{WORKERS} workers, {series}")
    for number, (name, (marker, colour)) in enumerate(zip(POLICIES, _MARKERS.items(), strict=False)):
        row = by_name.get(f"{name}-{scaling}")
        if row is not None:
            x = K * 1.18 * 1.13**number
            _points(axes, [(x, row)], colour, marker)
            axes.plot([x], [row.metric.value], marker, color=colour, ms=7, label=f"{name}, k = {K}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(COLUMNS, [str(step) for step in COLUMNS])
    axes.set_title(f"scaling={scaling}")
    axes.set_xlabel("steps of accumulation, or steps between synchronisations (k)")


def _points(axes: Axes, found: Sequence[tuple[float, Row]], colour: str, marker: str) -> None:
    """Every seed, faint."""
    for x, row in found:
        values = list(row.setup.metrics.values())
        axes.plot([x] * len(values), values, marker, color=colour, ms=3.5, alpha=0.35, mew=0)
