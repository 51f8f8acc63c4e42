"""The tracker against a real SQLite store, and against a store that is away for a while."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from runner.config.compose import compose, settings
from runner.folder.metrics_log import MetricsLog
from runner.plan.experiment import Experiment, prepare
from runner.track import mlflow_tracker
from runner.track.card import RunCard, run_params, run_tags
from runner.track.mlflow_tracker import MlflowTracker, how_to_open
from runner.track.tracker import NoTracker, build_tracker, card_of
from tests.replicas import TINY


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlflow_tracker, "_SHIP_EVERY", 0.05)


def experiment(*overrides: str) -> Experiment:
    return prepare(settings(compose([*TINY, "device=cpu", "tracking=mlflow", *overrides])))


def tracker_in(folder: Path, *overrides: str) -> MlflowTracker:
    folder.mkdir(exist_ok=True)
    of = experiment(*overrides)
    tracker = build_tracker(of.config.tracking, card_of(of, {}), folder)
    assert isinstance(tracker, MlflowTracker)
    return tracker


def client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'outputs' / 'mlflow.db'}")


def history(root: Path, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client(root).get_metric_history(run_id, key))


def test_metrics_files_and_status_arrive(tmp_path: Path) -> None:
    """Everything written while the run goes on is in the store when it is closed, and the run's files with it."""
    folder = tmp_path / "run"
    tracker = tracker_in(folder)
    log = MetricsLog(folder)
    tracker.start()
    for step in range(1, 51):
        log.write(step, {"train/loss": 1 / step, "train/lr": 0.1})
        time.sleep(0.005)
    run_id = tracker.wait_until_open()
    assert run_id is not None
    (folder / "summary.json").write_text(json.dumps({"mlflow_run_id": run_id}))
    tracker.finish("FINISHED")
    assert history(tmp_path, run_id, "train/loss") == [(step, 1 / step) for step in range(1, 51)]
    run = client(tmp_path).get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "cpu · fp64 · s0")
    assert {item.path for item in client(tmp_path).list_artifacts(run_id)} == {"metrics.jsonl", "summary.json"}
    page = "\n".join(tracker.how_to_open())
    assert run_id in page
    assert "-m runner.track ui\n" in page  # which shows this folder's store if nothing else is said
    assert "http://127.0.0.1" in page


def test_how_to_look_at_another_store(tmp_path: Path) -> None:
    """A store elsewhere is named with the command, a server has an address of its own; neither shows a password."""
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    command, page = how_to_open(uri, "experiments/1/runs/abc")
    assert f"runner.track ui --tracking-uri '{uri}'" in command
    assert "http://127.0.0.1:5000/#/experiments/1/runs/abc" in page
    (line,) = how_to_open("https://me:word@host/x/", "experiments/1/runs/abc")
    assert "https://***@host/x/#/experiments/1/runs/abc" in line


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_that_ends_badly_says_so(tmp_path: Path, status: str) -> None:
    """The store gets the status that the run ended with, even if it ended before the store was open."""
    tracker = tracker_in(tmp_path / "run")
    tracker.start()
    tracker.finish(status)
    assert tracker.run_id is not None
    assert client(tmp_path).get_run(tracker.run_id).info.status == status


def test_a_store_that_is_away_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While requests fail the run goes on; when they pass again every value is there once, after one warning."""
    folder = tmp_path / "run"
    tracker = tracker_in(folder)
    log = MetricsLog(folder)
    away = threading.Event()
    refused: list[int] = []
    log_batch = MlflowClient.log_batch

    def sometimes(self: MlflowClient, *args: Any, **kwargs: Any) -> Any:
        if away.is_set():
            refused.append(1)
            raise ConnectionError("the server went away")
        return log_batch(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", sometimes)
    tracker.start()
    log.write(1, {"train/loss": 1.0})
    run_id = tracker.wait_until_open()
    assert run_id is not None
    away.set()
    for step in range(2, 12):
        log.write(step, {"train/loss": float(step)})
    while len(refused) < 3:
        time.sleep(0.01)
    away.clear()
    log.write(12, {"train/loss": 12.0})
    tracker.finish("FINISHED")
    assert history(tmp_path, run_id, "train/loss") == [(step, float(step)) for step in range(1, 13)]
    assert client(tmp_path).get_run(run_id).info.status == "FINISHED"
    assert capsys.readouterr().err.count("MLflow takes nothing") == 1


def test_a_store_that_stays_away_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that never opens costs the last shipment's patience and a sentence; the metrics stay in their file."""
    monkeypatch.setattr(mlflow_tracker, "_LAST_SHIPMENT_S", 0.6)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", refuse)
    folder = tmp_path / "run"
    tracker = tracker_in(folder)
    MetricsLog(folder).write(1, {"train/loss": 1.0})
    tracker.start()
    assert tracker.wait_until_open() is None
    tracker.finish("FINISHED")
    assert "metrics.jsonl is complete" in capsys.readouterr().err
    assert tracker.how_to_open() == []


