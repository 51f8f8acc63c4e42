"""What became of a run: the content of `summary.json`, and the last lines on the terminal."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from runner.errors import UserError, first_line
from runner.folder.files import write_json
from runner.launch.elastic import WorkerFailed
from runner.plan.experiment import Experiment
from runner.speed.speed import efficiency_words
from runner.track.secrets import masked

FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"


@dataclass(frozen=True)
class Role:
    """What a run is within its command; the default is a run by itself.

    `tags`: for the tracking store. `varied`: the settings that a sweep varied, with this run's values. `parent_key`: of
    the sweep's card. `at_once`: how many jobs share this machine. `progress`: a line about the whole sweep.
    """

    tags: Mapping[str, str] = field(default_factory=dict)
    varied: Mapping[str, str] = field(default_factory=dict)
    parent_key: str | None = None
    at_once: int = 1
    progress: Callable[[], str] | None = None


def summary_of(
    status: str,
    experiment: Experiment,
    result: Mapping[str, Any],
    started_at: float,
    mlflow_run_id: str | None,
    role: Role,
) -> dict[str, Any]:
    """The content of `summary.json`; what training did not get to is null."""
    evaluation = experiment.config.evaluation
    numbers = (
        "optimizer_steps",
        "samples_seen",
        "samples_per_s",
        "first_step_s",
        "synchronisations",
        "comm_bytes",
        "comm_s",
        "comm_stall_s",
        "sync",
        "step_s",
        "evaluation_s",
        "compilations",
        "train_loss",
        "stopped_early",
        "best",
        "machine",
    )
    return {
        "status": status,
        "setup": experiment.setup_name,
        "setup_digest": experiment.setup_digest,
        "seed": experiment.config.seed,
        "varied": dict(role.varied),
        "metric": evaluation.metric,
        "goal": evaluation.goal.name,
        "rehearsed": experiment.placement.rehearsed,
        "data": _data(experiment),
        "wall_s": time.time() - started_at,
        **{name: result.get(name) for name in numbers},
        "jobs_at_once": role.at_once,
        "eval": result.get("eval", {}),
        "warnings": result.get("warnings", []),
        "notes": list(experiment.notes),
        "certificate": experiment.certificate.level,
        "mlflow_run_id": mlflow_run_id,
    }


def _data(experiment: Experiment) -> dict[str, Any]:
    """What was trained on and evaluated, counted: in rows of the tables, and in what these belong to."""
    facts = experiment.facts
    numbers = ("train_samples", "eval_samples", "unit", "groups", "train_groups", "eval_groups")
    return {name: getattr(facts, name) for name in numbers}


def objective(summary: Mapping[str, Any]) -> float | None:
    """What an optimizing sweeper optimises: the recipe's metric at the end of the run.

    None if the run diverged: sweepers take that for a failed trial and go on, and cannot rank what is not a number.
    """
    value: float | None = summary["eval"].get(summary["metric"])
    return value if value is not None and math.isfinite(value) else None


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Leave `summary.json`, whose status says that the run has ended."""
    write_json(folder / "summary.json", summary)


def note_failure(folder: Path, error: Exception) -> None:
    """Say in a run's `summary.json` why it failed; there may be nothing else to say."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {"status": FAILED}
    said = {"error": masked(in_a_line(error)), "user_error": isinstance(error, UserError)}
    write_summary(folder, {**summary, **said})


def in_a_line(error: Exception) -> str:
    """An error's one sentence; a worker's traceback ends with it."""
    return str(error).strip().splitlines()[-1] if isinstance(error, WorkerFailed) else first_line(error)


def report(summary: Mapping[str, Any], experiment: Experiment, folder: Path, console: Console) -> None:
    """Say how a finished run ended, and how fast it was."""
    metrics = "  ".join(f"{name} [bold]{value:.4g}[/]" for name, value in summary["eval"].items())
    speed = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "too short to time"
    console.print()
    facts = experiment.facts
    over = f"  over {facts.eval_groups:,} {facts.groups}" if facts.eval_groups is not None else ""
    console.print(f"[bold green]finished[/] {escape(experiment.setup_name)}   {metrics}{over}", soft_wrap=True)
    console.print(
        f"  {summary['optimizer_steps']:,} optimizer steps, {summary['samples_seen']:,} {facts.unit}, {speed}, "
        f"{summary['wall_s']:.1f} s in all, first step after {summary['first_step_s']:.1f} s",
        soft_wrap=True,
    )
    if comparison := efficiency_words(summary, experiment.plan.world_size, folder):
        console.print(f"  {escape(comparison)}", soft_wrap=True)
    if summary["diagnosis"] is not None:
        console.print(f"  [bold]diagnosis:[/] {escape(summary['diagnosis'])}", soft_wrap=True)
    if compiled := summary["compilations"]:
        console.print(
            f"  {compiled['count']} compilations in {compiled['seconds']:.1f} s, "
            f"{compiled['from_cache']} more found in the cache",
            soft_wrap=True,
        )
    for warning in summary["warnings"]:
        console.print(f"  [bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    console.print(f"  in {escape(os.path.relpath(folder))}", soft_wrap=True)
