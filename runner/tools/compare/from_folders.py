"""Read runs from the folders that the runner writes. Runs in MLflow are read from their copies of the same files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.config.schema import SETUP_DIGEST_EXCLUDES
from runner.errors import UserError, did_you_mean, first_line
from runner.folder.evaluation_rows import FILE_NAME as EVALUATION_ROWS
from runner.folder.evaluation_rows import read_rows
from runner.folder.files import digest_of, started_ms
from runner.folder.metrics_log import MetricsReader
from runner.folder.reading import folders_with, read_json, read_settings
from runner.folder.record import FINISHED, RunRecord
from runner.plan.certificate import Certificate
from runner.plan.levels import EQUIVALENT, IDENTICAL
from runner.run.earlier import certificate_of_run
from runner.tools.compare.design import Design
from runner.tools.compare.runs import (
    ACCUMULATION,
    LOWER_IS_BETTER,
    SINGLE,
    BlockKey,
    CertificateProperty,
    FoundRuns,
    K,
    Phases,
    Run,
    SkippedRun,
)

#: The files of a run's folder that are read.
FILES = ("config.yaml", "plan.json", "certificate.json", "summary.json", "metrics.jsonl", EVALUATION_ROWS)
_SEED_SUFFIX = re.compile(r" · s\d+$")


def run_folders(path: Path) -> list[Path]:
    """`path` itself if it is a run's folder, else the run folders in it, in order. Raises UserError."""
    if not path.is_dir():
        raise UserError(f"{path} is a file: give a run's folder, a sweep's folder, an MLflow run id, or --csv={path}")
    if _is_run(path):
        return [path]
    # The jobs of a sweep may lie deeper than one level.
    in_sweep = (path / "sweep.json").is_file()
    candidates = folders_with("job.json", path) if in_sweep else path.iterdir()
    found = sorted((folder for folder in candidates if _is_run(folder)), key=_job_number)
    if not found:
        raise UserError(f"{path} holds no run: no config.yaml or summary.json in it or in the folders in it")
    return found


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "summary.json").is_file()


def _job_number(folder: Path) -> tuple[int, str]:
    """Job 10 of a sweep comes after job 9."""
    return (int(folder.name), "") if folder.name.isdecimal() else (-1, folder.name)


class _NotARun(Exception):
    """Raised for a folder that holds no run that can be compared, with the reason."""


def read_folders(folders: Sequence[tuple[str, Path]], metric: str | None) -> FoundRuns:
    """The runs in folders. `folders`: displayed name and path; `metric`: overrides the runs' own. Raises UserError."""
    runs: list[Run] = []
    skipped: list[SkippedRun] = []
    measured: set[str] = set()
    for source, path in folders:
        try:
            record = _record(path)
            measured |= record.result.eval.keys()
            runs.append(_run(source, path, record, metric))
        except _NotARun as reason:
            skipped.append(SkippedRun(source, str(reason)))
        except UserError as error:
            skipped.append(SkippedRun(source, f"it cannot be read as a run ({first_line(error)})"))
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
            skipped.append(SkippedRun(source, f"the files are not those of a run of this runner ({problem})"))
    if metric is not None and measured and metric not in measured:
        known = sorted(measured)
        raise UserError(f"--metric={metric} was not measured in any of the runs{did_you_mean(metric, known)}")
    return FoundRuns(runs, skipped)


def _record(path: Path) -> RunRecord:
    """The record of a run that has finished or diverged. Raises _NotARun for others, UserError for a damaged one."""
    record = RunRecord.read(path)
    if record is None:
        raise _NotARun("no summary.json: still running, or interrupted before it was written")
    if record.status != FINISHED and not record.diverged:
        raise _NotARun(f"{record.status} ({record.error})" if record.error else record.status)
    return record


