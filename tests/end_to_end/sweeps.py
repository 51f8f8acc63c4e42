"""Sweeps of short jobs, started here or as a command, and what they leave in folder and store."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from mlflow.entities import Run

from runner import cli
from runner.folder.metrics_log import MetricsReader
from runner.track.delivery import stored_key
from tests import processes, runs
from tests.runs import read, store, stored_runs
from tests.tools.sweep.gated import GATED

#: Jobs of three optimizer steps.
QUICK = [*GATED, "epochs=3"]
#: One step of eight rows, for jobs that only have to run.
SHORT = [*GATED, "epochs=1", "tracking=none"]


def sweep(*overrides: str, base: list[str] = QUICK) -> int:
    """A sweep in this process; the exit code."""
    return cli.main(["-m", *base, *overrides], time.time())


def start(root: Path, *overrides: str) -> subprocess.Popen[bytes]:
    return processes.start(root, "-m", "runner", "-m", *QUICK, *overrides)


def only_sweep(root: Path) -> Path:
    return runs.only_folder(root, "sweeps")


def family(root: Path) -> tuple[Run, list[Run]]:
    """The only parent run in the store, and its jobs; there is no other run."""
    found = stored_runs(root)
    (parent,) = (run for run in found if "mlflow.parentRunId" not in run.data.tags)
    jobs = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(jobs) == len(found) - 1
    return parent, jobs


def statuses(root: Path) -> tuple[str, list[str]]:
    parent, jobs = family(root)
    return parent.info.status, sorted(job.info.status for job in jobs)


def attempts(root: Path) -> list[tuple[str, str]]:
    """Each job's folder, and how the attempt in it ended."""
    found = only_sweep(root).glob("*/summary.json")
    return sorted((path.parent.name, read(path.parent, "summary.json")["status"]) for path in found)


def assert_metrics_complete(root: Path, job: Run) -> None:
    """The store has the values of this job's `metrics.jsonl`, each once, and no others."""
    folders = [path.parent for path in only_sweep(root).glob("*/summary.json")]
    (folder,) = (one for one in folders if read(one, "summary.json").get("mlflow_run_id") == job.info.run_id)
    logged = sorted((stored_key(m.key), m.step, m.timestamp, m.value) for m in MetricsReader(folder).read())
    stored = sorted(
        (m.key, m.step, m.timestamp, m.value)
        for key in {metric[0] for metric in logged}
        for m in store(root).get_metric_history(job.info.run_id, key)
    )
    assert stored == logged != []
