"""How a run ended: the content of `summary.json`, and the last lines on the terminal."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from runner.config.schema import AUTO
from runner.errors import Diverged, RunFailed, UserError, first_line
from runner.folder.files import write_json
from runner.launch.local import WorkerFailed
from runner.log import LOG
from runner.measure.predicted import prediction_words
from runner.plan.experiment import Experiment
from runner.speed.figures import efficiency_words, utilization_words
from runner.track.secrets import masked
from runner.train.result import RunResult

#: How a run ended. PREEMPTED: it was asked to make room, and can be resumed.
FINISHED, FAILED, KILLED, PREEMPTED = "FINISHED", "FAILED", "KILLED", "PREEMPTED"


@dataclass(frozen=True)
class SweepContext:
    """A run's place in a sweep; the default is a single run.

    `tags`: for the tracking store. `varied`: the settings that the sweep varies, with this run's values. `parent_key`:
    of the sweep's card. `at_once`: how many jobs share this machine. `progress`: describes the state of the sweep.
    """

    tags: Mapping[str, str] = field(default_factory=dict)
    varied: Mapping[str, str] = field(default_factory=dict)
    parent_key: str | None = None
    at_once: int = 1
    progress: Callable[[], str] | None = None


def summary_of(
    status: str,
    experiment: Experiment,
    result: RunResult,
    started_at: float,
    mlflow_run_id: str | None,
    role: SweepContext,
    restarts: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of `summary.json`, without the figures of `runner.speed`; null: unknown.

    `restarts`: of its workers, in sentences.
    """
    evaluation = experiment.config.evaluation
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
        **result.as_summary(),
        "jobs_at_once": role.at_once,
        "resumed_after": [segment.after_step for segment in experiment.certificate.segments[1:]],
        "notes": [*experiment.notes, *restarts, *_surprises(experiment, result)],
        "certificate": experiment.certificate.level,
        "mlflow_run_id": mlflow_run_id,
    }


def _surprises(experiment: Experiment, result: RunResult) -> Iterator[str]:
    """What was found out during the run and may surprise, in sentences."""
    for smaller in result.smaller_micro_batches:
        yield (
            f"for lack of memory each worker had {smaller.accumulation_steps} smaller micro-batches from step "
            f"{smaller.after_step + 1:,} on: the same global batches, summed in another order, so that last bits differ"
        )
    if result.stopped_early:
        assert result.best is not None
        evaluation, steps = experiment.config.evaluation, experiment.plan.optimizer_steps
        gain = f"gain above {evaluation.min_delta:g}" if evaluation.min_delta else "gain"
        yield (
            f"stopped early, at step {result.optimizer_steps:,} of {steps:,}: no {gain} in {evaluation.metric} since "
            f"step {result.best['step']:,} (evaluation.patience={evaluation.patience} evaluations)"
        )
    sync, chosen = experiment.config.sync, result.sync or {}
    if sync.delay == AUTO and chosen:
        if chosen["delay"] is None:
            yield "sync.delay=auto: the run ended before enough averages were measured; give a number of steps"
        else:
            yield f"sync.delay=auto chose {chosen['delay']}: sync.delay={chosen['delay']} repeats it"
    for truncated in [result.truncated] if isinstance(result.truncated, Mapping) else result.truncated or ():
        counts = [(name, *truncated[part]) for name, part in (("training", "train"), ("evaluation", "eval"))]
        found = [f"{count:,} of {total:,} {name} {truncated['what']}" for name, count, total in counts if count]
        if found:
            yield f"{' and '.join(found)} were truncated to {truncated['setting']}={truncated['tokens']} tokens"


def _data(experiment: Experiment) -> dict[str, Any]:
    """Rows of the tables, the groups (such as questions) that they belong to, and what a constant answer scores."""
    facts = experiment.facts
    numbers = ("train_samples", "eval_samples", "unit", "groups", "train_groups", "eval_groups", "constant")
    return {name: getattr(facts, name) for name in numbers}


