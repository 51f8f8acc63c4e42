"""How good the prediction for a run was."""

from __future__ import annotations

from runner.folder.record import FINISHED, PredictionScores, RunRecord, Score
from runner.measure.predicted import predicted
from runner.plan.experiment import Experiment


def scored(experiment: Experiment, record: RunRecord, started_at: float) -> PredictionScores | None:
    """The predictions for a run that has finished, against what it took; None if there is none or it was disturbed.

    `started_at`: of the run; later measurements are not used.
    """
    result, speed = record.result, record.speed
    disturbed = record.jobs_at_once != 1 or record.resumed_after or speed.restart_share or result.stopped_early
    if disturbed or record.status != FINISHED or not result.samples_per_s:
        return None
    prediction = predicted(experiment, before=started_at)
    if prediction is None:
        return None
    assert result.samples_seen is not None
    assert record.wall_s is not None
    assert result.evaluation_s is not None
    training, total, memory = prediction.training, prediction.total, result.peak_memory_bytes
    took_s = result.samples_seen / result.samples_per_s
    return PredictionScores(
        measured_at=prediction.measured_at,
        training_s=Score(training.value, took_s, (training.low, training.high)),
        wall_s=Score(total.value, record.wall_s, (total.low, total.high)),
        evaluation_s=Score(prediction.evaluation_s, result.evaluation_s),
        peak_memory_bytes=Score(prediction.memory_bytes, max(memory)) if memory else None,
    )


def prediction_metrics(record: RunRecord) -> dict[str, float]:
    """The predictions that are logged as metrics; errors are shares, positive if too much was predicted."""
    found = record.prediction
    metrics: dict[str, float] = {}
    for name in ("training_s", "wall_s", "peak_memory_bytes") if found is not None else ():
        if (own := getattr(found, name)) is not None:
            metrics[f"prediction/{name}"] = own.predicted
            metrics[f"prediction/{name.removesuffix('_s').removesuffix('_bytes')}_error"] = own.error
    return metrics


def prediction_words(record: RunRecord) -> str | None:
    """How good the prediction was, in a line; None without one."""
    if record.prediction is None:
        return None
    own = record.prediction.training_s
    assert own.interval is not None
    low, high = own.interval
    return (
        f"training took {own.measured:,.1f} s, predicted were {own.predicted:,.1f} ({low:,.1f} to {high:,.1f}): "
        f"{own.error:+.0%}"
    )
