"""What the pictures show, read back from matplotlib's own objects."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from runner.tools.compare.plots import (
    drawn,
    loss_vs_samples,
    mean_phases,
    metric_vs_speed,
    place_labels,
    smoothed,
    time_breakdown,
    write_plots,
)
from runner.tools.compare.runs import Phases
from runner.tools.compare.setups import SetupRuns
from tests.tools.compare.make import BASE, KEY, compared, run, runs

CURVE = tuple((48.0 * step, 1.0 / step) for step in range(1, 50))


def texts(figure: Figure | None) -> set[str]:
    """Every label, title and legend entry."""
    assert figure is not None
    found = {one.get_text() for axes in figure.axes for one in axes.texts}
    for axes in figure.axes:
        legend = axes.get_legend()
        found |= {one.get_text() for one in legend.get_texts()} if legend is not None else set()
        found |= {one.get_text() for one in axes.get_yticklabels()}
    return found


def test_labels_do_not_overlap() -> None:
    """Forty points, some in one place: no label covers another or leaves the frame."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    draw = np.random.default_rng(4)
    points = [(float(x), float(y)) for x, y in draw.normal(0, 1, (36, 2))] + [(0.0, 0.0)] * 4
    axes.set_xlim(-3, 3)
    axes.set_ylim(-3, 3)
    place_labels(axes, [(x, y, f"setup {i}", "black") for i, (x, y) in enumerate(points)])
    figure.draw_without_rendering()
    # The extent of an annotation includes its line; that of its text does not.
    boxes = [Text.get_window_extent(one) for one in axes.texts if one.get_text()]
    frame = axes.get_window_extent()
    assert len(boxes) == 40
    assert all(frame.x0 - 1 <= box.x0 and box.x1 <= frame.x1 + 1 for box in boxes)
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_labels_do_not_move_the_points() -> None:
    """A label that is wider than its panel must not change the layout afterwards."""
    figure = Figure(figsize=(3, 2), layout="constrained")
    axes = figure.subplots()
    figure.draw_without_rendering()
    before = axes.get_window_extent().extents
    place_labels(axes, [(0.9, 0.5, "a name that is wider than the whole of this small picture", "black")])
    figure.draw_without_rendering()
    assert axes.get_window_extent().extents == pytest.approx(before)


def test_wide_intervals_do_not_hide_the_points() -> None:
    """Times from 2 to 14 s: the interval is drawn, and reaches beyond the panel, which still fits the points."""
    four = runs("four", [80.0, 80.1, 80.2], [2.0, 7.0, 14.0], workers=4)
    figure = drawn(compared(runs("one", [80.0, 80.4, 80.2], [5.0, 5.1, 5.2]), four), metric_vs_speed)
    assert figure is not None
    (axes,) = figure.axes
    bars = [line for one in axes.collections if isinstance(one, LineCollection) for line in one.get_segments()]
    assert len(bars) == 3  # two of the metric, one of the speed-up
    low, high = axes.get_xlim()
    assert min(bar[0][0] for bar in bars) < low < 0.83 < 1 < high < max(bar[1][0] for bar in bars)


def test_every_timed_setup_is_labelled_and_no_rehearsed_one() -> None:
    """A rehearsed setup and one without times are not drawn. Without a margin there is no band."""
    comparison = compared(
        BASE,
        runs("four", [80.0, 80.1], 200.0, workers=4),
        runs("tpu8", [80.0, 80.1], 10.0, workers=8, rehearsed=True),
        runs("short", [80.0, 80.1], [None, None], workers=2),
    )
    shown = texts(drawn(comparison, metric_vs_speed))
    assert {"one", "four", "baseline ± 1"} <= shown
    assert not {"tpu8", "short"} & shown
    losses = [runs(name, [80.0, 80.1], block=replace(KEY, metric="loss", goal="min")) for name in ("a", "b")]
    assert not any("baseline" in text for text in texts(drawn(compared(*losses), metric_vs_speed)))


def test_a_series_is_labelled_by_its_steps() -> None:
    """Three setups that differ in one number: the common part once, each point by its number; others by name."""
    groups = [runs(f"four · k = {k}", [80.0, 80.1], 200.0 / k, workers=4, k=k) for k in (2, 4, 16)]
    assert {"four · k", "2", "4", "16"} <= texts(drawn(compared(BASE, *groups), metric_vs_speed))
    names = {"four", "four · bf16", "four · acc=4"}
    others = [runs(name, [80.0, 80.1], 200.0, workers=4) for name in names]
    assert names <= texts(drawn(compared(BASE, *others), metric_vs_speed))


def test_smoothing() -> None:
    """A straight line stays straight inside and keeps its length; alternating noise shrinks."""
    line = np.linspace(0, 1, 400)
    assert smoothed(line)[20:-20] == pytest.approx(line[20:-20])
    assert np.abs(smoothed(np.tile([1.0, -1.0], 200))[20:-20]).max() < 0.1
    assert smoothed(np.array([3.0, 5.0])) == pytest.approx([3.0, 5.0])


def test_the_parts_of_a_runs_time_add_up() -> None:
    """Means over seeds; the time spent waiting is part of training and drawn once."""
    parts = mean_parts(Phases(2.0, 10.0, 15.0, stalled=4.0, evaluation=1.0), Phases(4.0, 12.0, 19.0, stalled=2.0))
    expected = (3.0, 8.0, 3.0, 0.5, 2.5)
    names = ("start-up to first step", "training", "communication", "evaluation", "saving and the rest")
    assert parts == dict(zip(names, expected, strict=True))


def test_training_is_divided_by_the_phases_of_a_step() -> None:
    step = {"data": 0.1, "forward": 0.2, "backward": 0.4, "optimizer": 0.2, "communication": 0.1, "other": 0.0}
    parts = mean_parts(Phases(2.0, 10.0, 15.0, stalled=9.0, step=step, evaluation=1.0))
    assert {name: parts[name] for name in step} == pytest.approx({name: 10 * share for name, share in step.items()})
    assert sum(parts.values()) == pytest.approx(15.0)
    mixed = mean_parts(Phases(2.0, 10.0, 15.0, step=step), Phases(2.0, 10.0, 15.0))
    assert (mixed["backward"], mixed["training"], sum(mixed.values())) == pytest.approx((2.0, 5.0, 15.0))


def mean_parts(*phases: Phases) -> dict[str, float]:
    """Of a setup whose runs had these."""
    return mean_phases(SetupRuns("x", tuple(run("x", seed, 80.0, phases=one) for seed, one in enumerate(phases))))


def test_bars_and_curves_of_setups(tmp_path: Path) -> None:
    """Each setup has a bar and a curve, rehearsed ones only a curve. Names are drawn as they are, not as formulas."""
    more = {"phases": Phases(2.0, 10.0, 15.0), "curve": CURVE}
    comparison = compared(
        runs("one", [80.0, 80.1], 400.0, **more),
        runs("a $x_{ · k_2", [80.0, 80.1], 200.0, workers=4, **more),
        runs("tpu8", [80.0, 80.1], 10.0, workers=8, rehearsed=True, **more),
    )
    assert {"one", "a $x_{ · k_2"} <= texts(drawn(comparison, time_breakdown))
    assert "tpu8" not in texts(drawn(comparison, time_breakdown))
    assert {"one", "a $x_{ · k_2", "tpu8"} <= texts(drawn(comparison, loss_vs_samples))
    names = ["metric_vs_speed.png", "loss_vs_samples.png", "time_breakdown.png"]
    assert [path.name for path in write_plots(comparison, tmp_path)] == names
    assert write_plots(compared(BASE), tmp_path) == []