def test_trouble_while_opening_makes_no_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store refuses what follows the making of a run, the next attempt goes on with the same run."""
    log_inputs, refused = MlflowClient.log_inputs, []

    def twice(self: MlflowClient, *args: Any, **kwargs: Any) -> Any:
        if len(refused) < 2:
            refused.append(1)
            raise ConnectionError("database is locked")
        return log_inputs(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_inputs", twice)
    tracker = tracker_in(tmp_path / "run")
    tracker.start()
    tracker.finish("FINISHED")
    store = client(tmp_path)
    (run,) = store.search_runs([e.experiment_id for e in store.search_experiments()])
    assert run.info.status == "FINISHED"
    assert len(refused) == 2


def test_the_environment_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID decide where a run is logged."""
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    elsewhere = MlflowClient(uri)
    run = elsewhere.create_run(elsewhere.create_experiment("mine", artifact_location=(tmp_path / "a").as_uri()))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    tracker = tracker_in(tmp_path / "run")
    tracker.start()
    tracker.finish("FINISHED")
    assert tracker.run_id == run.info.run_id
    assert elsewhere.get_run(run.info.run_id).data.params["recipe"] == "acceptability"
    monkeypatch.delenv("MLFLOW_RUN_ID")
    second = tracker_in(tmp_path / "run2")
    second.start()
    second.finish("FINISHED")
    assert second.run_id is not None
    assert elsewhere.get_run(second.run_id).info.experiment_id == run.info.experiment_id


def test_params_are_few_and_tell_setups_apart() -> None:
    """Two setups differ in the params that were changed and what follows from them, and in nothing else."""
    one, other = (run_params(experiment(*o)) for o in ([], ["device.workers=2", "sync.k=4"]))
    assert len(one) <= 20
    assert {key for key in one if one[key] != other[key]} == {"device", "world_size", "micro_batch", "k"}


def test_tags_say_where_it_ran() -> None:
    """Rehearsal, the device really used, plan digest and certificate are tags."""
    tags = run_tags(experiment("device=tpu8", "device.workers=8"))
    assert tags["device"] == "tpu8"
    assert tags["device.rehearsed"] == "true"
    assert tags["device.executed_on"] == "cpu"
    assert len(tags["plan.digest"]) == 16
    assert tags["certificate"] == "comparable"


def test_no_tracker_leaves_a_card_and_no_store(tmp_path: Path) -> None:
    """`tracking=none` makes no store and has no run id; a card says how the run ended, for a store to come."""
    of = experiment("tracking=none")
    tracker = build_tracker(of.config.tracking, card_of(of, {}), tmp_path)
    assert isinstance(tracker, NoTracker)
    tracker.start()
    assert tracker.wait_until_open() is None
    tracker.tag("certificate", "comparable")
    tracker.finish("FINISHED")
    assert [path.name for path in tmp_path.iterdir()] == ["tracking.json"]
    card = RunCard.read(tmp_path)
    assert (card.store, card.run_id, card.status, card.delivered) == (None, None, "FINISHED", False)
    assert card.last_tags == {"certificate": "comparable"}


def test_a_server_that_hangs_does_not_hide_how_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that never returns: the command ends all the same, and the card says KILLED for a later `sync`."""
    monkeypatch.setattr(mlflow_tracker, "_LAST_SHIPMENT_S", 0.6)
    asked, released = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        asked.set()
        released.wait(60)
        raise ConnectionError("nobody there")

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", hang)
    folder = tmp_path / "run"
    tracker = tracker_in(folder)
    tracker.start()
    assert asked.wait(60)
    try:
        tracker.finish("KILLED")
        assert RunCard.read(folder).status == "KILLED"
    finally:
        released.set()


def test_the_card_knows_what_the_store_has(tmp_path: Path) -> None:
    """After a delivered run the card holds run id, status, end and last tags, and the store the same."""
    tracker = tracker_in(tmp_path / "run")
    tracker.tag("certificate", "not comparable")
    tracker.start()
    tracker.finish("FINISHED")
    card = RunCard.read(tmp_path / "run")
    run = client(tmp_path).get_run(tracker.run_id)
    assert (card.run_id, card.status, card.delivered) == (run.info.run_id, run.info.status, True)
    assert (card.started, card.ended) == (run.info.start_time, run.info.end_time)
    assert run.data.tags["certificate"] == "not comparable"
    assert run.data.tags["runner.key"] == card.key
