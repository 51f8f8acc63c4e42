"""The columns of a comparison: each with its name, its numbers in full precision, and how tables show them.

The terminal, the report, `setups.csv` and MLflow's description take their columns from `COLUMNS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.tools.compare.results import Block, RunComparison, SetupResult
from runner.tools.compare.runs import Run
from runner.tools.compare.statistics import SINGLE_VALUE, Interval, standard_error
from runner.tools.compare.verdict import DIFFERENCE_LEVEL, EQUIVALENCE_LEVEL

NOTHING = "–"
_DIFFERENCE = (
    *("difference", "difference_by", "difference_df", "difference_standard_error"),
    *("evaluation_rows", "rows_standard_error"),
    *("difference_low_90", "difference_high_90", "difference_low_95", "difference_high_95"),
)


@dataclass(frozen=True)
class Cell:
    """A figure of one setup. `text` and `detail`, such as an interval, are what tables show; `values`: by name in
    `setups.csv`; `style`: how a verdict is coloured."""

    text: str = NOTHING
    detail: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    style: str = ""

    @property
    def in_one_line(self) -> str:
        return f"{self.text} {self.detail}".rstrip()


@dataclass(frozen=True)
class Column:
    """`detail`: what the detail of its cells is, for the heading; `is_text`: whether it is aligned to the left."""

    name: str
    cell: Callable[[Block, SetupResult], Cell]
    detail: str = ""
    is_text: bool = False

    def heading(self, block: Block) -> str:
        return block.key.metric if self.name == "metric" else self.name

    def detail_heading(self, block: Block) -> str:
        """Heading of the details of cells; the levels of a sweep that added seeds differ from setup to setup."""
        varies = self.name == "difference" and block.baseline.first.design is not None
        return "interval" if varies else self.detail


def table_of(block: Block, names: Sequence[str]) -> tuple[list[Column], list[list[Cell]]]:
    """The columns of these names in this order, and a row of their cells for each setup.

    Columns that show nothing in any row are left out, such as tokens per second, which older runs have not recorded.
    """
    by_name = {column.name: column for column in COLUMNS}
    columns = [(by_name[name], [by_name[name].cell(block, row) for row in block.rows]) for name in names]
    shown = [(column, cells) for column, cells in columns if {cell.text for cell in cells} - {"", NOTHING}]
    return [column for column, _ in shown], [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]


def cells_of(block: Block, row: SetupResult) -> dict[str, Cell]:
    """All cells of a setup, by the name of the column."""
    return {column.name: column.cell(block, row) for column in COLUMNS}


def setup_rows(comparison: RunComparison) -> list[dict[str, Any]]:
    """One row per setup with all its numbers; None: unknown."""
    rows = [cells_of(block, row).values() for block in comparison.blocks for row in block.rows]
    return [{name: value for cell in cells for name, value in cell.values.items()} for cells in rows]


def _setup(block: Block, row: SetupResult) -> Cell:
    name = row.setup.name
    return Cell(name, values={"block": block.title, "setup": name, "baseline": block.baseline.name})


def _seeds(block: Block, row: SetupResult) -> Cell:
    return Cell(str(len(row.setup.runs)), values={"seeds": " ".join(map(str, row.setup.seeds))})


def _metric(block: Block, row: SetupResult) -> Cell:
    digits, interval = decimals(block), row.metric.interval(DIFFERENCE_LEVEL)
    low, high = _bounds(interval)
    values = {"metric_name": block.key.metric, "metric_mean": row.metric.value}
    values |= {"metric_low_95": low, "metric_high_95": high}
    values["metric_sd"] = row.metric.spreads[0] if len(row.setup.runs) > 1 else None
    half = f"± {number(interval.half_width, digits)}" if interval.known else ""
    return Cell(number(row.metric.value, digits), half, values)


def _difference(block: Block, row: SetupResult) -> Cell:
    if (found := row.difference) is None:
        return Cell(values=dict.fromkeys(_DIFFERENCE))
    narrow, wide = found.interval(EQUIVALENCE_LEVEL), found.interval(DIFFERENCE_LEVEL)
    decides = found.interval(row.levels.equivalence)
    error, df = standard_error(found.how, found.spreads, found.sizes)
    spread = (None, None) if found.how == SINGLE_VALUE else (df, error)
    sampling = (None, None) if found.sampling is None else (found.sampling.rows, found.sampling.error)
    in_full = (found.value, found.how, *spread, *sampling, *_bounds(narrow), *_bounds(wide))
    values = dict(zip(_DIFFERENCE, in_full, strict=True))
    if math.isnan(found.value):
        return Cell(values=values)
    value, low, high = (number(one, decimals(block), "+") for one in (found.value, decides.low, decides.high))
    return Cell(value, f"[{low}, {high}]" if decides.known else "", values)


def _verdict(block: Block, row: SetupResult) -> Cell:
    verdict = row.verdict
    if verdict is None:
        return Cell("baseline", values={"verdict": None})
    style = "better" if verdict.better else verdict.kind.replace(" ", "-")
    return Cell(verdict.text, values={"verdict": verdict.text}, style=style)


def _seconds(block: Block, row: SetupResult) -> Cell:
    values = {"train_seconds": row.seconds}
    if row.setup.rehearsed or row.seconds is None:
        return Cell("rehearsed" if row.setup.rehearsed else "not timed", values=values)
    text = _short(row.seconds)
    return Cell(f"({text})" if row.setup.uncertain_time else text, values=values)


def _predicted(block: Block, row: SetupResult) -> Cell:
    predicted, error = row.setup.mean_of("predicted_seconds"), row.setup.mean_of("prediction_error")
    return Cell() if not predicted or error is None else Cell(_short(predicted), f"{error:+.0%}".replace("-", "−"))


def _speed_up(block: Block, row: SetupResult) -> Cell:
    names, speed = ("speed_up", "speed_up_low_95", "speed_up_high_95"), row.speed_up
    if speed is None:
        return Cell(values=dict.fromkeys((*names, "speed_up_unreliable")))
    values = dict(zip(names, (speed.value, *_bounds(speed.interval)), strict=True))
    values["speed_up_unreliable"] = block.uncertain_speed(row)
    value, interval = f"{_factor(speed.value)}×", speed.interval
    bounds = f"[{_factor(interval.low)}, {_factor(interval.high)}]" if interval.known else ""
    if block.uncertain_speed(row):
        value, bounds = f"({value})", bounds and f"({bounds})"
    return Cell(value, bounds, values)


def _tokens_per_s(block: Block, row: SetupResult) -> Cell:
    if row.setup.rehearsed or (rate := row.setup.mean_of("tokens_per_s")) is None:
        return Cell()
    share = row.setup.mean_of("model_flops_utilization")
    return Cell(f"{rate:,.0f}", f"{share:.0%}" if share is not None else "")


def _memory(block: Block, row: SetupResult) -> Cell:
    peak = row.setup.mean_of("peak_memory_bytes")
    return Cell() if peak is None else Cell(f"{peak / 2**30:,.3g}")


def _comparability(block: Block, row: SetupResult) -> Cell:
    """For the file: tables have it below, once for all setups with the same differences."""
    return Cell(values={"comparability": row.comparability.text if row.comparability is not None else None})


def _notes(block: Block, row: SetupResult) -> Cell:
    numbers = [str(flag.number) for flag in block.flags_of(row.setup)]
    return Cell(", ".join(numbers), values={"findings": " ".join(numbers)})


def _margin(block: Block, row: SetupResult) -> Cell:
    """For the file: tables have it below."""
    margin = block.margin
    return Cell(values={"margin": margin.value, "margin_unit": margin.unit, "margin_source": margin.source})


COLUMNS = (
    Column("setup", _setup, is_text=True),
    Column("seeds", _seeds),
    Column("metric", _metric, "± 95%"),
    Column("difference", _difference, "90% interval"),
    Column("verdict", _verdict, is_text=True),
    Column("seconds", _seconds),
    Column("predicted", _predicted, "error"),
    Column("speed-up", _speed_up, "95% interval"),
    Column("tokens/s", _tokens_per_s, "FLOPs utilization"),
    Column("memory", _memory, "GiB per worker"),
    Column("comparability", _comparability, is_text=True),
    Column("notes", _notes, is_text=True),
    Column("margin", _margin),
)


def _bounds(interval: Interval) -> tuple[float | None, float | None]:
    return (interval.low, interval.high) if interval.known else (None, None)


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def decimals(block: Block) -> int:
    """Decimals of the metric: two for a percentage, more for a small number such as a loss or a fraction."""
    size = abs(block.rows[0].metric.value)
    return 2 if not size or not math.isfinite(size) else max(2, min(8, 3 - math.floor(math.log10(size))))


def number(value: float, digits: int, sign: str = "") -> str:
    return "NaN" if math.isnan(value) else f"{value:{sign}.{digits}f}".replace("-", "−")


#: Columns of `runs.csv` that are figures of a run as they are.
_FIGURES = (
    *("workers", "accumulation", "k", "precision", "rehearsed", "machine", "jobs_at_once", "busy", "tokens_per_s"),
    *("model_flops_utilization", "peak_memory_bytes", "predicted_seconds", "prediction_error", "mlflow_run_id"),
)


def run_rows(comparison: RunComparison) -> list[dict[str, Any]]:
    """One row per run, as in `runs.csv`. Runs that are not compared have only a source and a flag."""
    rows = [_run(block, row, run) for block in comparison.blocks for row in block.rows for run in row.setup.runs]
    return rows + [{"source": one.source, "flags": f"not compared: {one.reason}"} for one in comparison.skipped]


def _run(block: Block, row: SetupResult, run: Run) -> dict[str, Any]:
    figures = {"accumulation_steps" if name == "accumulation" else name: getattr(run, name) for name in _FIGURES}
    return {
        "source": run.source,
        "block": block.title,
        "setup": row.setup.name,
        "seed": run.seed,
        "metric_name": block.key.metric,
        "metric": run.metric,
        "train_seconds": run.seconds,
        **figures,
        "baseline": row.setup is block.baseline,
        "flags": "; ".join(flag.kind for flag in block.flags if run.source in flag.runs),
    }
