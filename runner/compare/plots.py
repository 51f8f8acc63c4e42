"""The three pictures of a comparison. Each is made only where there is something to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from runner.compare.comparison import Block, Comparison, Row
from runner.compare.labels import place_labels
from runner.compare.runs import Phases
from runner.compare.setups import Setup
from runner.compare.verdict import DIFFERENCE_LEVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (
    "#1b6ca8",
    "#c8553d",
    "#3f8f5b",
    "#8a5aab",
    "#b98b1d",
    "#4a4e57",
    "#2fa4a9",
    "#c2518b",
    "#7b8f2a",
    "#7d5a3c",
)
_BASELINE = "#111418"
_START_UP, _TRAINING, _COMMUNICATION = "start-up to first step", "training", "communication"
_EVALUATION, _REST = "evaluation", "saving and the rest"
#: The parts of a bar, in their order. Training is taken apart where the device tells its phases.
_PARTS = {
    _START_UP: "#b8bec8",
    "data": "#8a5aab",
    "forward": "#7fb2d9",
    "backward": "#1b6ca8",
    "optimizer": "#3f8f5b",
    _TRAINING: "#2fa4a9",
    _COMMUNICATION: "#c8553d",
    "other": "#4a4e57",
    _EVALUATION: "#d9c89a",
    _REST: "#ece5d3",
}
_STYLE = Path(__file__).with_name("plots.mplstyle")


def write_plots(comparison: Comparison, folder: Path) -> list[Path]:
    """Write those plots for which there are data; their paths."""
    import matplotlib

    matplotlib.use("Agg")
    drawings: dict[str, Callable[[Comparison], Figure | None]] = {
        "metric_vs_speed.png": metric_vs_speed,
        "loss_vs_samples.png": loss_vs_samples,
        "time_breakdown.png": time_breakdown,
    }
    written = []
    with matplotlib.rc_context(fname=_STYLE):
        for name, draw in drawings.items():
            figure = draw(comparison)
            if figure is not None:
                figure.savefig(folder / name, facecolor="white")
                written.append(folder / name)
    return written


def _panels(number: int, wide: bool, heights: Sequence[float] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per block: two beside each other, or below each other where panels are `wide`."""
    from matplotlib.figure import Figure

    columns = 1 if wide or number == 1 else 2
    rows = math.ceil(number / columns)
    heights = heights or [4.6 if wide else 3.8] * rows
    figure = Figure(figsize=(9.5 if columns == 2 or wide else 6.5, sum(heights)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    panels = list(grid.flat)
    for unused in panels[number:]:
        unused.remove()
    return figure, panels[:number]


def metric_vs_speed(comparison: Comparison) -> Figure | None:
    """Metric against speed-up, a point per setup. Rehearsed setups have no speed-up and are not drawn."""
    blocks = [block for block in comparison.blocks if len(_timed(block)) > 0]
    if not blocks:
        return None
    figure, panels = _panels(len(blocks), wide=max(len(_timed(block)) for block in blocks) > 8)
    for block, axes in zip(blocks, panels, strict=True):
        _metric_vs_speed(axes, block, comparison.margin)
        axes.set_title(block.title)
    for block, axes in zip(blocks, panels, strict=True):
        _label_setups(axes, block)
    return figure


def _timed(block: Block) -> list[Row]:
    if not math.isfinite(block.rows[0].metric.value):
        return []
    return [row for row in block.rows if row.speed_up is not None and math.isfinite(row.metric.value)]


def _families(block: Block) -> dict[tuple[int, str], list[Row]]:
    """Rows by number of workers and method: one colour each."""
    families: dict[tuple[int, str], list[Row]] = {}
    for row in _timed(block):
        families.setdefault(row.setup.family, []).append(row)
    return families


def _series_name(rows: Sequence[Row]) -> str | None:
    """What the names of a series have in common, `4 GPUs · k`; None if the rows differ in more than one number."""
    names = [row.setup.name for row in rows]
    first, last = min(names), max(names)
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    name = first[:common].rstrip("0123456789 =·")
    is_series = len(rows) > 2 and name and all(_step(row, name).isdecimal() for row in rows)
    return name if is_series else None


def _step(row: Row, series: str) -> str:
    """What is left of a setup's name beside its series."""
    return row.setup.name[len(series) :].strip(" =·")


def _metric_vs_speed(axes: Axes, block: Block, margin: float) -> None:
    base = block.rows[0].metric.value
    axes.axhspan(base - margin, base + margin, color="#eef3f7", zorder=0, label=f"baseline ± {margin:g}")
    axes.axhline(base, color=_BASELINE, lw=0.6, ls=":")
    axes.errorbar([1], [base], yerr=_half_widths([block.rows[0]]), fmt="D", ms=5, color=_BASELINE, lw=0.9, capsize=2)
    for colour, rows in zip(_cycle(len(_families(block))), _families(block).values(), strict=True):
        x = [row.speed_up.value for row in rows if row.speed_up is not None]
        y = [row.metric.value for row in rows]
        if _series_name(rows) is not None:
            axes.plot(x, y, color=colour, lw=0.8, alpha=0.45)
        axes.errorbar(
            x, y, yerr=_half_widths(rows), xerr=_speed_errors(rows), fmt="none", ecolor=colour, lw=0.8, alpha=0.5
        )
        aside = [block.side_by_side(row) for row in rows]
        faces = ["white" if one else colour for one in aside]
        axes.scatter(x, y, s=22, c=faces, edgecolors=colour, zorder=3, label=_series_name(rows))
    axes.set_xscale("log")
    _speed_axis(axes, [1.0, *(row.speed_up.value for row in _timed(block) if row.speed_up is not None)])
    _metric_axis(axes, [row.metric.value for row in (block.rows[0], *_timed(block))], margin)
    hollow = "; hollow: other jobs ran at the same time" if any(map(block.side_by_side, _timed(block))) else ""
    axes.set_xlabel(f"speed-up over the baseline (bars: 95% intervals{hollow})")
    axes.set_ylabel(block.key.metric)
    axes.legend(loc="best", handlelength=1.2)


def _cycle(number: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(number)]


def _half_widths(rows: Sequence[Row]) -> list[float]:
    intervals = [row.metric.interval(DIFFERENCE_LEVEL) for row in rows]
    return [interval.half_width if interval is not None else 0.0 for interval in intervals]


def _speed_errors(rows: Sequence[Row]) -> list[list[float]]:
    speeds = [row.speed_up for row in rows if row.speed_up is not None]
    low = [speed.value - speed.interval.low if speed.interval is not None else 0.0 for speed in speeds]
    high = [speed.interval.high - speed.value if speed.interval is not None else 0.0 for speed in speeds]
    return [low, high]


def _speed_axis(axes: Axes, values: Sequence[float]) -> None:
    """A log axis with ticks that one can read; bars may leave it, points never do."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    low, high = min(values) / 1.15, max(values) * 1.25
    steps = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100]
    ticks = [step for step in steps if low <= step <= high]
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])


def _metric_axis(axes: Axes, values: Sequence[float], margin: float) -> None:
    low, high = min(values), max(values)
    # The margin is shown whole unless it would press the points together.
    pad = max(0.12 * (high - low), min(1.3 * margin, 2 * (high - low) or 1.3 * margin))
    axes.set_ylim(low - pad, high + pad)


def _label_setups(axes: Axes, block: Block) -> None:
    points, texts, colours = [(1.0, block.rows[0].metric.value)], [block.baseline.name], [_BASELINE]
    for colour, rows in zip(_cycle(len(_families(block))), _families(block).values(), strict=True):
        series = _series_name(rows)
        for row in rows:
            assert row.speed_up is not None
            points.append((row.speed_up.value, row.metric.value))
            texts.append(_step(row, series) if series is not None else row.setup.name)
            colours.append(colour)
    place_labels(axes, points, texts, colours)


def loss_vs_samples(comparison: Comparison) -> Figure | None:
    """Training loss against samples seen: each seed thin, the mean of a setup's seeds thick."""
    blocks = [block for block in comparison.blocks if any(_curves(row.setup) for row in block.rows)]
    if not blocks:
        return None
    figure, panels = _panels(len(blocks), wide=max(len(block.rows) for block in blocks) > 6)
    for block, axes in zip(blocks, panels, strict=True):
        setups = [row.setup for row in block.rows if _curves(row.setup)]
        # Equivalent setups have the same curve: each is thinner than the one that it lies on.
        widths = np.linspace(3.0, 1.4, len(setups)) if len(setups) > 1 else [1.8]
        for colour, setup, width in zip(_spread_colours(len(setups)), setups, widths, strict=True):
            _draw_curves(axes, setup, colour, float(width))
        axes.set_title(block.title)
        axes.set_xlabel("samples seen")
        axes.set_ylabel("training loss, smoothed")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(loc="best", ncols=1 + len(setups) // 9)
    return figure


def _spread_colours(number: int) -> list[str]:
    if number <= len(_COLOURS):
        return list(_COLOURS[:number])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["turbo"](0.05 + 0.9 * i / (number - 1))) for i in range(number)]


def _curves(setup: Setup) -> list[tuple[np.ndarray, np.ndarray]]:
    """(samples, smoothed loss) of each run that logged at least two losses."""
    curves = []
    for run in setup.runs:
        points = np.array([point for point in run.curve if math.isfinite(point[1])])
        if len(points) > 1:
            curves.append((points[:, 0], smoothed(points[:, 1])))
    return curves


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean over a centred window of a twentieth of the curve, cut short at both ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[end] - sums[start]) / (end - start)