def _run(source: str, path: Path, record: RunRecord, chosen_metric: str | None) -> Run:
    """Raises _NotARun without the metric, UserError for damaged files, and other exceptions for another tool's."""
    config, plan, result = read_settings(path / "config.yaml"), read_json(path / "plan.json"), record.result
    certificate = certificate_of_run(path) if (path / "certificate.json").exists() else None
    if record.setup is None or record.setup_digest is None or record.metric is None:
        raise _NotARun("no setup, digest or metric in summary.json: it is of an early version of the runner")
    metric, goal = record.metric, record.goal or "max"
    if chosen_metric is not None and chosen_metric != metric:
        metric, goal = chosen_metric, "min" if LOWER_IS_BETTER.search(chosen_metric) else "max"
    value = math.nan if record.diverged else result.eval.get(metric)
    if value is None:
        raise _NotARun(f"has no metric {metric}")
    settings = {name: setting for name, setting in config.items() if name not in SETUP_DIGEST_EXCLUDES}
    workers, k = int(plan["world_size"]), int(plan["k"])
    rate, samples = result.samples_per_s, result.samples_seen
    seconds = samples / rate if rate and samples and math.isfinite(rate) else None
    rows = record.data.eval_groups or record.data.eval_samples
    return Run(
        source=source,
        block=_block(config, plan, metric, goal),
        setup=_SEED_SUFFIX.sub("", record.setup),
        digest=record.setup_digest,
        seed=int(config["seed"]) if record.seed is None else record.seed,
        workers=workers,
        # Shards are how `equivalence=identical` computes on any number of workers, and no setup's choice.
        accumulation=1 if plan.get("shards") else int(plan["accumulation_steps"]),
        k=k,
        precision=str(config["precision"]["name"]),
        method=SINGLE if workers == 1 else K if k > 1 else ACCUMULATION,
        metric=float(value),
        seconds=seconds,
        rehearsed=record.rehearsed,
        machine=result.machine,
        jobs_at_once=record.jobs_at_once,
        busy=any(cause.kind == "busy" for cause in record.diagnoses),
        varied={key: value for key, value in record.varied.items() if key != "seed"},
        values=_flat({**settings, "plan": {key: value for key, value in plan.items() if key != "digest"}}),
        certificate=None if certificate is None else _properties(certificate) or None,
        withdrawn=None if certificate is None else certificate.withdrawn,
        phases=_phases(record, seconds),
        curve=_curve(path),
        tokens_per_s=record.speed.tokens_per_s,
        model_flops_utilization=record.speed.model_flops_utilization,
        peak_memory_bytes=max(result.peak_memory_bytes or (), default=None),
        predicted_seconds=None if record.prediction is None else record.prediction.training_s.predicted,
        design=None if record.design is None else Design(**record.design),
        raced=record.raced or 0,
        diverged=record.error if record.diverged else None,
        weights=result.weights_digest,
        eval_rows=int(rows) if rows else None,
        row_metrics=_row_metrics(read_rows(path).get(metric), float(value), rows),
        constant=record.data.constant.get(metric),
        mlflow_run_id=record.mlflow_run_id,
        order=f"{started_ms(path):020d}",
    )


def _row_metrics(values: np.ndarray | None, metric: float, rows: int | None) -> np.ndarray | None:
    """The values of the rows, float64; None if they are not those of this metric, but of another evaluation."""
    if values is None or values.shape != (rows,):
        return None
    values = values.astype(np.float64)
    return values if math.isclose(values.mean(), metric, rel_tol=1e-5, abs_tol=1e-6) else None


def _block(config: Mapping[str, Any], plan: Mapping[str, Any], metric: str, goal: str) -> BlockKey:
    recipe, data = config["recipe"], config["recipe"].get("data")
    samples, epochs, total = (int(plan[name]) for name in ("samples_per_epoch", "epochs", "total_samples"))
    if total != samples * epochs:  # because of max_steps or drop_last
        samples, epochs = total, 1
    conditions = (f"{epochs} epochs" if epochs > 1 else "", metric)
    digest = digest_of(data)[:16] if data else ""
    return BlockKey(str(recipe["name"]), conditions, samples, epochs, metric, goal, digest)


def _phases(record: RunRecord, training: float | None) -> Phases | None:
    """None for a resumed run too: the training counted is that of all its commands, all else that of the last."""
    result, wall = record.result, record.wall_s
    if training is None or not result.first_step_s or not wall or record.resumed_after:
        return None
    return Phases(result.first_step_s, training, wall, result.comm_stall_s, result.step_s, result.evaluation_s)


def _properties(certificate: Certificate) -> dict[str, CertificateProperty]:
    """The properties by name: those of a resumed run's last segment: another one may have had other bits."""
    same_bits = all(segment.level == IDENTICAL for segment in certificate.segments[:-1])
    return {
        one.name: CertificateProperty(
            one.value, EQUIVALENT if one.allows == IDENTICAL and not same_bits else one.allows
        )
        for one in certificate.properties
    }


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"optimizer": {"lr": 1}}` as `{"optimizer.lr": "1"}`."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": str(value)}
    return flat


def _curve(folder: Path) -> tuple[tuple[float, float], ...]:
    """(samples seen, training loss) of each logged step."""
    series: dict[str, dict[int, float]] = {"train/samples_seen": {}, "train/loss": {}}
    for metric in MetricsReader(folder).read():
        if metric.key in series:
            series[metric.key][metric.step] = float(metric.value)
    seen, losses = series["train/samples_seen"], series["train/loss"]
    return tuple((seen[step], losses[step]) for step in sorted(seen.keys() & losses.keys()))
