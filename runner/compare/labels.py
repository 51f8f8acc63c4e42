"""Put labels beside the points of a plot so that none covers another or a point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Distances from a point, in typographic points, at which its label is tried, near ones first.
_RADII = (6, 12, 20, 30, 42, 56)
_ANGLES = (35, 145, -35, -145, 90, -90, 0, 180)
#: From this distance on a thin line joins the label to its point.
_NEAR = 12

Box = tuple[float, float, float, float]


def place_labels(
    axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str], colours: Sequence[str]
) -> None:
    """Label each point (data coordinates). Limits and scales of the axes must be final."""
    figure = axes.figure.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # or making room for the labels would move the points that they stand beside
    unit = figure.dpi / 72
    pixels = [tuple(map(float, axes.transData.transform(point))) for point in points]
    taken = [(x - 4 * unit, y - 4 * unit, x + 4 * unit, y + 4 * unit) for x, y in pixels]
    frame = axes.get_window_extent()
    for point, (x, y), text, colour in zip(points, pixels, texts, colours, strict=True):
        width, height = _size(axes, text)
        best = min(
            (_cost(_box(x + dx * unit, y + dy * unit, width, height, dx), taken, frame.extents), i, (dx, dy))
            for i, (dx, dy) in enumerate(_offsets())
        )[2]
        dx, dy = best
        taken.append(_box(x + dx * unit, y + dy * unit, width, height, dx))
        line = {"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6} if math.hypot(dx, dy) > _NEAR + 1 else None
        axes.annotate(
            text,
            point,
            xytext=(dx, dy),
            textcoords="offset points",
            ha=_alignment(dx),
            va="center",
            color=colour,
            fontsize=8,
            arrowprops=line,
        )


def _offsets() -> Iterator[tuple[float, float]]:
    for radius in _RADII:
        for angle in _ANGLES:
            yield radius * math.cos(math.radians(angle)), radius * math.sin(math.radians(angle))


def _alignment(dx: float) -> str:
    return "center" if abs(dx) < 1 else "left" if dx > 0 else "right"


def _size(axes: Axes, text: str) -> tuple[float, float]:
    """Width and height in pixels."""
    probe = axes.text(0, 0, text, fontsize=8)
    extent = probe.get_window_extent()
    probe.remove()
    return extent.width, extent.height


def _box(x: float, y: float, width: float, height: float, dx: float) -> Box:
    left = {"left": x, "right": x - width, "center": x - width / 2}[_alignment(dx)]
    return (left - 1, y - height / 2, left + width + 1, y + height / 2)


def _cost(box: Box, taken: Sequence[Box], frame: Sequence[float]) -> float:
    """Area that would be covered twice or lie outside, in pixels: 0 for a free place."""
    inside = _shared(box, (frame[0], frame[1], frame[2], frame[3]))
    return sum(_shared(box, other) for other in taken) + (box[2] - box[0]) * (box[3] - box[1]) - inside


def _shared(a: Box, b: Box) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0
