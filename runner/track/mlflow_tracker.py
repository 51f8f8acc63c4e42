"""A run in MLflow: opened, fed and closed by a thread of the parent."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from runner.track.card import RunCard
from runner.track.delivery import Delivery
from runner.track.secrets import masked
from runner.track.store import default_store

#: Seconds between two shipments, and for the last one when a store has stopped answering.
_SHIP_EVERY, _LAST_SHIPMENT_S = 1.0, 30.0
#: Seconds that a run which is over already waits for its store to open.
_OPEN_WITHIN_S = 20.0


class MlflowTracker:
    """Ships `metrics.jsonl`; whatever the store does, the file stays complete and the run goes on."""

    def __init__(self, card: RunCard, folder: Path, uri: str) -> None:
        self._delivery = Delivery(card, folder, uri)
        self._folder = folder
        self._uri = uri
        self._last_tags: dict[str, str] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="mlflow", daemon=True)
        self._trouble: Exception | None = None
        self._patience = _LAST_SHIPMENT_S
        self._opened = threading.Event()

    @property
    def run_id(self) -> str | None:
        return self._delivery.run_id

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.wait(0 if self.run_id is None and self._trouble is None else _SHIP_EVERY):
            self._attempt(self._ship)
        deadline = time.monotonic() + self._patience
        while not self._attempt(self._ship) or not self._attempt(self._delivery.close):
            if time.monotonic() > deadline:
                return
            time.sleep(_SHIP_EVERY)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do `action`; a store in trouble is remembered and tried again, never fatal."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - database, network, disk: none of it may end a training
            if self._trouble is None and not self._ending.is_set():
                say(f"MLflow takes nothing ({short(error)}); the run goes on and metrics wait in metrics.jsonl")
            self._trouble = error
            return False
        self._trouble = None
        return True

    def _ship(self) -> None:
        if self.run_id is None:
            self._delivery.open()
            self._opened.set()
        self._delivery.ship()

    def wait_until_open(self) -> str | None:
        deadline = time.monotonic() + _OPEN_WITHIN_S
        while self._trouble is None and time.monotonic() < deadline:
            if self._opened.wait(0.05):
                break
        return self.run_id

    def tag(self, name: str, value: str) -> None:
        self._last_tags[name] = value

    def finish(self, status: str) -> None:
        self._patience = _LAST_SHIPMENT_S if status == "FINISHED" else _LAST_SHIPMENT_S / 6
        self._delivery.settle(status, self._last_tags)
        self._ending.set()
        # A model that was asked for is waited for, however large; everything else has a limit.
        self._thread.join(None if self._delivery.card.log_model else 2 * self._patience)
        if self._trouble is not None or self._thread.is_alive():
            say(
                f"MLflow has not taken everything ({short(self._trouble)}); metrics.jsonl is complete, and "
                f"python -m runner.track sync {self._folder} brings what is missing"
            )

    def how_to_open(self) -> Sequence[str]:
        if self.run_id is None:
            return []
        return how_to_open(self._uri, f"experiments/{self._delivery.experiment_id}/runs/{self.run_id}")


def how_to_open(uri: str, page: str) -> Sequence[str]:
    """Lines that say how to see a page of a store: of a server, or of `runner.track ui` on this machine."""
    page = f"#/{page}{'&' if '?' in page else '?'}workflowType=machine_learning"  # MLflow's menus for training
    if uri.startswith(("http://", "https://")):
        return [f"  MLflow: {masked(uri).rstrip('/')}/{page}"]
    python = os.path.relpath(sys.executable)
    store = "" if uri == default_store(Path.cwd()) else f" --tracking-uri '{masked(uri)}'"
    return [
        f"  MLflow: {python if len(python) < len(sys.executable) else sys.executable} -m runner.track ui{store}",
        f"  then open http://127.0.0.1:5000/{page}",
    ]


def say(text: str) -> None:
    """Warn on the error stream; nothing has failed."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="yellow", markup=False)


def short(error: Exception | None) -> str:
    """What went wrong with a store, in a line without credentials."""
    return masked(str(error).strip().splitlines()[0])[:200] if error and str(error).strip() else "no answer"
