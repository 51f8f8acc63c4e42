"""Read runs from the folders that the runner writes. Runs in MLflow are read from their copies of the same files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner.config.schema import SETUP_DIGEST_EXCLUDES
from runner.errors import UserError, did_you_mean, first_line
from runner.folder.evaluation_rows import FILE_NAME as EVALUATION_ROWS
from runner.folder.evaluation_rows import read_rows
from runner.folder.files import digest_of, started_ms
from runner.folder.metrics_log import MetricsReader
from runner.folder.reading import read_json, read_settings
from runner.folder.record import FINISHED, RunRecord, RunResult
from runner.plan.levels import EQUIVALENT, IDENTICAL
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
    candidates = [note.parent for note in path.rglob("job.json")] if in_sweep else path.iterdir()
    found = sorted((folder for folder in candidates if _is_run(folder)), key=_job_number)
    if not found:
        raise UserError(f"{path} holds no run: no config.yaml or summary.json in it or in the folders in it")
    return found


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "summary.json").is_file()


def _job_number(folder: Path) -> tuple[int, str]:
    """Job 10 of a sweep comes after job 9."""
    return (int(folder.name), "") if folder.name.isdecimal() else (-1, folder.name)


@dataclass(frozen=True)
class _RunFiles:
    source: str
    path: Path
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    record: RunRecord
    certificate: Mapping[str, Any]
    rows: Mapping[str, np.ndarray]


class _NotARun(Exception):
    """Why a folder holds no run that can be compared."""


def read_folders(folders: Sequence[tuple[str, Path]], metric: str | None) -> FoundRuns:
    """The runs in folders. `folders`: displayed name and path; `metric`: overrides the runs' own. Raises UserError."""
    files: list[_RunFiles] = []
    runs: list[Run] = []
    skipped: list[SkippedRun] = []
    for source, path in folders:
        try:
            files.append(_read(source, path))
        except _NotARun as reason:
            skipped.append(SkippedRun(source, str(reason)))
    known = sorted({name for one in files for name in one.record.result.eval})
    if metric is not None and files and metric not in known:
        raise UserError(f"--metric={metric} was not measured in any of the runs{did_you_mean(metric, known)}")
    # Digests written by the runner and digests made here never match: use one kind for all runs.
    own_digests = all(one.record.setup_digest is not None for one in files)
    for one in files:
        try:
            runs.append(_run(one, metric, own_digests))
        except _NotARun as reason:
            skipped.append(SkippedRun(one.source, str(reason)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
            skipped.append(SkippedRun(one.source, f"the files are not those of a run of this runner ({problem})"))
    return FoundRuns(runs, skipped)


def _read(source: str, path: Path) -> _RunFiles:
    try:
        record = RunRecord.read(path)
        if record is None:
            raise _NotARun("no summary.json: still running, or interrupted before it was written")
        if record.status != FINISHED and not record.diverged:
            raise _NotARun(record.status)
        certificate = path / "certificate.json"
        return _RunFiles(
            source,
            path,
            read_settings(path / "config.yaml"),
            read_json(path / "plan.json"),
            record,
            read_json(certificate) if certificate.exists() else {},
            read_rows(path),
        )
    except UserError as error:
        raise _NotARun(f"it cannot be read as a run ({first_line(error)})") from error


def _run(files: _RunFiles, chosen_metric: str | None, own_digests: bool) -> Run:
    """Raises _NotARun without the metric, and other exceptions for files of another tool."""
    config, plan, record = files.config, files.plan, files.record
    result, speed, data, prediction = record.result, record.speed, record.data, record.prediction
    metric, goal = _objective(files, chosen_metric)
    if record.setup is None:
        raise _NotARun("no setup in summary.json")
    diverged = _divergence(record, metric)
    value = result.eval.get(metric) if diverged is None else math.nan
    if value is None:
        raise _NotARun(f"has no metric {metric}")
    settings = {name: setting for name, setting in config.items() if name not in SETUP_DIGEST_EXCLUDES}
    certificate = _properties(files.certificate)
    workers, k = int(plan["world_size"]), int(plan["k"])
    seconds = _training_seconds(result)
    rows = data.eval_groups or data.eval_samples
    return Run(
        source=files.source,
        block=_block(files, metric, goal),
        setup=_SEED_SUFFIX.sub("", record.setup),
        digest=str(record.setup_digest)
        if own_digests
        else digest_of([settings, certificate.get("recipe"), workers, certificate.get("device")])[:16],
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
        certificate=certificate or None,
        withdrawn=files.certificate.get("withdrawn"),
        phases=_phases(record, seconds),
        curve=_curve(files.path),
        tokens_per_s=speed.tokens_per_s,
        model_flops_utilization=speed.model_flops_utilization,
        peak_memory_bytes=max(result.peak_memory_bytes or (), default=None),
        predicted_seconds=None if prediction is None else prediction.training_s.predicted,
        design=None if record.design is None else Design(**record.design),
        diverged=diverged,
        weights=result.weights_digest,
        eval_rows=int(rows) if rows else None,
        row_metrics=_row_metrics(files.rows.get(metric), float(value), rows),
        constant=data.constant.get(metric),
        mlflow_run_id=record.mlflow_run_id,
        order=f"{started_ms(files.path):020d}",
    )


def _row_metrics(values: np.ndarray | None, metric: float, rows: int | None) -> np.ndarray | None:
    """The values of the rows, float64; None if they are not those of this metric, but of another evaluation."""
    if values is None or values.shape != (rows,):
        return None
    values = values.astype(np.float64)
    return values if math.isclose(values.mean(), metric, rel_tol=1e-5, abs_tol=1e-6) else None


def _divergence(record: RunRecord, metric: str) -> str | None:
    """Why a run has no result: what ended it, or, if it is older, a number in its summary that is not finite."""
    if record.diverged:
        return record.error
    metrics = record.result.eval.items()
    numbers = [(name, value) for name, value in metrics if name == metric or LOWER_IS_BETTER.search(name)]
    for name, value in (("train_loss", record.result.train_loss), *numbers):
        if value is not None and not math.isfinite(value):
            return f"{name} is {value}"
    return None


def _objective(files: _RunFiles, chosen: str | None) -> tuple[str, str]:
    """Metric and goal: of the run, or of another metric that was chosen."""
    evaluation = files.config.get("evaluation") or {}
    own = files.record.metric or evaluation.get("metric")
    if chosen is not None and chosen != own:
        return chosen, "min" if LOWER_IS_BETTER.search(chosen) else "max"
    return str(own), str(files.record.goal or evaluation.get("goal") or "max")


def _block(files: _RunFiles, metric: str, goal: str) -> BlockKey:
    recipe, plan = files.config["recipe"], files.plan
    samples, epochs, total = (int(plan[name]) for name in ("samples_per_epoch", "epochs", "total_samples"))
    if total != samples * epochs:  # because of max_steps or drop_last
        samples, epochs = total, 1
    data = recipe.get("data")
    conditions = (f"{epochs} epochs" if epochs > 1 else "", metric)
    return BlockKey(
        str(recipe["name"]), conditions, samples, epochs, metric, goal, digest_of(data)[:16] if data else ""
    )


def _training_seconds(result: RunResult) -> float | None:
    rate, samples = result.samples_per_s, result.samples_seen
    if not rate or not math.isfinite(rate) or not samples:
        return None
    return samples / rate


def _phases(record: RunRecord, training: float | None) -> Phases | None:
    """None for a resumed run too: the training counted is that of all its commands, all else that of the last."""
    result, wall = record.result, record.wall_s
    if training is None or not result.first_step_s or not wall or record.resumed_after:
        return None
    return Phases(result.first_step_s, training, wall, result.comm_stall_s, result.step_s, result.evaluation_s)


def _properties(certificate: Mapping[str, Any]) -> dict[str, CertificateProperty]:
    """The properties by name: those of a resumed run's last segment: another one may have had other bits."""
    same_bits = all(segment["level"] == IDENTICAL for segment in certificate.get("segments", [])[:-1])
    rows = [*certificate.get("equal", []), *certificate.get("different", [])]
    return {
        str(row["name"]): CertificateProperty(
            row["value"], EQUIVALENT if row["allows"] == IDENTICAL and not same_bits else str(row["allows"])
        )
        for row in rows
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
