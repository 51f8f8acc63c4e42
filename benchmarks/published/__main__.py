"""The published tables of 2022 and 2023, and their times predicted from a few cells of each series.

`python -m benchmarks.published published_runs.csv > tables.md` prints Markdown: the runs in the layout in which they
were published, the times of all cells from those at 1 and 16 steps, and how good other choices of cells are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.published.layout import Layout, layouts
from benchmarks.published.predictions import Series, predict, shown
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.from_csv import read_csv
from runner.tools.compare.runs import grouped

#: Cells whose predictions are compared with those of `--cells`.
OTHER_CELLS = ((1, 8), (1, 4, 16), (1, 4), (2, 16), (8, 16), (1, 2))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("file", type=Path, help="a CSV file as of `runner.compare --csv`")
    parser.add_argument("--cells", type=int, nargs="+", default=[1, 16], metavar="STEPS", help="from which to predict")
    options = parser.parse_args(arguments)
    cells = tuple(sorted(set(options.cells)))
    if len(cells) < 2 or cells[0] < 1:
        parser.error("--cells: two cells determine a and b, such as 1 16")
    blocks = compare_runs(read_csv(options.file)).blocks
    series = predict(blocks, set(cells))
    if not series:
        parser.error(f"--cells: no series has times of {_words(cells)} and of other steps")
    parts = [_layout(table) for table in layouts(blocks)]
    parts += [_predictions(title, rows) for title, rows in grouped(series, lambda one: one.title).items()]
    parts += ["\n".join(f"> contradiction: {text}" for one in series for text in one.contradictions)]
    parts += [_fits(series), _choices({one: predict(blocks, set(one)) for one in (cells, *OTHER_CELLS)})]
    print("\n\n".join(part for part in parts if part))
    return 0


def _layout(table: Layout) -> str:
    heads = [" ".join(filter(None, (method, str(steps)))) if method else "one" for method, steps in table.columns]
    rows = [[f"{samples:,}", *map(_cell, map(cells.get, table.columns))] for samples, cells in table.rows.items()]
    return f"## {table.title}: metric and speed-up\n\n{_markdown(['samples', *heads], rows)}"


def _cell(texts: Sequence[str] | None) -> str:
    return "<br>".join(filter(None, texts or ()))


def _predictions(title: str, series: Sequence[Series]) -> str:
    """Measured and predicted seconds, and the error, of each cell. `*`: it contradicts the others."""
    steps = sorted({one for row in series for one in row.setups})
    rows = []
    for row in series:
        cells = {k: [shown(value) + "*" * (k in row.wrong), "fitted"] for k, value in row.seconds.items()}
        for k, error in row.errors.items():
            cells[k][1:] = [shown(row.fit.seconds(k)), f"{error:+.1%}".replace("-", "−")]
        rows.append([f"{row.key.total_samples:,}", *(_cell(cells.get(k)) for k in steps)])
    return f"## {title}: seconds measured, predicted, and the error\n\n{_markdown(['samples', *map(str, steps)], rows)}"


def _fits(series: Sequence[Series]) -> str:
    rows = []
    for one in series:
        sign = "+" if one.fit.b >= 0 else "−"
        law = f"{shown(one.fit.a)} {sign} {shown(abs(one.fit.b))}/steps"
        places = (one.key.experiment, str(one.workers), f"{one.key.total_samples:,}", one.method)
        rows.append([*places, law, *_errors(one.errors.values()), *_errors(one.trusted_errors.values())])
    heads = ["runs", "workers", "samples", "by", "seconds", "median error", "largest"]
    return "## a + b/steps\n\n" + _markdown([*heads, "median of what is trusted", "largest"], rows)


def _choices(by_cells: dict[tuple[int, ...], list[Series]]) -> str:
    rows = []
    for cells, series in by_cells.items():
        errors = [error for one in series for error in one.errors.values()]
        trusted = [error for one in series for error in one.trusted_errors.values()]
        own, without = _errors(errors), _errors(trusted)
        rows.append([_words(cells), str(len(errors)), *own, str(len(trusted)), *without])
    heads = ["cells", "times predicted", "median error", "largest"]
    return "## The choice of cells\n\n" + _markdown([*heads, "trusted", "median error", "largest"], rows)


def _errors(errors: Collection[float]) -> Iterator[str]:
    sizes = [abs(error) for error in errors]
    return (f"{summary(sizes):.1%}" if sizes else "" for summary in (median, max))


def _words(cells: Sequence[int]) -> str:
    return ", ".join(map(str, cells))


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["--:"] * len(heads), *rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
