"""The folder of an evaluation, and its run in the tracking store."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.config.plain import to_plain
from runner.folder.files import write_json
from runner.folder.metrics_log import MetricsLog
from runner.folder.record import FILE_NAME, FINISHED, VERSION
from runner.tools.evaluate.prepared import Evaluation
from runner.track.card import EVALUATED_TAG, TrackingRecord, user_tags
from runner.track.secrets import masked, without_credentials
from runner.track.store import store_of
from runner.track.tracker import build_tracker


@dataclass(frozen=True)
class EvaluationRecord:
    """The content of an evaluation's `summary.json`.

    `evaluated`: the model, a digest of its weights, and the folder of its run, as far as known. `predictions`: their
    file.
    """

    evaluated: Mapping[str, str | None]
    device: str
    rehearsed: bool
    world_size: int
    precision: str
    micro_batch: int
    data: Mapping[str, Any]
    eval: Mapping[str, float]
    evaluation_s: float
    samples_per_s: float
    wall_s: float
    predictions: str | None
    notes: tuple[str, ...]
    mlflow_run_id: str | None

    def write(self, folder: Path) -> None:
        """Raises RunFailed if the disk does not take it."""
        write_json(folder / FILE_NAME, {"version": VERSION, "status": FINISHED, **to_plain(self)})


def card_of(evaluation: Evaluation, program: str) -> TrackingRecord:
    """The card of an evaluation, a child of the run whose model it is. `program`: the command's name."""
    config, facts, placement, target = evaluation.config, evaluation.facts, evaluation.placement, evaluation.target
    run, store = target.card, store_of(config.tracking)
    name = Path(target.model).name if run is None else run.run_name
    kind = {"runner.evaluate": "evaluation", "runner.predict": "predictions"}[program]
    elsewhere = run is None or run.tags.get("device") != placement.label
    weights = target.weights_digest()
    return TrackingRecord(
        experiment=config.tracking.experiment,
        run_name=config.tracking.run_name or f"{kind} of {name}{f' · {placement.label}' if elsewhere else ''}",
        params={
            "recipe": config.recipe["name"],
            "model": target.model,
            "device": placement.label,
            "world_size": str(placement.workers),
            "micro_batch": str(config.evaluation.micro_batch),
            "precision": config.precision.name.name,
        },
        tags={
            **user_tags(),
            "mlflow.source.name": f"python -m {program}",
            "device": placement.label,
            "device.rehearsed": str(placement.rehearsed).lower(),
            "device.executed_on": placement.device_type,
            EVALUATED_TAG: target.model,
            **({} if weights is None else {"evaluation.weights": weights}),
            "evaluation.data": facts.digest[:16],
            **({"notes": "; ".join(evaluation.notes)} if evaluation.notes else {}),
        },
        store=None if store is None else masked(store),
        dataset={
            "name": config.recipe["name"],
            "digest": facts.digest[:16],
            "source": masked(facts.source),
            "profile": json.dumps({"eval_samples": facts.eval_samples}),
        },
        dataset_context="evaluation",
        parent_key=None if run is None else run.key,
    )


def write_result(
    evaluation: Evaluation, card: TrackingRecord, result: Mapping[str, Any], output: Path | None, started_at: float
) -> tuple[EvaluationRecord, Sequence[str]]:
    """Make the folder of an evaluation that has ended and log it; its record, and how to open it in MLflow.

    `result`: of the workers. `output`: the file of predictions. `started_at`: of the command, in seconds since the
    epoch.
    """
    config, facts, placement, target = evaluation.config, evaluation.facts, evaluation.placement, evaluation.target
    folder = evaluation.folder
    folder.mkdir(parents=True, exist_ok=True)
    plain = without_credentials(to_plain(config))
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    log = MetricsLog(folder)
    log.write(0, {f"eval/{name}": value for name, value in result["metrics"].items()})
    log.close()
    tracker = build_tracker(config.tracking, card, folder)
    tracker.start()
    record = EvaluationRecord(
        evaluated={
            "model": target.model,
            "weights": card.tags.get("evaluation.weights"),
            "run": None if target.run is None else str(target.run),
        },
        device=placement.label,
        rehearsed=placement.rehearsed,
        world_size=placement.workers,
        precision=config.precision.name.name,
        micro_batch=config.evaluation.micro_batch,
        data={
            "source": masked(facts.source),
            "digest": facts.digest,
            **{name: getattr(facts, name) for name in ("eval_samples", "unit", "groups", "eval_groups")},
        },
        eval=dict(result["metrics"]),
        evaluation_s=result["seconds"],
        samples_per_s=facts.eval_samples / result["seconds"],
        wall_s=time.time() - started_at,
        predictions=None if output is None else str(output),
        notes=tuple(evaluation.notes),
        mlflow_run_id=tracker.wait_until_open(FINISHED),
    )
    record.write(folder)
    tracker.finish(FINISHED)
    return record, tracker.how_to_open()
