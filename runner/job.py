"""One run from its composed configuration to its finished folder, as the parent process sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape

from runner.alive import held
from runner.certificate import NOT_COMPARABLE, after_stopping, with_batch_statistics
from runner.choices import TrackerName
from runner.compose import settings
from runner.errors import UserError, first_line
from runner.experiment import Experiment, prepare
from runner.files import write_json
from runner.launch import WorkerFailed, launch
from runner.placement import threads_per_worker
from runner.plain import to_plain
from runner.plan_tables import certificate_table, plan_tables
from runner.schema import Tracking
from runner.signals import handle_signals, signals_ignored
from runner.speed import efficiency_words, speed_metrics, speed_of
from runner.torchrun import current_world, run_joined
from runner.tracking.metrics_log import MetricsLog, MetricsReader
from runner.tracking.secrets import masked, without_credentials
from runner.tracking.tracker import Tracker, build_tracker, card_of
from runner.watch import Watch
from runner.worker import Job, run_launched

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


@dataclass
class Outcome:
    """What became of a run by itself, since Hydra would print an error of its own about one that is raised."""

    error: Exception | None = None


def run_single(cfg: DictConfig, started_at: float, outcome: Outcome) -> float | None:
    """Run the one job of a command; its objective. `started_at`: when the command started."""
    handle_signals()
    console = Console(highlight=False)
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        experiment = prepare(settings(cfg))
        _announce(experiment, console)
        with held(folder):
            summary, how_to_open = run(experiment, folder, started_at, console, Role())
    except Exception as error:  # noqa: BLE001 - it is raised again where Hydra does not see it
        note_failure(folder, error)
        outcome.error = error
        return None
    console.print("\n".join(how_to_open), soft_wrap=True, markup=False)
    return objective(summary)


def objective(summary: Mapping[str, Any]) -> float | None:
    """What an optimizing sweeper optimises: the recipe's metric at the end of the run."""
    value: float | None = summary["eval"].get(summary["metric"])
    return value


def note_failure(folder: Path, error: Exception) -> None:
    """Say in a run's `summary.json` why it failed; there may be nothing else to say."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {"status": FAILED}
    said = {"error": masked(in_a_line(error)), "user_error": isinstance(error, UserError)}
    write_summary(folder, {**summary, **said})


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Leave `summary.json`, whose status says that the run has ended."""
    write_json(folder / "summary.json", summary)


def in_a_line(error: Exception) -> str:
    """An error's one sentence; a worker's traceback ends with it."""
    return str(error).strip().splitlines()[-1] if isinstance(error, WorkerFailed) else first_line(error)


def run(
    experiment: Experiment, folder: Path, started_at: float, console: Console, role: Role
) -> tuple[dict[str, Any], Sequence[str]]:
    """Train; the content of `summary.json`, and lines that say how to look at the run."""
    config = experiment.config
    _write_plan(experiment, folder)
    threads = threads_per_worker(experiment.placement.local_workers * role.at_once)
    job = Job(
        # Workers need no tracker, and so no address with its credentials.
        config=dataclasses.replace(config, tracking=Tracking(TrackerName.none)),
        plan=experiment.plan,
        facts=experiment.facts,
        folder=folder.resolve(),
        device_type=experiment.placement.device_type,
        local_workers=experiment.placement.local_workers,
        threads=threads,
        started_at=started_at,
    )
    tracker = build_tracker(config.tracking, card_of(experiment, role.tags, role.parent_key), folder)
    status, result = FAILED, {}
    try:
        with Watch(folder, experiment, tracker, console, role.progress):
            result = _train(job, experiment)
        status = FINISHED
    except KeyboardInterrupt:
        status = KILLED
        raise
    except Exception as error:
        tracker.tag("error", masked(in_a_line(error)))
        raise
    finally:
        with signals_ignored():
            try:
                summary = _close_books(status, experiment, result, folder, started_at, console, role, tracker)
            except BaseException:
                tracker.finish(FAILED)  # the store would show it as running for ever
                raise
            tracker.finish(status)
    _report(summary, experiment, folder, console)
    return summary, tracker.how_to_open()