def _draw_curves(axes: Axes, setup: Setup, colour: str, width: float) -> None:
    curves = _curves(setup)
    for samples, losses in curves:
        axes.plot(samples, losses, color=colour, lw=0.6, alpha=0.35)
    grid = np.linspace(max(samples[0] for samples, _ in curves), min(samples[-1] for samples, _ in curves), 200)
    mean = np.mean([np.interp(grid, samples, losses) for samples, losses in curves], axis=0)
    axes.plot(grid, mean, color=colour, lw=width, label=setup.name)


def time_breakdown(comparison: Comparison) -> Figure | None:
    """Where a run's wall-clock time goes, mean over a setup's runs. Rehearsed runs are left out."""
    blocks = [(block, timed) for block in comparison.blocks if (timed := _with_phases(block))]
    if not blocks:
        return None
    heights = [1.1 + 0.34 * len(timed) for _, timed in blocks]
    figure, panels = _panels(len(blocks), wide=True, heights=heights)
    for (block, timed), axes in zip(blocks, panels, strict=True):
        left = np.zeros(len(timed))
        names = [setup.name for setup in timed]
        parts = [mean_phases(setup) for setup in timed]
        for name, colour in _PARTS.items():
            if not any(name in part for part in parts):
                continue
            widths = np.array([part.get(name, 0.0) for part in parts])
            axes.barh(names, widths, left=left, color=colour, label=name, height=0.68)
            left += widths
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_title(block.title, pad=36)
        axes.set_xlabel("seconds")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2, handlelength=1)
    return figure


