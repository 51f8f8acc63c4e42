"""The plots of a comparison. Each is written only if there are data for it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.tools.compare.results import Block, RunComparison, SetupResult
from runner.tools.compare.runs import Phases, grouped
from runner.tools.compare.setups import SetupRuns
from runner.tools.compare.statistics import mean_of
from runner.tools.compare.verdict import DIFFERENCE_LEVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BASELINE = "#111418"
_START_UP, _TRAINING, _COMMUNICATION = "start-up to first step", "training", "communication"
_EVALUATION, _REST = "evaluation", "saving and the rest"
#: The parts of a bar, in order. Training is divided further if the phases of a step were measured.
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
#: Distances from a point, in typographic points, and angles at which its label is tried, in this order.
_RADII = (6, 12, 20, 30, 42, 56)
_ANGLES = (35, 145, -35, -145, 90, -90, 0, 180)
#: From this distance on, a thin line connects the label with its point.
_NEAR = 12
_STYLE = Path(__file__).with_name("plots.mplstyle")


#: Labels of points: (x, y, text, colour), in data coordinates.
Labels = Sequence[tuple[float, float, str, str]]


@dataclass(frozen=True)
class Panel:
    """Part of a plot, for one block. `draw`: on its axes; returns the labels of points, which are placed at the end.

    `height`: in inches; `wide`: whether it takes a row of the figure for itself; `title_pad`: space for a legend below
    the title, in typographic points.
    """

    draw: Callable[[Axes], Labels]
    xlabel: str
    ylabel: str = ""
    height: float = 3.8
    wide: bool = False
    title_pad: float | None = None


def write_plots(comparison: RunComparison, folder: Path) -> list[Path]:
    """Write the plots for which there are data; their paths."""
    import matplotlib

    written = []
    with matplotlib.rc_context(fname=_STYLE), warnings.catch_warnings():
        # A name may hold any character, and the warning would print it as it is.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        for panel_of in (metric_vs_speed, looks, loss_vs_samples, time_breakdown):
            figure = drawn(comparison, panel_of)
            if figure is not None:
                path = folder / f"{panel_of.__name__}.png"
                figure.savefig(path, facecolor="white")
                written.append(path)
    return written


def drawn(comparison: RunComparison, panel_of: Callable[[Block], Panel | None]) -> Figure | None:
    """A figure with a panel for each block that has one, two per row unless they are wide; None without any."""
    from matplotlib.figure import Figure

    panels = [(block, panel) for block in comparison.blocks if (panel := panel_of(block)) is not None]
    if not panels:
        return None
    wide = any(panel.wide for _, panel in panels)
    columns = 1 if wide or len(panels) == 1 else 2
    heights = [panel.height for _, panel in panels][::columns]
    figure = Figure(figsize=(9.5 if columns == 2 or wide else 6.5, sum(heights)), layout="constrained")
    grid = figure.subplots(len(heights), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    labels: list[tuple[Axes, Labels]] = []
    for (block, panel), axes in zip(panels, grid.flat, strict=False):
        labels.append((axes, panel.draw(axes)))
        axes.set_title(block.title, pad=panel.title_pad)
        axes.set_xlabel(panel.xlabel)
        axes.set_ylabel(panel.ylabel)
    for unused in grid.flat[len(panels) :]:
        unused.remove()
    for axes, texts in labels:
        if texts:
            place_labels(axes, texts)
    return figure


@contextlib.contextmanager
def plot_file(path: str | Path, width: float = 6.5, height: float = 3.8, panels: int = 1) -> Iterator[list[Axes]]:
    """Panels side by side in the style of all plots, to draw on; written to `path` at the end. Sizes in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield list(figure.subplots(1, panels, squeeze=False).flat)
        figure.savefig(path, facecolor="white")


def metric_vs_speed(block: Block) -> Panel | None:
    """Metric against speed-up, one point per setup. Rehearsed setups have no speed-up and are not drawn."""
    timed = [
        (row, row.speed_up.value) for row in block.rows if row.speed_up is not None and math.isfinite(row.metric.value)
    ]
    base, margin, name = block.rows[0].metric.value, block.margin.value, block.key.metric
    if not timed or not math.isfinite(base):
        return None

    def draw(axes: Axes) -> Labels:
        if margin is not None:
            axes.axhspan(base - margin, base + margin, color="#eef3f7", zorder=0, label=f"baseline ± {margin:g}")
        axes.axhline(base, color=_BASELINE, lw=0.6, ls=":")
        axes.plot([1], [base], "D", ms=5, color=_BASELINE)
        _draw_intervals(axes, 1.0, block.rows[0], _BASELINE)
        labels = [(1.0, base, block.baseline.name, _BASELINE)]
        for number, members in enumerate(grouped(timed, lambda one: one[0].setup.family).values()):
            colour, series = f"C{number % 10}", _series_name([row.setup.name for row, _ in members])
            x, y = [speed_up for _, speed_up in members], [row.metric.value for row, _ in members]
            if series is not None:
                axes.plot(x, y, color=colour, lw=0.8, alpha=0.45)
            faces = ["white" if block.uncertain_speed(row) else colour for row, _ in members]
            axes.scatter(x, y, s=22, c=faces, edgecolors=colour, zorder=3, label=series)
            for row, speed_up in members:
                _draw_intervals(axes, speed_up, row, colour)
                text = row.setup.name if series is None else _step(row.setup.name, series)
                labels.append((speed_up, row.metric.value, text, colour))
        _speed_axis(axes, [x for x, *_ in labels])
        _metric_axis(axes, [y for _, y, *_ in labels], margin)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", handlelength=1.2)
        return labels

    notes = ["bars: 95% intervals"]
    if any(block.uncertain_speed(row) for row, _ in timed):
        notes.append("hollow: unreliable, other jobs or programs ran at the same time")
    wide = len(timed) > 8
    return Panel(draw, f"speed-up over the baseline ({'; '.join(notes)})", name, 4.6 if wide else 3.8, wide)


