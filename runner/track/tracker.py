"""The tracker of one run, held by its parent process: threads send `metrics.jsonl` on while workers train."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from runner.config.schema import Tracking
from runner.log import LOG
from runner.track.card import TrackingRecord
from runner.track.delivery import Delivery
from runner.track.store import check_installed, error_summary, how_to_sync, store_of
from runner.track.tensorboard import TensorBoard
from runner.track.wandb import WeightsAndBiases

#: Seconds between two uploads of metrics.
_SEND_EVERY_S = 1.0
#: Seconds that `finish` keeps retrying when the store does not answer: after success, and otherwise.
_FINISH_TIMEOUT_S, _FINISH_TIMEOUT_FAILED_S = 30.0, 5.0
#: Seconds that a run which has ended waits for its run id: after training, and if it was interrupted.
_OPEN_TIMEOUT_S, _OPEN_TIMEOUT_INTERRUPTED_S = 20.0, 1.0


#: A run with one of these should end soon.
_INTERRUPTED = ("KILLED", "PREEMPTED")


class Destination(Protocol):
    """Where a run is sent to: its card and metrics, from its folder. One thread calls this, and repeats what fails."""

    @property
    def name(self) -> str: ...

    def begin(self) -> None:
        """Open the run, which is training. It may be there already."""

    def send_metrics(self) -> None:
        """Send the metrics that were logged since the last call."""

    def close(self) -> None:
        """Send what the card says about the end of the run."""

    def how_to_open(self) -> Sequence[str]:
        """Lines that say how to open the run."""


#: Destinations other than MLflow, by their setting. They write into the run's folder, from what the folder has.
LOCAL: dict[str, Callable[[Path], Destination]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class _Sender:
    """A thread that sends a run to one destination while workers train. No error of it ends the run."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.opened = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._send_until_finished, name=destination.name, daemon=True)
        self._finishing = threading.Event()
        self._finish_timeout_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def _send_until_finished(self) -> None:
        while not self._finishing.wait(0 if not self.opened.is_set() and self.error is None else _SEND_EVERY_S):
            self._attempt(self._send)
        deadline = time.monotonic() + self._finish_timeout_s
        while not self._attempt(self._send) or not self._attempt(self.destination.close):
            if time.monotonic() > deadline:
                return
            time.sleep(_SEND_EVERY_S)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Call `action` and return whether it succeeded."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - database, network, disk: none of it may end a training
            if self.error is None and not self._finishing.is_set():
                name, reason = self.destination.name, error_summary(error)
                LOG.warning(f"{name} cannot be reached ({reason}): the run continues, and keeps metrics.jsonl")
            self.error = error
            return False
        self.error = None
        return True

    def _send(self) -> None:
        if not self.opened.is_set():
            self.destination.begin()
            self.opened.set()
        self.destination.send_metrics()

    def finish(self, status: str) -> None:
        """Let the thread send the rest and end, soon."""
        self._finish_timeout_s = _FINISH_TIMEOUT_S if status == "FINISHED" else _FINISH_TIMEOUT_FAILED_S
        if not self.opened.is_set() and status in _INTERRUPTED:
            self._finish_timeout_s = _OPEN_TIMEOUT_INTERRUPTED_S / 2
        self._finishing.set()

    def join(self, unlimited: bool = False) -> bool:
        """Wait for the thread; whether everything was sent. A request that hangs has a time limit."""
        self._thread.join(None if unlimited else 2 * self._finish_timeout_s)
        return self.error is None and not self._thread.is_alive()


