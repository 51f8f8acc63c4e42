"""The tracker of one run, held by its parent process: a thread sends `metrics.jsonl` to MLflow while workers train."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runner.config.schema import Tracking
from runner.errors import Terminal
from runner.track.card import RunCard
from runner.track.delivery import Delivery
from runner.track.description import VIEW_KEY, VIEW_TAG
from runner.track.secrets import masked
from runner.track.store import default_store, error_summary, store_of

#: Seconds between two uploads of metrics.
_SEND_EVERY_S = 1.0
#: Seconds that `finish` keeps retrying when the store does not answer: after success, and otherwise.
_FINISH_TIMEOUT_S, _FINISH_TIMEOUT_FAILED_S = 30.0, 5.0
#: Seconds that a run which has ended waits for its run id: after training, and if it was interrupted.
_OPEN_TIMEOUT_S, _OPEN_TIMEOUT_INTERRUPTED_S = 20.0, 1.0


#: A run with one of these should end soon.
_INTERRUPTED = ("KILLED", "PREEMPTED")


class Tracker:
    """Follows one run. Errors of the store never end the run: its folder stays complete and can be uploaded later."""

    def __init__(self, card: RunCard, folder: Path, uri: str | None, *, resumed: bool = False) -> None:
        """`uri`: of the store; None logs to the run's folder only. `resumed`: the store may know the run already."""
        self._delivery = Delivery(card, folder, uri or "", resumed=resumed)
        self._folder = folder
        self._uri = uri
        self._resumed = resumed
        self._last_tags: dict[str, str] = {}
        self._thread = threading.Thread(target=self._send_until_finished, name="mlflow", daemon=True)
        self._opened, self._finishing = threading.Event(), threading.Event()
        self._finish_timeout_s = 0.0
        self._error: Exception | None = None

    @property
    def run_id(self) -> str | None:
        return self._delivery.run_id

    def start(self) -> None:
        """Open the run and start sending metrics, without blocking the caller."""
        if self._uri is not None:
            self._thread.start()

    def _send_until_finished(self) -> None:
        while not self._finishing.wait(0 if self.run_id is None and self._error is None else _SEND_EVERY_S):
            self._attempt(self._send)
        deadline = time.monotonic() + self._finish_timeout_s
        while not self._attempt(self._send) or not self._attempt(self._delivery.close):
            if time.monotonic() > deadline:
                return
            time.sleep(_SEND_EVERY_S)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether `action` succeeded."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - database, network, disk: none of it may end a training
            if self._error is None and not self._finishing.is_set():
                warn(f"MLflow cannot be reached ({error_summary(error)}): the run continues, and keeps metrics.jsonl")
            self._error = error
            return False
        self._error = None
        return True

    def _send(self) -> None:
        if self.run_id is None:
            self._delivery.open()
            if self._resumed:
                self._delivery.mark_running()
            self._opened.set()
        self._delivery.send_metrics()

    def wait_until_open(self, status: str) -> str | None:
        """The run's id as soon as the store has given one; None if the store fails or takes too long.

        `status`: how the run has ended. Nobody waits for the store of one that was interrupted as it began.
        """
        deadline = time.monotonic() + (_OPEN_TIMEOUT_INTERRUPTED_S if status in _INTERRUPTED else _OPEN_TIMEOUT_S)
        while self._uri is not None and self._error is None and time.monotonic() < deadline:
            if self._opened.wait(0.05):
                break
        return self.run_id

    def tag(self, name: str, value: str) -> None:
        """Set a tag when the run is finished."""
        self._last_tags[name] = value

    def finish(self, status: str) -> None:
        """Send the remaining metrics and the run's files, and close it as FINISHED, FAILED, KILLED or PREEMPTED."""
        self._delivery.mark_ended(status, self._last_tags)
        if self._uri is not None:
            self._send_the_end(status)
        if self._delivery.card_error is not None:
            warn(self._delivery.card_error)

    def _send_the_end(self, status: str) -> None:
        self._finish_timeout_s = _FINISH_TIMEOUT_S if status == "FINISHED" else _FINISH_TIMEOUT_FAILED_S
        if self.run_id is None and status in _INTERRUPTED:
            self._finish_timeout_s = _OPEN_TIMEOUT_INTERRUPTED_S / 2
        self._finishing.set()
        # The upload of a model has no time limit; a request that hangs has one.
        self._thread.join(None if self._delivery.card.log_model else 2 * self._finish_timeout_s)
        if self._error is not None or self._thread.is_alive():
            warn(
                f"MLflow did not receive everything ({error_summary(self._error)}); the run's folder has it: "
                f"python -m runner.track sync {self._folder} sends what is missing"
            )

    def how_to_open(self) -> Sequence[str]:
        """Lines that say how to open the run in MLflow."""
        if self._uri is None or self.run_id is None:
            return []
        return how_to_open(self._uri, f"experiments/{self._delivery.experiment_id}/runs/{self.run_id}")


def build_tracker(tracking: Tracking, card: RunCard, folder: Path, *, resumed: bool = False) -> Tracker:
    """The tracker of a run, whose card is written to its folder. `resumed`: the store may know the run already."""
    card.write(folder)
    return Tracker(card, folder, store_of(tracking), resumed=resumed)


def how_to_open(uri: str, page: str) -> Sequence[str]:
    """Lines that say how to open a page of a store: on a server, or with `runner.track ui` on this machine."""
    page = _with_training_menus(page)
    if uri.startswith(("http://", "https://")):
        return [f"  MLflow: {masked(uri).rstrip('/')}/{page}"]
    python = min(os.path.relpath(sys.executable), sys.executable, key=len)
    store = "" if uri == default_store(Path.cwd()) else f" --tracking-uri '{masked(uri)}'"
    return [f"  MLflow: {python} -m runner.track ui{store}", f"  then open http://127.0.0.1:5000/{page}"]


def experiment_page(experiment: Any) -> str:
    """The address of an experiment's table of runs, with our columns if it has them. `experiment`: MLflow's entity."""
    view = f"?viewStateShareKey={VIEW_KEY}" if VIEW_TAG in experiment.tags else ""
    return _with_training_menus(f"experiments/{experiment.experiment_id}/runs{view}")


def _with_training_menus(page: str) -> str:
    """The address of a page. Without `workflowType`, MLflow shows its menus for agents."""
    return f"#/{page}{'&' if '?' in page else '?'}workflowType=machine_learning"


def warn(text: str) -> None:
    """Print a warning on the error stream."""
    Terminal(stderr=True, highlight=False, soft_wrap=True).print(text, style="yellow", markup=False)