def _series_name(names: Sequence[str]) -> str | None:
    """The common part of names that differ in one number, such as `4 GPUs · k`; None if they differ in more."""
    name = os.path.commonprefix(names).rstrip("0123456789 =·")  # noqa: RUF071 - any text, not only paths
    is_series = len(names) > 2 and name and all(_step(one, name).isdecimal() for one in names)
    return name if is_series else None


def _step(name: str, series: str) -> str:
    return name[len(series) :].strip(" =·")


def _draw_intervals(axes: Axes, x: float, row: SetupResult, colour: str) -> None:
    """Bars for the intervals of metric and speed-up; a longer one ends at the edge of the panel."""
    style: dict[str, Any] = {"color": colour, "lw": 0.8, "alpha": 0.4, "zorder": 1}
    if (interval := row.metric.interval(DIFFERENCE_LEVEL)).known:
        axes.vlines(x, interval.low, interval.high, **style)
    if row.speed_up is not None and (interval := row.speed_up.interval).known:
        axes.hlines(row.metric.value, interval.low, interval.high, **style)


def _speed_axis(axes: Axes, values: Sequence[float]) -> None:
    """A log axis with readable ticks that contains every point, but not every error bar."""
    from matplotlib.ticker import NullLocator

    low, high = min(values) / 1.15, max(values) * 1.25
    steps = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)
    ticks = [step for step in steps if low <= step <= high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])


def _metric_axis(axes: Axes, values: Sequence[float], margin: float | None) -> None:
    low, high = min(values), max(values)
    pad = 0.12 * (high - low)
    if margin is not None:  # show the whole margin unless that would squeeze the points together
        pad = max(pad, min(1.3 * margin, 2 * (high - low) or 1.3 * margin))
    if not pad:
        low, high = axes.get_ylim()
    axes.set_ylim(low - pad, high + pad)  # final, also without a pad


