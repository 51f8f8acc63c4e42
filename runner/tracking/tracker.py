"""The tracker that the parent of a run holds: MLflow, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from runner.choices import TrackerName
from runner.experiment import Experiment
from runner.schema import Tracking


class Tracker(Protocol):
    """The life of one run in a tracking store. Only the parent holds one; workers know nothing of it."""

    def start(self) -> None:
        """Open the run and begin to ship metrics, without making the caller wait."""
        ...

    def wait_until_open(self) -> str | None:
        """The run's id, once the store has given one; None if it will not."""
        ...

    def tag(self, name: str, value: str) -> None:
        """Set a tag when the run is closed."""
        ...

    def finish(self, status: str) -> None:
        """Ship what is left, the run's folder with it, and close the run with FINISHED, FAILED or KILLED."""
        ...

    def how_to_open(self) -> Sequence[str]:
        """Lines that say how to look at the run."""
        ...


class NoTracker:
    """Logs nowhere but in the run's folder."""

    def start(self) -> None:
        pass

    def wait_until_open(self) -> str | None:
        return None

    def tag(self, name: str, value: str) -> None:
        pass

    def finish(self, status: str) -> None:
        pass

    def how_to_open(self) -> Sequence[str]:
        return []


def build_tracker(tracking: Tracking, experiment: Experiment, folder: Path) -> Tracker:
    if tracking.kind is TrackerName.none:
        return NoTracker()
    from runner.tracking.mlflow_tracker import MlflowTracker

    return MlflowTracker(tracking, experiment, folder)
