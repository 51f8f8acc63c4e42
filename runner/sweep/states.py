"""How far the jobs of a sweep have got, read from their folders: it is the same whichever launcher runs them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.tracking.metrics_log import MetricsReader

FINISHED, FAILED, KILLED, RUNNING = "FINISHED", "FAILED", "KILLED", "RUNNING"
JOB_FILE = "job.json"


@dataclass(frozen=True)
class JobState:
    """One attempt at a job.

    `name`: its overrides; `shown`: those in which it differs from the others. `started_at`: seconds since the epoch.
    `wall_s`, `error`: once it has ended.
    """

    folder: Path
    name: str
    shown: str
    started_at: float
    status: str
    wall_s: float | None = None
    error: str | None = None
    user_error: bool = False

    @property
    def share(self) -> float:
        """How much of its optimizer steps the job has made, from 0 to 1."""
        if self.status != RUNNING:
            return 1.0
        plan = self.folder / "plan.json"
        seen = [metric.step for metric in MetricsReader(self.folder).read() if metric.key == "train/loss"]
        return seen[-1] / max(1, int(json.loads(plan.read_text())["optimizer_steps"])) if seen else 0.0


def note_start(folder: Path, name: str, shown: str, started_at: float) -> None:
    """Say in a job's folder which job it is."""
    draft = folder / f".{JOB_FILE}"
    draft.write_text(json.dumps({"job": name, "shown": shown, "started_at": started_at}))
    draft.rename(folder / JOB_FILE)  # whole, for who looks meanwhile


def rename(folder: Path, name: str) -> None:
    """Let a job be known by the name that the command has for it now: another wording may come to the same settings."""
    noted = json.loads((folder / JOB_FILE).read_text())
    if noted["job"] != name:
        note_start(folder, name, noted["shown"], noted["started_at"])


def attempts(sweep_folder: Path) -> list[JobState]:
    """Every attempt at every job, the oldest first."""
    found = [_read(path.parent) for path in sweep_folder.glob(f"*/{JOB_FILE}")]
    return sorted(found, key=lambda state: state.started_at)


def _read(folder: Path) -> JobState:
    noted = json.loads((folder / JOB_FILE).read_text())
    summary = read_summary(folder)
    return JobState(
        folder=folder,
        name=noted["job"],
        shown=noted["shown"],
        started_at=noted["started_at"],
        status=summary.get("status", RUNNING),
        wall_s=summary.get("wall_s"),
        error=summary.get("error"),
        user_error=bool(summary.get("user_error")),
    )


def read_summary(folder: Path) -> dict[str, Any]:
    """A run's `summary.json`; empty while there is none."""
    path = folder / "summary.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def latest(found: Iterable[JobState], jobs: Sequence[str] | None) -> list[JobState]:
    """Of each job the attempt that finished, or else the last one; of the jobs that are named, if any are."""
    of_job: dict[str, JobState] = {}
    for state in found:
        if (jobs is None or state.name in jobs) and not (
            state.name in of_job and of_job[state.name].status == FINISHED
        ):
            of_job[state.name] = state
    return list(of_job.values())


def finished_run(sweep_folder: Path, setup_digest: str, seed: int) -> Path | None:
    """The folder of a finished job with exactly these settings and data."""
    for state in attempts(sweep_folder):
        if state.status == FINISHED:
            summary = read_summary(state.folder)
            if (summary.get("setup_digest"), summary.get("seed")) == (setup_digest, seed):
                return state.folder
    return None
