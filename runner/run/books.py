"""Closing a run's books: what is known once its workers have ended."""

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
from runner.plan.certificate import NOT_COMPARABLE, after_stopping, with_batch_statistics
from runner.plan.experiment import Experiment
from runner.run.summary import FAILED, Role, summary_of, write_summary
from runner.speed.speed import speed_metrics, speed_of
from runner.track.tracker import Tracker


@dataclass(frozen=True)
class Books:
    """A run's folder, store and terminal, which are told how it ended. `started_at`: when its command started."""

    experiment: Experiment
    folder: Path
    started_at: float
    console: Console
    role: Role
    tracker: Tracker

    def close(self, status: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Leave `summary.json`, and what the tracker has to know besides; the summary.

        `result`: what training came to; empty if it did not get to its end.
        """
        result = result or _progress(self.folder)
        experiment = self._certified_anew(result)
        run_id = self.tracker.wait_until_open()
        summary = summary_of(status, experiment, result, self.started_at, run_id, self.role)
        summary |= speed_of(experiment, result, summary["wall_s"], self.folder, self.role.at_once)
        if not _ledger_sound(self.folder):
            summary["certificate"] = NOT_COMPARABLE
            _withdraw(self.folder)
            self.tracker.tag("certificate", NOT_COMPARABLE)
            self.console.print("[bold red]The ledger is not sound[/]: see ledger.json; this run is not comparable.")
        if summary["machine"]:
            self.tracker.tag("machine", summary["machine"])
        self._tell_speed(summary)
        write_summary(self.folder, summary)
        return summary

    def _certified_anew(self, result: Mapping[str, Any]) -> Experiment:
        """With what was not known before the model was built, or how long it would be trained."""
        experiment = self.experiment
        certificate = experiment.certificate
        if result.get("batch_statistics"):
            certificate = with_batch_statistics(experiment.setup, experiment.one_worker)
        if result.get("stopped_early"):
            certificate = after_stopping(certificate, result["samples_seen"])
        if certificate == experiment.certificate:
            return experiment
        write_json(self.folder / "certificate.json", certificate.as_json())
        self.tracker.tag("certificate", certificate.level)
        return dataclasses.replace(experiment, certificate=certificate)

    def _tell_speed(self, summary: Mapping[str, Any]) -> None:
        """Log what was found about the speed; of a run that failed say it, since there will be no report."""
        if metrics := speed_metrics(summary["speed"]):
            log = MetricsLog(self.folder)
            log.write(summary["optimizer_steps"], metrics)
            log.close()
        if summary["diagnosis"] is not None:
            self.tracker.tag("diagnosis", summary["diagnosis"])
            if summary["status"] == FAILED:
                self.console.print(f"[bold]diagnosis:[/] {escape(summary['diagnosis'])}", soft_wrap=True)


def _ledger_sound(folder: Path) -> bool:
    """Whether the ledger, as far as it was written, found the planned samples trained on."""
    path = folder / "ledger.json"
    return not path.exists() or bool(json.loads(path.read_text())["sound"])


def _withdraw(folder: Path) -> None:
    """Take the certificate back."""
    path = folder / "certificate.json"
    content = {**json.loads(path.read_text()), "level": NOT_COMPARABLE, "withdrawn": "the ledger is not sound"}
    write_json(path, content)


def _progress(folder: Path) -> dict[str, Any]:
    """How far a run came that did not get to its end, from its metrics."""
    seen = [metric for metric in MetricsReader(folder).read() if metric.key == "train/samples_seen"]
    return {"optimizer_steps": seen[-1].step, "samples_seen": int(seen[-1].value)} if seen else {}
