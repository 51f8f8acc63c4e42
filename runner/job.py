"""One run from its composed configuration to its finished folder, as the parent process sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape

from runner.certificate import NOT_COMPARABLE, after_stopping
from runner.choices import TrackerName
from runner.compose import settings
from runner.errors import UserError, first_line
from runner.experiment import Experiment, prepare
from runner.launch import WorkerFailed, launch
from runner.plain import to_plain
from runner.plan_tables import certificate_table, plan_tables
from runner.schema import Tracking
from runner.torchrun import current_world, run_joined
from runner.tracking.metrics_log import MetricsReader
from runner.tracking.secrets import masked, without_credentials
from runner.tracking.tracker import build_tracker
from runner.watch import Watch
from runner.worker import Job, run_launched

FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"


@dataclass
class Sweep:
    """What the jobs of one command came to; a single run is a sweep of one. `started_at`: of the command."""

    started_at: float
    finished: int = 0
    failures: list[tuple[str, Exception]] = field(default_factory=list)
    how_to_open: Sequence[str] = ()

    def report(self) -> int:
        """Say which jobs failed, if any; the exit code of the command."""
        total = self.finished + len(self.failures)
        if total > 1 and self.how_to_open:
            print(*self.how_to_open, sep="\n")
        if not self.failures:
            return 0
        if total > 1:
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            console.print(f"[bold]{self.finished} of {total} jobs finished[/]; failed:")
            for name, error in self.failures:
                console.print(f"  {escape(name)}: {escape(_in_a_line(error))}")
        return 2 if all(isinstance(error, UserError) for _, error in self.failures) else 1


def _in_a_line(error: Exception) -> str:
    # A worker's traceback ends with the sentence that matters.
    return str(error).strip().splitlines()[-1] if isinstance(error, WorkerFailed) else first_line(error)


def run_job(cfg: DictConfig, sweep: Sweep) -> float | None:
    """Run one job; its objective. An error is printed here and kept in `sweep`; in a sweep Hydra is told as well."""
    _set_handler(signal.SIGINT, signal.default_int_handler)
    _set_handler(signal.SIGTERM, _terminated)
    hydra = HydraConfig.get()
    is_sweep = hydra.mode == RunMode.MULTIRUN
    name = f"job {hydra.job.num} ({masked(hydra.job.override_dirname)})" if is_sweep else "run"
    console = Console(highlight=False)
    if is_sweep:
        console.rule(escape(name))
    started_at = time.time() if sweep.finished or sweep.failures else sweep.started_at
    folder = Path(hydra.runtime.output_dir)
    try:
        experiment = prepare(settings(cfg))
        _announce(experiment, console, in_full=not is_sweep)
        summary = _run(experiment, folder, started_at, console, sweep if is_sweep else None)
    except Exception as error:
        sweep.failures.append((name, error))
        if not (folder / "summary.json").exists():  # it failed before there was anything else to say
            (folder / "summary.json").write_text(json.dumps({"status": FAILED, "error": _in_a_line(error)}, indent=1))
        if isinstance(error, (UserError, WorkerFailed)):
            Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")
        else:
            traceback.print_exception(error)
        if is_sweep:
            raise
        return None
    sweep.finished += 1
    objective: float | None = summary["eval"].get(experiment.config.evaluation.metric)
    return objective


def _run(
    experiment: Experiment, folder: Path, started_at: float, console: Console, sweep: Sweep | None
) -> dict[str, Any]:
    """Train; `sweep`: the sweep that this is a job of, which then says how to look at its runs."""
    config = experiment.config
    _write_plan(experiment, folder)
    job = Job(
        # Workers need no tracker, and so no address with its credentials.
        config=dataclasses.replace(config, tracking=Tracking(TrackerName.none)),
        plan=experiment.plan,
        facts=experiment.facts,
        folder=folder.resolve(),
        device_type=experiment.placement.device_type,
        local_workers=experiment.placement.local_workers,
        threads=experiment.placement.threads_per_worker,
        started_at=started_at,
    )
    tracker = build_tracker(config.tracking, experiment, folder)
    status, result = FAILED, {}
    try:
        with Watch(folder, experiment, tracker, console):
            result = _train(job, experiment)
        status = FINISHED
    except KeyboardInterrupt:
        status = KILLED
        raise
    finally:
        # The books are closed once, whatever is pressed meanwhile; torchrun passes every signal on a second time, too.
        handlers = {number: _set_handler(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        result = result or _progress(folder)
        if result.get("stopped_early"):
            experiment = _certified_anew(experiment, result["samples_seen"], folder)
            tracker.tag("certificate", experiment.certificate.level)
        summary = _summary(status, experiment, result, started_at, tracker.wait_until_open())
        if not _ledger_sound(folder):
            summary["certificate"] = NOT_COMPARABLE
            _withdraw(folder)
            tracker.tag("certificate", NOT_COMPARABLE)
            console.print("[bold red]The ledger is not sound[/]: see ledger.json; this run is not comparable.")
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
        tracker.finish(status)
        for number, handler in handlers.items():
            _set_handler(number, handler)
    _report(summary, experiment, folder, console)
    if sweep is not None:
        sweep.how_to_open = tracker.how_to_open()
    else:
        console.print("\n".join(tracker.how_to_open()), soft_wrap=True, markup=False)
    return summary


def _set_handler(number: signal.Signals, handler: Any) -> Any:
    """Set a signal's handler where Python allows it, in the main thread; the one before."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(number, handler)
    return None


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt  # what ends a run from outside is treated like Ctrl-C: KILLED, with its books closed


