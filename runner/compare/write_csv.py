"""`runs.csv` and `setups.csv`: every number in full precision."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.compare.comparison import Block, Comparison, Row
from runner.compare.statistics import Interval
from runner.compare.verdict import DIFFERENCE_LEVEL, EQUIVALENCE_LEVEL


def write_tables(comparison: Comparison, folder: Path) -> None:
    """Write both files. A comparison has at least one run."""
    _write(folder / "runs.csv", run_rows(comparison))
    _write(folder / "setups.csv", [setup_row(block, row) for block in comparison.blocks for row in block.rows])


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, tuple(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One row per run; those that are not compared have a source and a flag only."""
    rows = []
    for block in comparison.blocks:
        for row in block.rows:
            for run in row.setup.runs:
                flags = [found.kind for found in block.findings if run.source in found.runs]
                rows.append(
                    {
                        "source": run.source,
                        "block": block.title,
                        "setup": row.setup.name,
                        "seed": run.seed,
                        "metric_name": block.key.metric,
                        "metric": run.metric,
                        "train_seconds": run.seconds,
                        "workers": run.workers,
                        "accumulation_steps": run.accumulation,
                        "k": run.k,
                        "precision": run.precision,
                        "rehearsed": run.rehearsed,
                        "machine": run.machine,
                        "jobs_at_once": run.jobs_at_once,
                        "mlflow_run_id": run.mlflow_run_id,
                        "baseline": row.setup is block.baseline,
                        "flags": "; ".join(flags),
                    }
                )
    return rows + [{"source": one.source, "flags": f"not compared: {one.reason}"} for one in comparison.refused]


def setup_row(block: Block, row: Row) -> dict[str, Any]:
    """One setup with all its numbers; what there is not stays empty."""
    difference, speed = row.difference, row.speed_up
    narrow = difference.interval(EQUIVALENCE_LEVEL) if difference is not None else None
    wide = difference.interval(DIFFERENCE_LEVEL) if difference is not None else None
    mean = row.metric.interval(DIFFERENCE_LEVEL)
    return {
        "block": block.title,
        "setup": row.setup.name,
        "baseline": block.baseline.name,
        "seeds": " ".join(map(str, row.setup.seeds)),
        "metric_name": block.key.metric,
        "metric_mean": row.metric.value,
        **_bounds("metric", mean),
        "metric_sd": row.metric.spreads[0] if len(row.setup.runs) > 1 else None,
        "difference": difference.value if difference is not None else None,
        "difference_by": difference.how if difference is not None else None,
        "difference_df": difference.df if difference is not None else None,
        "difference_standard_error": difference.standard_error if difference is not None else None,
        **_bounds("difference", narrow, "_90"),
        **_bounds("difference", wide, "_95"),
        "verdict": row.verdict.text if row.verdict is not None else None,
        "train_seconds": row.seconds,
        "speed_up": speed.value if speed is not None else None,
        **_bounds("speed_up", speed.interval if speed is not None else None),
        "comparability": row.comparability.text if row.comparability is not None else None,
        "findings": " ".join(str(found.number) for found in block.about(row.setup)),
    }


def _bounds(name: str, interval: Interval | None, suffix: str = "_95") -> dict[str, float | None]:
    return {
        f"{name}_low{suffix}": interval.low if interval is not None else None,
        f"{name}_high{suffix}": interval.high if interval is not None else None,
    }