class Tracker:
    """Follows one run. Errors of a tracker never end the run: its folder stays complete and can be uploaded later."""

    def __init__(self, card: TrackingRecord, folder: Path, uri: str | None, *, resumed: bool = False) -> None:
        """`uri`: of the MLflow store, None for no MLflow; the card says which others there are (`undelivered`).

        `resumed`: the store may know the run already.
        """
        self._uri = uri
        self._delivery = Delivery(card, folder, uri or "", resumed=resumed)
        self._folder = folder
        self._mlflow = _Sender(self._delivery) if uri is not None else None
        self._local = {name: _Sender(LOCAL[name](folder)) for name in card.undelivered}
        self._last_tags: dict[str, str] = {}

    @property
    def _senders(self) -> list[_Sender]:
        return [*([self._mlflow] if self._mlflow is not None else []), *self._local.values()]

    @property
    def run_id(self) -> str | None:
        """MLflow's."""
        return self._delivery.run_id

    def start(self) -> None:
        """Open the run and start sending metrics, without blocking the caller."""
        for sender in self._senders:
            sender.start()

    def wait_until_open(self, status: str) -> str | None:
        """The run's id as soon as the store has given one; None if the store fails or takes too long.

        `status`: how the run has ended. Nobody waits for the store of one that was interrupted as it began.
        """
        deadline = time.monotonic() + (_OPEN_TIMEOUT_INTERRUPTED_S if status in _INTERRUPTED else _OPEN_TIMEOUT_S)
        while self._mlflow is not None and self._mlflow.error is None and time.monotonic() < deadline:
            if self._mlflow.opened.wait(0.05):
                break
        return self.run_id

    def tag(self, name: str, value: str) -> None:
        """Set a tag when the run is finished."""
        self._last_tags[name] = value

    def finish(self, status: str) -> None:
        """Send the remaining metrics and the run's files, and close it as FINISHED, FAILED, KILLED or PREEMPTED."""
        self._delivery.mark_ended(status, self._last_tags)
        upload = self._delivery.card.log_model  # of a model, which has no time limit
        if upload and (self._folder / "model").is_dir():
            LOG.info("sending the model to MLflow")
        for sender in self._senders:
            sender.finish(status)
        failed = [one for one in self._senders if not one.join(unlimited=upload and one is self._mlflow)]
        for sender in failed:
            LOG.warning(
                f"{sender.destination.name} did not receive everything ({error_summary(sender.error)}); "
                f"the run's folder has it: {how_to_sync(self._folder, self._uri)} sends what is missing"
            )
        if self._local:
            missing = [name for name, sender in self._local.items() if sender in failed]
            self._delivery.update_card(undelivered=missing)
        if self._delivery.card_error is not None:
            LOG.warning(self._delivery.card_error)

    def how_to_open(self) -> Sequence[str]:
        """Lines that say how to open the run in its trackers."""
        return [line for sender in self._senders for line in sender.destination.how_to_open()]


def deliver_locally(folder: Path, status: str | None = None) -> list[str]:
    """Send the run in `folder`, if it has ended, to trackers besides MLflow that do not have all of it; their names.

    `status`: how the run ended if its process was killed and could not record it. Raises UserError.
    """
    card = TrackingRecord.read(folder)
    if card.status is None and status is not None:
        card = card.mark_ended(folder, status)
    if card.status is None:
        return []
    check_installed(card.undelivered)
    destinations = [LOCAL[name](folder) for name in card.undelivered]
    for destination in destinations:
        destination.begin()
        destination.send_metrics()
        destination.close()
    if destinations:
        card.update(folder, undelivered=[])
    return [destination.name for destination in destinations]


def how_to_open_jobs(tracking: Tracking, folder: Path) -> Sequence[str]:
    """Lines that say how to open the jobs of the sweep in `folder` in the trackers besides MLflow."""
    return [line for name in tracking.local for line in LOCAL[name](folder / "*").how_to_open()]


def build_tracker(tracking: Tracking, card: TrackingRecord, folder: Path, *, resumed: bool = False) -> Tracker:
    """The tracker of a run, whose card is written to its folder. `resumed`: the store may know the run already."""
    card = dataclasses.replace(card, undelivered=tracking.local)
    card.write(folder)
    return Tracker(card, folder, store_of(tracking), resumed=resumed)
