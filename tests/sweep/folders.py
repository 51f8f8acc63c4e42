"""Folders of made-up sweeps: jobs that are waiting, running or done, without running any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.folder.metrics_log import MetricsLog
from runner.sweep.states import note_start
from runner.sweep.sweep import Sweep


def sweep_in(folder: Path, **changes: Any) -> Sweep:
    """A sweep of three seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "folder": str(folder),
        "command": ("seed=0,1,2",),
        "varied": ("seed",),
        "jobs": ("seed=0", "seed=1", "seed=2"),
        "total": 3,
        "at_once": 1,
        "in_process": True,
        "key": None,
        "started_at": 100.0,
    }
    return Sweep(**{**content, **changes})


def job_in(sweep: Path, number: str, name: str, started_at: float = 100.0, **summary: Any) -> Path:
    """A job's folder; the job is running as long as nothing is said of its summary."""
    folder = sweep / number
    folder.mkdir(parents=True)
    note_start(folder, name, name, started_at)
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def trains(folder: Path, step: int, of: int) -> None:
    """The job has made so many of its optimizer steps."""
    (folder / "plan.json").write_text(json.dumps({"optimizer_steps": of}))
    log = MetricsLog(folder)
    log.write(step, {"train/loss": 0.5, "train/lr": 0.1})
    log.write(of, {"eval/loss": 0.5})  # which is not how far training is
    log.close()
