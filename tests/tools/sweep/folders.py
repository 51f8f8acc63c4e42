"""Folders as sweeps leave them, without running any job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.folder.metrics_log import MetricsLog
from runner.tools.sweep.sweep import Sweep, write_job


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
        "divides_machine": False,
        "key": None,
        "started_at": 100.0,
    }
    return Sweep(**{**content, **changes})


def job_in(
    sweep: Path, number: str, name: str, started_at: float = 100.0, digest: str | None = None, **summary: Any
) -> Path:
    """A job's folder; without a summary the job is running."""
    folder = sweep / number
    folder.mkdir(parents=True)
    write_job(folder, name, name, started_at, digest)
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def train_to(folder: Path, step: int, of: int) -> None:
    """The job has done `step` of its `of` optimizer steps."""
    (folder / "plan.json").write_text(json.dumps({"optimizer_steps": of}))
    log = MetricsLog(folder)
    log.write(step, {"train/loss": 0.5, "train/lr": 0.1})
    log.write(of, {"eval/loss": 0.5})  # not a training step
    log.close()
