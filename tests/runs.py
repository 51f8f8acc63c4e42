"""Runs by `runner.cli.main` in the process of the test, and what they leave in their folder and in MLflow."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from runner import cli
from tests.replicas import TINY

#: The tiny recipe in fp32: ten optimizer steps of 24 samples. `TRACKED` logs to MLflow, `QUICK` to the folder only.
TRACKED = [override for override in TINY if not override.startswith(("tracking", "precision"))]
QUICK = [*TRACKED, "tracking=none"]


def run(*overrides: str, base: list[str] = QUICK) -> int:
    """Run the tiny recipe in the current folder; the exit code."""
    return cli.main([*base, *overrides], time.time())


def only_folder(root: Path, recipe: str = "acceptability") -> Path:
    """The folder of the only run of this recipe, or of the only sweep, that was started in `root`."""
    (folder,) = (root / "outputs" / recipe).iterdir()
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def summary_of(*overrides: str, code: int = 0, base: list[str] = QUICK) -> dict[str, Any]:
    """Run in a new folder `outputs/run-<number>` below the current one; the content of its `summary.json`."""
    folder = Path("outputs") / f"run-{len(list(Path.cwd().glob('outputs/run-*')))}"
    assert run(f"hydra.run.dir={folder}", *overrides, base=base) == code
    summary: dict[str, Any] = read(folder, "summary.json")
    return summary


def store(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'outputs' / 'mlflow.db'}")


def stored_runs(root: Path) -> list[Run]:
    """All runs in the MLflow store of `root`, by start time."""
    client = store(root)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiments, order_by=["start_time"]))


def statuses(root: Path) -> list[str]:
    return sorted(found.info.status for found in stored_runs(root))