def place_labels(axes: Axes, labels: Labels) -> None:
    """Place labels so that they cover neither each other nor a point. The limits of the axes must be final."""
    from matplotlib.transforms import Bbox

    figure = axes.figure.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # or the layout would make room for the labels and move the points
    unit = figure.dpi / 72
    frame = axes.get_window_extent()
    pixels = axes.transData.transform([(x, y) for x, y, *_ in labels])
    taken = [Bbox.from_bounds(x - 4 * unit, y - 4 * unit, 8 * unit, 8 * unit) for x, y in pixels]
    angles = [math.radians(angle) for angle in _ANGLES]
    offsets = [(radius * math.cos(angle), radius * math.sin(angle)) for radius in _RADII for angle in angles]
    for (x, y, text, colour), (pixel_x, pixel_y) in zip(labels, pixels, strict=True):
        note = axes.annotate(text, (x, y), (0, 0), textcoords="offset points", va="center", color=colour, fontsize=8)
        size = note.get_window_extent()
        best, fewest = (0.0, 0.0), math.inf
        for dx, dy in offsets:
            alignment = "center" if abs(dx) < 1 else "left" if dx > 0 else "right"
            left = {"left": 0.0, "center": size.width / 2, "right": size.width}[alignment]
            corner = (pixel_x + dx * unit - left, pixel_y + dy * unit - size.height / 2)
            box = Bbox.from_bounds(*corner, size.width, size.height)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            overlaps = box.count_overlaps(taken) + (not inside)
            if overlaps < fewest:
                best, fewest, place = (dx, dy), overlaps, (alignment, box)
        note.set(position=best, ha=place[0])
        taken.append(place[1])
        if math.hypot(*best) > _NEAR + 1:
            line = {"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6}
            axes.annotate("", (x, y), best, textcoords="offset points", arrowprops=line)


def looks(block: Block) -> Panel | None:
    """The interval of each difference, which shrinks around the margin while a sweep adds seeds."""
    design = block.baseline.first.design
    compared = [(row, row.difference.pairs) for row in block.rows if row.difference is not None]
    if design is None or not (rows := [row for row, pairs in compared if len(pairs) >= design.min_seeds]):
        return None

    def draw(axes: Axes) -> Labels:
        from matplotlib.ticker import MaxNLocator

        for row, colour in zip(rows, _spread_colours(len(rows)), strict=True):
            last = row.difference
            assert last is not None
            seeds = range(design.min_seeds, len(last.pairs) + 1)
            found = [dataclasses.replace(mean_of(last.pairs[:n]), sampling=last.sampling) for n in seeds]
            bounds = [one.interval(design.levels(n).equivalence) for n, one in zip(seeds, found, strict=True)]
            low, high = [one.low for one in bounds], [one.high for one in bounds]
            axes.fill_between(seeds, low, high, color=colour, alpha=0.15, lw=0)
            name = f"{row.setup.name}: {row.verdict.kind if row.verdict is not None else ''}"
            axes.plot(seeds, [one.value for one in found], color=colour, marker="o", ms=3, label=name)
        margin = block.margin.value
        for line in (0.0, *((-margin, margin) if margin is not None else ())):
            axes.axhline(line, color=_BASELINE, lw=0.8, ls="-" if line == 0 else ":")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best", handlelength=1.2)
        return ()

    return Panel(draw, "seeds", f"{block.key.metric}: difference to {block.baseline.name}")


def loss_vs_samples(block: Block) -> Panel | None:
    """Training loss against samples seen: each seed as a thin line, the mean of a setup's seeds as a thick one."""
    curves = [(row.setup.name, own) for row in block.rows if (own := _curves(row.setup))]
    if not curves:
        return None

    def draw(axes: Axes) -> Labels:
        # Equivalent setups have the same curve: each line is thinner than the one below it.
        widths = np.linspace(3.0, 1.4, len(curves)) if len(curves) > 1 else [1.8]
        for colour, (name, own), width in zip(_spread_colours(len(curves)), curves, widths, strict=True):
            for samples, losses in own:
                axes.plot(samples, losses, color=colour, lw=0.6, alpha=0.35)
            grid = np.linspace(max(samples[0] for samples, _ in own), min(samples[-1] for samples, _ in own), 200)
            mean = np.mean([np.interp(grid, samples, losses) for samples, losses in own], axis=0)
            axes.plot(grid, mean, color=colour, lw=float(width), label=name)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(loc="best", ncols=1 + len(curves) // 9)
        return ()

    wide = len(block.rows) > 6
    return Panel(draw, "samples seen", "training loss, smoothed", 4.6 if wide else 3.8, wide)


def _spread_colours(number: int) -> list[str]:
    """The colours of the style while they suffice, else shades of one colour map."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if number <= 10:
        return [f"C{i}" for i in range(number)]
    return [to_hex(colormaps["turbo"](0.05 + 0.9 * i / (number - 1))) for i in range(number)]


def _curves(setup: SetupRuns) -> list[tuple[np.ndarray, np.ndarray]]:
    """(samples, smoothed loss) of each run that logged at least two finite losses."""
    curves = []
    for run in setup.runs:
        points = np.array([point for point in run.curve if math.isfinite(point[1])])
        if len(points) > 1:
            curves.append((points[:, 0], smoothed(points[:, 1])))
    return curves


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean over a centred window of a twentieth of the curve, shorter at both ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[end] - sums[start]) / (end - start)


def time_breakdown(block: Block) -> Panel | None:
    """The parts of the wall-clock time of a run, mean over a setup's runs. Rehearsed runs are left out."""
    setups = [row.setup for row in block.rows if not row.setup.rehearsed]
    bars = {setup.name: parts for setup in setups if (parts := mean_phases(setup))}
    if not bars:
        return None

    def draw(axes: Axes) -> Labels:
        left = np.zeros(len(bars))
        for name, colour in _PARTS.items():
            if any(name in parts for parts in bars.values()):
                widths = np.array([parts.get(name, 0.0) for parts in bars.values()])
                axes.barh(list(bars), widths, left=left, color=colour, label=name, height=0.68)
                left += widths
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2, handlelength=1)
        return ()

    return Panel(draw, "seconds", height=1.1 + 0.34 * len(bars), wide=True, title_pad=36)


def mean_phases(setup: SetupRuns) -> dict[str, float]:
    """Seconds by part of the bar, mean over the setup's runs; they add up to the mean wall-clock time."""
    parts = [_parts(run.phases) for run in setup.runs if run.phases is not None]
    return {name: fmean(one.get(name, 0.0) for one in parts) for name in _PARTS if any(name in one for one in parts)}


def _parts(run: Phases) -> dict[str, float]:
    before_and_after = {_START_UP: run.first_step, _EVALUATION: run.evaluation or 0.0}
    rest = max(run.wall - run.training - sum(before_and_after.values()), 0.0)
    return {**before_and_after, **_training(run), _REST: rest}


def _training(run: Phases) -> dict[str, float]:
    """The phases of worker 0's steps, scaled to the training time; else the time spent waiting, and the rest."""
    if run.step is not None and (step := sum(run.step.values())) > 0:
        return {phase: seconds / step * run.training for phase, seconds in run.step.items()}
    if run.stalled is None:
        return {_TRAINING: run.training}
    stalled = min(run.stalled, run.training)
    return {_TRAINING: run.training - stalled, _COMMUNICATION: stalled}
