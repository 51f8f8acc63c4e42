"""How far the jobs of a sweep have got, read from their folders: it is the same whichever launcher runs them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.folder.files import write_json
from runner.folder.metrics_log import MetricsReader

FINISHED, FAILED, KILLED, RUNNING = "FINISHED", "FAILED", "KILLED", "RUNNING"
JOB_FILE = "job.json"


@dataclass(frozen=True)
class JobState:
    """One attempt at a job.

    `names`: its overrides, in each wording that it was asked for; `shown`: those in which it differs from the others.
    `started_at`: seconds since the epoch. `wall_s`, `error`: once it has ended.
    """

    folder: Path
    names: tuple[str, ...]
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
    _note(folder, {"names": [name], "shown": shown, "started_at": started_at})


def also_known_as(folder: Path, name: str) -> None:
    """Note another name of a job: another wording may come to the same settings."""
    noted = json.loads((folder / JOB_FILE).read_text())
    if name not in noted["names"]:
        _note(folder, {**noted, "names": [*noted["names"], name]})


def _note(folder: Path, content: dict[str, Any]) -> None:
    write_json(folder / JOB_FILE, content)


def attempts(sweep_folder: Path) -> list[JobState]:
    """Every attempt at every job, the oldest first; none is what has an unreadable note, since it says nothing."""
    found = (_read(path.parent) for path in sweep_folder.rglob(JOB_FILE))
    return sorted((state for state in found if state is not None), key=lambda state: state.started_at)


def _read(folder: Path) -> JobState | None:
    noted = _content(folder / JOB_FILE)
    if not noted:
        return None
    summary = read_summary(folder)
    return JobState(
        folder=folder,
        names=tuple(noted["names"]),
        shown=noted["shown"],
        started_at=noted["started_at"],
        status=summary.get("status", RUNNING),
        wall_s=summary.get("wall_s"),
        error=summary.get("error"),
        user_error=bool(summary.get("user_error")),
    )


def read_summary(folder: Path) -> dict[str, Any]:
    """A run's `summary.json`; empty while there is none, or if a machine died before all of it was on the disk."""
    return _content(folder / "summary.json")


def _content(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content


def latest(found: Iterable[JobState], jobs: Sequence[str] | None) -> list[JobState]:
    """Of each job the attempt that finished, or else the last one; of the jobs that are named, if any are."""
    of_job: dict[str, JobState] = {}
    for state in found:
        for name in state.names if jobs is None else [name for name in state.names if name in jobs]:
            if name not in of_job or of_job[name].status != FINISHED:
                of_job[name] = state
    return list(of_job.values())


def finished_run(sweep_folder: Path, setup_digest: str, seed: int) -> Path | None:
    """The folder of a finished job with exactly these settings and data."""
    for state in attempts(sweep_folder):
        if state.status == FINISHED:
            summary = read_summary(state.folder)
            if (summary.get("setup_digest"), summary.get("seed")) == (setup_digest, seed):
                return state.folder
    return None