def objective(summary: Mapping[str, Any]) -> float | None:
    """What an optimizing sweeper optimises: the recipe's metric at the end of the run.

    None if the run diverged: sweepers treat that as a failed trial, and cannot rank NaN.
    """
    value: float | None = summary["eval"].get(summary["metric"])
    return value if value is not None and math.isfinite(value) else None


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`, whose status says that the run has ended."""
    write_json(folder / "summary.json", summary)


def failure_of(error: Exception) -> dict[str, Any]:
    """What `summary.json` says about why a run failed. `diverged`: because numbers were not finite."""
    kinds = {"user_error": UserError, "diverged": Diverged}
    return {"error": masked(one_line(error)), **{name: isinstance(error, kind) for name, kind in kinds.items()}}


def note_failure(folder: Path, error: Exception) -> None:
    """Record in a run's `summary.json` why it failed; the file may not exist yet."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {"status": FAILED}
    try:
        write_summary(folder, {**summary, **failure_of(error)})
    except RunFailed as problem:  # the failure itself is reported by whoever caught it
        LOG.warning(str(problem))


def one_line(error: Exception) -> str:
    """An error in one line; the last line of a worker's traceback."""
    return str(error).strip().splitlines()[-1] if isinstance(error, WorkerFailed) else first_line(error)


def noise_words(noise: Mapping[str, Any], global_batch: int) -> str:
    """The gradient's noise scale, and how the global batch compares."""
    if noise["scale"] is None:
        few = f"too few or too noisy measurements ({noise['measurements']})"
        return f"gradient noise scale unknown: {few}; use a smaller noise.every_steps"
    scale, error = noise["scale"], noise["standard_error"]
    return (
        f"gradient noise scale {scale:,.0f} ± {error:,.0f} samples, {scale / global_batch:.2g} times the global batch: "
        "above about this batch size, a larger batch saves few steps"
    )


def print_sentence(console: Console, markup: str) -> None:
    """Print text that is wrapped at words on a terminal, and is one line in a log."""
    console.print(markup, soft_wrap=not console.is_terminal)


def report(summary: Mapping[str, Any], experiment: Experiment, folder: Path, console: Console) -> None:
    """Print how a finished run ended, and how fast it was."""
    metrics = "  ".join(f"{name} [bold]{value:.4g}[/]" for name, value in summary["eval"].items())
    speed = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "too short to measure"
    console.print()
    facts = experiment.facts
    over = f"  over {facts.eval_groups:,} {facts.groups}" if facts.eval_groups is not None else ""
    print_sentence(console, f"[bold green]finished[/] {escape(experiment.setup_name)}   {metrics}{over}")
    compiling = summary["first_step_compile_s"]
    compiled_first = f" ({compiling:.1f} s of them compiling)" if compiling else ""
    skipped = f", of which fp16 skipped {summary['skipped_steps']:,}" if summary["skipped_steps"] else ""
    print_sentence(
        console,
        f"  {summary['optimizer_steps']:,} optimizer steps{skipped}, {summary['samples_seen']:,} {facts.unit}, "
        f"{speed}, {summary['wall_s']:.1f} s in total, first step after {summary['first_step_s']:.1f} s"
        f"{compiled_first}",
    )
    if digest := summary["weights_digest"]:
        print_sentence(console, f"  weights {digest}: the same on any number of workers (equivalence=identical)")
    if used := utilization_words(summary["speed"]):
        print_sentence(console, f"  {used}")
    if comparison := efficiency_words(summary, experiment.plan.world_size, folder):
        print_sentence(console, f"  {escape(comparison)}")
    if words := prediction_words(summary):
        print_sentence(console, f"  {words}")
    if noise := summary["noise"]:
        print_sentence(console, f"  {noise_words(noise, experiment.plan.global_batch)}")
    if summary["trained_parameters"] != summary["parameters"]:
        trained, total = summary["trained_parameters"], summary["parameters"]
        print_sentence(console, f"  {trained:,} of {total:,} parameters trained ({100 * trained / total:.2g}%)")
    if summary["diagnosis"] is not None:
        print_sentence(console, f"  [bold]diagnosis:[/] {escape(summary['diagnosis'])}")
    if compiled := summary["compilations"]:
        print_sentence(
            console,
            f"  {compiled['count']} compilations in {compiled['seconds']:.1f} s, "
            f"{compiled['from_cache']} loaded from the cache",
        )
    for note in summary["notes"]:
        print_sentence(console, f"  [bold yellow]note:[/] {escape(note)}")
    for warning in summary["warnings"]:
        print_sentence(console, f"  [bold yellow]warning:[/] {escape(warning)}")
    console.print(f"  saved to {escape(os.path.relpath(folder))}", soft_wrap=True)