def _train(job: Job, experiment: Experiment) -> dict[str, Any]:
    world = current_world()
    if world is not None:
        return run_joined(world, job.as_json())
    return launch(run_launched, job.as_json(), experiment.placement.workers)


def _ledger_sound(folder: Path) -> bool:
    """Whether the ledger, as far as it was written, found the planned samples trained on."""
    path = folder / "ledger.json"
    return not path.exists() or bool(json.loads(path.read_text())["sound"])


def _certified_anew(experiment: Experiment, samples_seen: int, folder: Path) -> Experiment:
    """Of a run that stopped early, the certificate says what it really saw."""
    certificate = after_stopping(experiment.certificate, samples_seen)
    (folder / "certificate.json").write_text(json.dumps(certificate.as_json(), indent=1))
    return dataclasses.replace(experiment, certificate=certificate)


def _withdraw(folder: Path) -> None:
    """Take the certificate back."""
    path = folder / "certificate.json"
    content = {**json.loads(path.read_text()), "level": NOT_COMPARABLE, "withdrawn": "the ledger is not sound"}
    path.write_text(json.dumps(content, indent=1))


def _progress(folder: Path) -> dict[str, Any]:
    """How far a run came that did not get to its end, from its metrics."""
    seen = [metric for metric in MetricsReader(folder).read() if metric.key == "train/samples_seen"]
    return {"optimizer_steps": seen[-1].step, "samples_seen": int(seen[-1].value)} if seen else {}


def _write_plan(experiment: Experiment, folder: Path) -> None:
    plain = without_credentials(to_plain(experiment.config))
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    (folder / "plan.json").write_text(json.dumps(experiment.plan.as_json(), indent=1))
    (folder / "certificate.json").write_text(json.dumps(experiment.certificate.as_json(), indent=1))


def _announce(experiment: Experiment, console: Console, in_full: bool) -> None:
    """Say what will be run: with all tables, or in a line where many jobs follow each other."""
    if banner := experiment.placement.banner():
        console.print(banner)
    if in_full:
        console.print(plan_tables(experiment))
        console.print(certificate_table(experiment.certificate))
        return
    plan = experiment.plan
    console.print(
        f"{escape(experiment.setup_name)}: global batch {plan.global_batch}, learning rate {plan.lr:.4g}, "
        f"{plan.optimizer_steps:,} optimizer steps; {experiment.certificate.level} to one fp32 worker",
        soft_wrap=True,
    )


def _summary(
    status: str, experiment: Experiment, result: Mapping[str, Any], started_at: float, mlflow_run_id: str | None
) -> dict[str, Any]:
    """The content of `summary.json`; what training did not get to is null."""
    numbers = (
        "optimizer_steps",
        "samples_seen",
        "samples_per_s",
        "first_step_s",
        "synchronisations",
        "comm_bytes",
        "comm_s",
        "compilations",
        "train_loss",
        "stopped_early",
        "best",
    )
    return {
        "status": status,
        "setup": experiment.setup_name,
        "rehearsed": experiment.placement.rehearsed,
        "wall_s": time.time() - started_at,
        **{name: result.get(name) for name in numbers},
        "eval": result.get("eval", {}),
        "warnings": result.get("warnings", []),
        "certificate": experiment.certificate.level,
        "mlflow_run_id": mlflow_run_id,
    }


def _report(summary: Mapping[str, Any], experiment: Experiment, folder: Path, console: Console) -> None:
    metrics = "  ".join(f"{name} [bold]{value:.4g}[/]" for name, value in summary["eval"].items())
    speed = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "too short to time"
    console.print()
    console.print(f"[bold green]finished[/] {escape(experiment.setup_name)}   {metrics}")
    console.print(
        f"  {summary['optimizer_steps']:,} optimizer steps, {summary['samples_seen']:,} samples, {speed}, "
        f"{summary['wall_s']:.1f} s in all, first step after {summary['first_step_s']:.1f} s",
        soft_wrap=True,
    )
    if compiled := summary["compilations"]:
        console.print(
            f"  {compiled['count']} compilations in {compiled['seconds']:.1f} s, "
            f"{compiled['from_cache']} more found in the cache",
            soft_wrap=True,
        )
    for warning in summary["warnings"]:
        console.print(f"  [bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    console.print(f"  in {escape(os.path.relpath(folder))}", soft_wrap=True)
