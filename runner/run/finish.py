"""Close a run when its workers have ended: certificate, `summary.json`, tags in the tracking store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from runner.folder.files import write_json
from runner.folder.metrics_log import MetricsLog, MetricsReader
from runner.measure.predicted import prediction_metrics, scored
from runner.plan.certificate import after_stopping, after_training, ended_at, split_at, with_segments
from runner.plan.experiment import Experiment, baseline_of
from runner.plan.levels import NOT_COMPARABLE
from runner.run.summary import FAILED, SweepContext, failure_of, summary_of, write_summary
from runner.speed.figures import speed_metrics, speed_of
from runner.speed.run_numbers import Restarts
from runner.track.description import NOTE_TAG, run_description
from runner.track.tracker import Tracker
from runner.train.result import RunResult


@dataclass(frozen=True)
class RunCloser:
    """Records how a run ended, in its folder, in the tracking store and on the terminal.

    `started_at`: when the run's command started, in seconds since the epoch.
    """

    experiment: Experiment
    folder: Path
    started_at: float
    console: Console
    role: SweepContext
    tracker: Tracker
    restarts: Restarts

    def close(self, status: str, result: RunResult | None, failure: Exception | None) -> dict[str, Any]:
        """Write `summary.json` and return its content. `result`: None if training did not reach its end.

        `failure`: why it failed. Raises RunFailed if the disk does not take the file.
        """
        result = result or _partial_result(self.folder)
        experiment = self._update_certificate(result)
        run_id = self.tracker.wait_until_open(status)
        summary = summary_of(status, experiment, result, self.started_at, run_id, self.role, self.restarts.sentences)
        if failure is not None:
            summary |= failure_of(failure)
        summary |= speed_of(experiment, result, summary["wall_s"], self.folder, self.role.at_once, self.restarts)
        summary["prediction"] = scored(experiment, summary, self.started_at)
        if not _ledger_is_sound(self.folder):
            summary["certificate"] = NOT_COMPARABLE
            _withdraw_certificate(self.folder)
            self.tracker.tag("certificate", NOT_COMPARABLE)
            self.console.print(
                "[bold red]The ledger does not match the plan[/]: see ledger.json; this run is not comparable."
            )
        if summary["notes"]:
            self.tracker.tag("notes", "; ".join(summary["notes"]))
        if result.weights_digest:
            self.tracker.tag("weights.digest", result.weights_digest)
        if result.machine:
            self.tracker.tag("machine", result.machine)
        self._log_speed(summary)
        self.tracker.tag(NOTE_TAG, run_description(experiment, summary))
        write_summary(self.folder, summary)
        return summary

    def _update_certificate(self, result: RunResult) -> Experiment:
        """Add what is known only after the model was built and trained."""
        experiment = self.experiment
        segments = ended_at(experiment.certificate.segments, result.optimizer_steps)
        for smaller in result.smaller_micro_batches:
            segments = split_at(segments, smaller.after_step, smaller.accumulation_steps)
        if segments[-1].accumulation_steps != experiment.plan.accumulation_steps:
            experiment = experiment.with_accumulation_steps(segments[-1].accumulation_steps)
            write_json(self.folder / "plan.json", experiment.plan.as_json())
        certificate = experiment.certificate
        sync = experiment.config.sync.as_chosen(result.sync or {})
        if result.batch_statistics or sync != experiment.config.sync:
            baseline = baseline_of(experiment.setup)
            certificate = after_training(experiment.setup, baseline, result.batch_statistics, sync)
        certificate = with_segments(certificate, segments)
        if result.stopped_early:
            assert result.samples_seen is not None
            certificate = after_stopping(certificate, result.samples_seen)
        if certificate == experiment.certificate:
            return experiment
        write_json(self.folder / "certificate.json", certificate.as_json())
        self.tracker.tag("certificate", certificate.level)
        return dataclasses.replace(experiment, certificate=certificate)

    def _log_speed(self, summary: Mapping[str, Any]) -> None:
        """Log the figures and the diagnosis; print the latter for a run that failed, which gets no report."""
        if metrics := speed_metrics(summary["speed"]) | prediction_metrics(summary):
            log = MetricsLog(self.folder)
            log.write(summary["optimizer_steps"], metrics)
            log.close()
        if summary["diagnosis"] is not None:
            self.tracker.tag("diagnosis", summary["diagnosis"])
            if summary["status"] == FAILED:
                self.console.print(f"[bold]diagnosis:[/] {escape(summary['diagnosis'])}", soft_wrap=True)


def _ledger_is_sound(folder: Path) -> bool:
    """Whether the ledger, as far as it was written, found exactly the planned samples."""
    path = folder / "ledger.json"
    return not path.exists() or bool(json.loads(path.read_text())["sound"])


def _withdraw_certificate(folder: Path) -> None:
    path = folder / "certificate.json"
    reason = "the ledger does not match the plan"
    write_json(path, {**json.loads(path.read_text()), "level": NOT_COMPARABLE, "withdrawn": reason})


def _partial_result(folder: Path) -> RunResult:
    """How far a run got that did not reach its end, from its metrics."""
    seen = [metric for metric in MetricsReader(folder).read() if metric.key == "train/samples_seen"]
    return RunResult(optimizer_steps=seen[-1].step, samples_seen=int(seen[-1].value)) if seen else RunResult()