def _with_phases(block: Block) -> list[Setup]:
    return [row.setup for row in block.rows if not row.setup.rehearsed and any(run.phases for run in row.setup.runs)]


def mean_phases(setup: Setup) -> dict[str, float]:
    """Seconds by part of the bar, mean over the setup's runs; they add up to the mean wall-clock time."""
    parts = [_parts(run.phases) for run in setup.runs if run.phases is not None]
    return {name: fmean(one.get(name, 0.0) for one in parts) for name in _PARTS if any(name in one for one in parts)}


def _parts(run: Phases) -> dict[str, float]:
    before_and_after = {_START_UP: run.first_step, _EVALUATION: run.evaluation or 0.0}
    rest = max(run.wall - run.training - sum(before_and_after.values()), 0.0)
    return {**before_and_after, **_training(run), _REST: rest}


def _training(run: Phases) -> dict[str, float]:
    """Worker 0's phases, stretched to the whole of training; or what it waited, and the rest."""
    if run.step is not None and (step := sum(run.step.values())) > 0:
        return {phase: seconds / step * run.training for phase, seconds in run.step.items()}
    if run.stalled is None:
        return {_TRAINING: run.training}
    stalled = min(run.stalled, run.training)
    return {_TRAINING: run.training - stalled, _COMMUNICATION: stalled}
