"""The tracker of a run against a real SQLite store, and against one that fails."""

from __future__ import annotations

import re
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from runner.config.schema import Tracking
from runner.folder.metrics_log import MetricsLog
from runner.track import tracker as module
from runner.track.card import TrackingRecord
from runner.track.store import how_to_open
from runner.track.tracker import Tracker, build_tracker
from tests.tools.sweep.stores import empty_store

TRACKING = Tracking(mlflow=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_SEND_EVERY_S", 0.02)
    empty_store(tmp_path / "outputs" / "mlflow.db")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For stores that never answer; one that does may take longer than this on a busy machine."""
    monkeypatch.setattr(module, "_FINISH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "_FINISH_TIMEOUT_FAILED_S", 0.3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{tmp_path / 'outputs' / 'mlflow.db'}")


def tracker_in(folder: Path, tracking: Tracking = TRACKING) -> Tracker:
    dataset = {"name": "cola", "digest": "d", "source": "", "profile": "{}"}
    card = TrackingRecord("mine", "a run", {"seed": "0"}, {"device": "cpu"}, None, dataset)
    return build_tracker(tracking, card, folder)


def history(store: MlflowClient, run_id: str | None) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in store.get_metric_history(run_id, "train/loss"))


def test_metrics_files_and_status_arrive(folder: Path, store: MlflowClient) -> None:
    """And the card says so."""
    tracker = tracker_in(folder)
    log = MetricsLog(folder)
    tracker.start()
    for step in range(1, 51):
        log.write(step, {"train/loss": 1 / step})
        time.sleep(0.002)
    run_id = tracker.wait_until_open("FINISHED")
    tracker.tag("certificate", "not comparable")
    tracker.finish("FINISHED")
    assert history(store, run_id) == [(step, 1 / step) for step in range(1, 51)]
    run = store.get_run(run_id)
    assert [item.path for item in store.list_artifacts(run_id)] == ["metrics.jsonl"]
    card = TrackingRecord.read(folder)
    assert (card.run_id, card.status, card.delivered) == (run_id, "FINISHED", True)
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert (run.info.start_time, run.info.end_time) == (card.started, card.ended)
    assert (run.data.tags["certificate"], run.data.tags["runner.key"]) == ("not comparable", card.key)
    assert run_id in "\n".join(tracker.how_to_open())


def test_how_to_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is of this Python, and names a store that it would not open itself; no password is shown.

    A server has its own pages.
    """
    command, _ = how_to_open(f"sqlite:///{tmp_path}/outputs/mlflow.db", "experiments/1/runs/abc")
    assert command.endswith("-m runner.track ui")
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    command, page = how_to_open(uri, "experiments/1/runs/abc")
    assert shlex.split(command)[-3:] == ["ui", "--tracking-uri", uri]
    assert "http://127.0.0.1:5000/#/experiments/1/runs/abc" in page
    (line,) = how_to_open("https://me:word@host/x/", "experiments/1/runs/abc")
    assert "https://***@host/x/#/experiments/1/runs/abc" in line
    secret = "postgresql+psycopg2://me:word@db/x"
    command, _ = how_to_open(secret, "experiments/1/runs/abc")
    assert "MLFLOW_TRACKING_URI" in command  # a masked address opens nothing
    assert not {"--tracking-uri", "word"} & set(re.split(r"[ :@]", command))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", secret)
    command, _ = how_to_open(secret, "experiments/1/runs/abc")
    assert command.endswith("-m runner.track ui")  # which reads the variable, too
    command, _ = how_to_open(f"sqlite:///{tmp_path}/outputs/mlflow.db", "experiments/1/runs/abc")
    assert "--tracking-uri" in command
    (tmp_path / "my env").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env" / "python"))
    monkeypatch.chdir(tmp_path / "my env")
    python = shlex.split(how_to_open(secret, "")[0])[1]
    assert Path(python) == tmp_path / "my env" / "python"  # a single word, and not what PATH has


@pytest.mark.parametrize("method", ["log_inputs", "log_batch"])
def test_a_store_that_fails_for_a_while(
    folder: Path, store: MlflowClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    """While the run is opened: there is one run with every value once, after one warning."""
    original, refused = getattr(MlflowClient, method), []

    def call(self: MlflowClient, *args: Any, **kwargs: Any) -> Any:
        if len(refused) < 3:
            refused.append(method)
            raise ConnectionError("the server is down")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, method, call)
    tracker = tracker_in(folder)
    MetricsLog(folder).write(1, {"train/loss": 1.0})
    tracker.start()
    while len(refused) < 3:
        time.sleep(0.01)
    tracker.finish("FINISHED")
    (run,) = store.search_runs([e.experiment_id for e in store.search_experiments()])
    assert run.info.status == "FINISHED"
    assert history(store, run.info.run_id) == [(1, 1.0)]
    assert capsys.readouterr().err.count("MLflow cannot be reached") == 1


@pytest.mark.usefixtures("impatient")
def test_a_store_that_stays_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`finish` gives up after its timeout, and says how to upload the run later."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", refuse)
    tracker = tracker_in(folder)
    tracker.start()
    assert tracker.wait_until_open("FINISHED") is None
    tracker.finish("FINISHED")
    assert f"runner.track sync {folder}" in capsys.readouterr().err
    assert tracker.how_to_open() == []
    assert (TrackingRecord.read(folder).status, TrackingRecord.read(folder).delivered) == ("FINISHED", False)


@pytest.mark.usefixtures("impatient")
def test_a_method_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`finish` returns all the same, and the card has the status for a later upload."""
    asked, released = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        asked.set()
        released.wait(60)
        raise ConnectionError("connection refused")

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", hang)
    tracker = tracker_in(folder)
    tracker.start()
    assert asked.wait(60)
    try:
        tracker.finish("KILLED")
        assert TrackingRecord.read(folder).status == "KILLED"
    finally:
        released.set()


def test_tracking_none_writes_only_the_card(folder: Path, store: MlflowClient) -> None:
    tracker = tracker_in(folder, Tracking())
    tracker.start()
    assert tracker.wait_until_open("FINISHED") is None
    tracker.tag("certificate", "comparable")
    tracker.finish("FINISHED")
    assert tracker.how_to_open() == []
    assert [path.name for path in folder.iterdir()] == ["tracking.json"]
    card = TrackingRecord.read(folder)
    assert (card.run_id, card.status, card.delivered) == (None, "FINISHED", False)
    assert card.last_tags == {"certificate": "comparable"}
    assert [experiment.name for experiment in store.search_experiments()] == ["Default"]
