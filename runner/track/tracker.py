"""The tracker that the parent of a run holds: MLflow, or none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from runner.config.choices import TrackerName
from runner.config.schema import Tracking
from runner.plan.experiment import Experiment
from runner.track.card import RunCard, dataset_of, ending, run_params, run_tags
from runner.track.secrets import masked
from runner.track.store import default_store


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

    def __init__(self, card: RunCard, folder: Path) -> None:
        self._card = card
        self._folder = folder
        self._last_tags: dict[str, str] = {}

    def start(self) -> None:
        pass

    def wait_until_open(self) -> str | None:
        return None

    def tag(self, name: str, value: str) -> None:
        self._last_tags[name] = value

    def finish(self, status: str) -> None:
        self._card.changed(self._folder, **ending(status, self._last_tags))

    def how_to_open(self) -> Sequence[str]:
        return []


def store_of(tracking: Tracking) -> str | None:
    """The tracking URI that runs are logged to; None where they are logged to their folder only."""
    if tracking.kind is TrackerName.none:
        return None
    return tracking.uri or default_store(Path.cwd())


def card_of(experiment: Experiment, tags: Mapping[str, str], parent_key: str | None = None) -> RunCard:
    """A run's card. `tags`: beside those that every run has; `parent_key`: of the sweep that it is a job of."""
    tracking = experiment.config.tracking
    store = store_of(tracking)
    return RunCard(
        experiment=tracking.experiment,
        run_name=tracking.run_name or experiment.setup_name,
        params={name: str(value) for name, value in run_params(experiment).items()},
        tags={**run_tags(experiment), **tags},
        store=None if store is None else masked(store),
        dataset=dataset_of(experiment),
        parent_key=parent_key,
        into_run=os.environ.get("MLFLOW_RUN_ID") if store is not None else None,
        log_model=tracking.log_model,
    )


def build_tracker(tracking: Tracking, card: RunCard, folder: Path) -> Tracker:
    """The tracker of a run; its card is left in the run's folder, from which it can be delivered later, too."""
    card.write(folder)
    store = store_of(tracking)
    if store is None:
        return NoTracker(card, folder)
    from runner.track.mlflow_tracker import MlflowTracker

    return MlflowTracker(card, folder, store)
