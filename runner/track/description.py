"""The texts above a run or an experiment on MLflow's pages, and the columns of its table of runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from runner.folder.record import RunRecord

if TYPE_CHECKING:  # it imports torch
    from runner.plan.experiment import Experiment

#: MLflow's tag for the description of a run or an experiment.
NOTE_TAG = "mlflow.note.content"
#: The tag that names the metric of a run's objective.
OBJECTIVE_TAG = "objective"
#: The tag of a sweep's run that says how each setup compares with the baseline, and how fast it is.
VERDICT_TAG = "sweep.verdict"
#: The metrics of a sweep's run: how a setup differs from the baseline, and how much faster it is.
DIFFERENCE, SPEED_UP = "sweep/difference", "sweep/speed_up"
#: A view of an experiment's page that can be opened with `viewStateShareKey=runner` in its address.
VIEW_KEY = "runner"
VIEW_TAGS = "mlflow.sharedViewState."
VIEW_TAG = f"{VIEW_TAGS}{VIEW_KEY}"

_NAME, _VERDICT = "attributes.`Run Name`", f"tags.`{VERDICT_TAG}`"
_EXPERIMENT = """\
A run's name says device, what differs from plain training in fp32, seed (`s0`), recipe and model. Runs that differ only
in the seed have the same tag `setup.digest`. A sweep is a run with its jobs as children.

`python -m runner.compare --experiment {name}` compares the setups over their seeds.
"""


def experiment_tags(name: str, objective: str | None) -> dict[str, str]:
    """Tags of a new MLflow experiment. `objective`: the metric of its first run."""
    metrics = [*([objective] if objective else []), SPEED_UP, "train/loss", "train/samples_per_s"]
    columns = [
        *(f"metrics.`{metric}`" for metric in metrics),
        *(f"params.`{param}`" for param in ("lr", "global_batch")),
        *(f"tags.`{tag}`" for tag in (VERDICT_TAG, "certificate", "diagnosis")),
    ]
    table = {"selectedColumns": columns, "columnOrder": [_NAME, _VERDICT], "columnWidths": {_NAME: 340, _VERDICT: 240}}
    return {
        # Without this tag MLflow's page shows charts for agents instead of training.
        "mlflow.experimentKind": "custom_model_development",
        NOTE_TAG: _EXPERIMENT.format(name=f"'{name}'" if " " in name else name),
        VIEW_TAG: json.dumps(table | (first_chart(objective) if objective else {})),
    }


def first_chart(metric: str) -> dict[str, Any]:
    """The part of a view by which MLflow's charts begin with a metric, such as `eval/matthews`; else they are sorted.

    MLflow adds the other charts, and makes this one a line chart where runs have several values.
    """
    section, _, name = metric.rpartition("/")
    chart = {"type": "BAR", "uuid": "objective", "metricKey": metric, "displayName": name, "metricSectionId": section}
    # A section that somebody has ordered is not sorted again.
    ordered = {"uuid": section, "name": section, "display": True, "isReordered": True}
    return {"compareRunCharts": [{**chart, "isGenerated": True, "deleted": False}], "compareRunSections": [ordered]}


def run_description(experiment: Experiment, record: RunRecord | None = None) -> str:
    """Plan and certificate in a few lines. `record`: once the run has ended."""
    certificate = experiment.certificate
    differs = ", ".join(item.name.replace("_", " ") for item in certificate.properties if not item.equal)
    level = certificate.level if record is None else record.certificate
    lines = {}
    if record is not None:
        lines[record.status.capitalize()] = _result(record)
        if record.diagnosis is not None:
            lines["Diagnosis"] = record.diagnosis
    lines["Certificate"] = f"**{level}** to one fp32 worker{f'; differs in {differs}' if differs else ''}"
    if experiment.placement.rehearsed:
        lines["Rehearsed"] = f"on the {experiment.placement.device_type}: the speed says nothing about the named device"
    lines["Plan"] = _plan(experiment)
    return "\n".join(f"- {name}: {text}" for name, text in lines.items())


def _plan(experiment: Experiment) -> str:
    plan, config, facts = experiment.plan, experiment.config, experiment.facts
    split = f"micro-batch {plan.micro_batch} × accumulation {plan.accumulation_steps} × {plan.world_size} worker(s)"
    return ", ".join(
        [
            f"global batch {plan.global_batch:,} ({split})",
            *([f"k = {plan.k}"] if plan.k > 1 else []),
            f"learning rate {plan.lr:.4g}",
            f"{config.optimizer.name.name}, {config.schedule.name.name} schedule",
            f"{plan.optimizer_steps:,} optimizer steps",
            f"{plan.total_samples:,} {facts.unit}",
        ]
    )


def _result(record: RunRecord) -> str:
    result = record.result
    metrics = [f"{name} {value:.4g}" for name, value in result.eval.items()]
    speed = [f"{result.samples_per_s:,.0f} samples/s"] if result.samples_per_s else []
    steps = f"{result.optimizer_steps or 0:,} optimizer steps"
    return ", ".join([*metrics, *speed, steps, f"{record.wall_s:.1f} s in total"])
