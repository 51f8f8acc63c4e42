"""The tracker that the parent of a run holds: MLflow, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from runner.experiment import Experiment
from runner.schema import TrackerName, Tracking


class Tracker(Protocol):
    """The life of one run in a tracking store. Only the parent holds one; workers know nothing of it."""

    @property
    def run_id(self) -> str | None: ...

    def start(self) -> None:
        """Open the run and begin to ship metrics, without making the caller wait."""
        ...

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Ship what is left and close the run with FINISHED, FAILED or KILLED."""
        ...

    def how_to_open(self) -> Sequence[str]:
        """Lines that say how to look at the run."""
        ...


class NoTracker:
    """Logs nowhere but in the run's folder."""

    run_id = None

    def start(self) -> None:
        pass

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        pass

    def how_to_open(self) -> Sequence[str]:
        return []


def build_tracker(tracking: Tracking, experiment: Experiment, folder: Path) -> Tracker:
    if tracking.kind is TrackerName.none:
        return NoTracker()
    from runner.tracking.mlflow_tracker import MlflowTracker

    return MlflowTracker(tracking, experiment, folder)