def _close_books(
    status: str,
    experiment: Experiment,
    result: dict[str, Any],
    folder: Path,
    started_at: float,
    console: Console,
    role: Role,
    tracker: Tracker,
) -> dict[str, Any]:
    """Leave `summary.json`, and what the tracker has to know besides; the summary."""
    result = result or _progress(folder)
    experiment = _certified_anew(experiment, result, folder, tracker)
    summary = _summary(status, experiment, result, started_at, tracker.wait_until_open(), role)
    summary |= speed_of(experiment, result, summary["wall_s"], folder, role.at_once)
    if not _ledger_sound(folder):
        summary["certificate"] = NOT_COMPARABLE
        _withdraw(folder)
        tracker.tag("certificate", NOT_COMPARABLE)
        console.print("[bold red]The ledger is not sound[/]: see ledger.json; this run is not comparable.")
    if summary["machine"]:
        tracker.tag("machine", summary["machine"])
    _tell_speed(summary, status, folder, console, tracker)
    write_summary(folder, summary)
    return summary


def _tell_speed(summary: Mapping[str, Any], status: str, folder: Path, console: Console, tracker: Tracker) -> None:
    """Log what was found about the speed; of a run that failed say it, since there will be no report."""
    if metrics := speed_metrics(summary["speed"]):
        log = MetricsLog(folder)
        log.write(summary["optimizer_steps"], metrics)
        log.close()
    if summary["diagnosis"] is not None:
        tracker.tag("diagnosis", summary["diagnosis"])
        if status == FAILED:
            console.print(f"[bold]diagnosis:[/] {escape(summary['diagnosis'])}", soft_wrap=True)


def _train(job: Job, experiment: Experiment) -> dict[str, Any]:
    world = current_world()
    if world is not None:
        return run_joined(world, job.as_json())
    return launch(run_launched, job.as_json(), experiment.placement.workers)


def _ledger_sound(folder: Path) -> bool:
    """Whether the ledger, as far as it was written, found the planned samples trained on."""
    path = folder / "ledger.json"
    return not path.exists() or bool(json.loads(path.read_text())["sound"])


def _certified_anew(experiment: Experiment, result: Mapping[str, Any], folder: Path, tracker: Tracker) -> Experiment:
    """With what was not known before the model was built, or how long it would be trained."""
    certificate = experiment.certificate
    if result.get("batch_statistics"):
        certificate = with_batch_statistics(experiment.setup, experiment.one_worker)
    if result.get("stopped_early"):
        certificate = after_stopping(certificate, result["samples_seen"])
    if certificate == experiment.certificate:
        return experiment
    write_json(folder / "certificate.json", certificate.as_json())
    tracker.tag("certificate", certificate.level)
    return dataclasses.replace(experiment, certificate=certificate)


def _withdraw(folder: Path) -> None:
    """Take the certificate back."""
    path = folder / "certificate.json"
    content = {**json.loads(path.read_text()), "level": NOT_COMPARABLE, "withdrawn": "the ledger is not sound"}
    write_json(path, content)


def _progress(folder: Path) -> dict[str, Any]:
    """How far a run came that did not get to its end, from its metrics."""
    seen = [metric for metric in MetricsReader(folder).read() if metric.key == "train/samples_seen"]
    return {"optimizer_steps": seen[-1].step, "samples_seen": int(seen[-1].value)} if seen else {}


def _write_plan(experiment: Experiment, folder: Path) -> None:
    plain = without_credentials(to_plain(experiment.config))
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    write_json(folder / "plan.json", experiment.plan.as_json())
    write_json(folder / "certificate.json", experiment.certificate.as_json())


def _announce(experiment: Experiment, console: Console) -> None:
    """Say in full what will be run."""
    if banner := experiment.placement.banner():
        console.print(banner)
    for note in experiment.notes:
        console.print(f"[bold yellow]note:[/] {escape(note)}", soft_wrap=True)
    console.print(plan_tables(experiment))
    console.print(certificate_table(experiment.certificate))


def _summary(
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


def _report(summary: Mapping[str, Any], experiment: Experiment, folder: Path, console: Console) -> None:
    metrics = "  ".join(f"{name} [bold]{value:.4g}[/]" for name, value in summary["eval"].items())
    speed = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "too short to time"
    console.print()
    facts = experiment.facts
    over = f"  over {facts.eval_groups:,} {facts.groups}" if facts.eval_groups is not None else ""
    console.print(f"[bold green]finished[/] {escape(experiment.setup_name)}   {metrics}{over}")
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
