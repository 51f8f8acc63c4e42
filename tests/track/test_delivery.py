"""Exactly-once delivery to a real SQLite store: requests whose response was lost, and runs that were resumed."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from runner.errors import UserError
from runner.folder.metrics_log import MetricsLog, cut_metrics
from runner.track.card import TrackingRecord
from runner.track.delivery import Delivery, deliver
from tests.tools.sweep.stores import empty_store


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return empty_store(tmp_path / "store" / "mlflow.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def card(**changes: Any) -> TrackingRecord:
    return dataclasses.replace(TrackingRecord("mine", "a run", {"seed": "0"}, {"device": "cpu"}, None), **changes)


def runs(uri: str) -> list[Any]:
    client = MlflowClient(uri)
    return client.search_runs([e.experiment_id for e in client.search_experiments()], order_by=["start_time"])


def history(uri: str, run_id: str | None, key: str = "train/loss") -> list[tuple[int, float]]:
    found = MlflowClient(uri).get_metric_history(run_id, key)
    return sorted((metric.step, metric.value) for metric in found)


def lose_response(monkeypatch: pytest.MonkeyPatch, name: str, when: Callable[[], bool] = lambda: True) -> list[Any]:
    """The store processes this call of the client, but one response is lost; the metrics of all calls."""
    original = getattr(MlflowClient, name)
    sent: list[tuple[str, int, int]] = []
    lost: list[str] = []

    def call(self: MlflowClient, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        sent.extend((m.key, m.step, m.timestamp) for m in kwargs.get("metrics", []))
        if not lost and when():
            lost.append(name)
            raise ConnectionError("the response was lost")
        return result

    monkeypatch.setattr(MlflowClient, name, call)
    return sent


def test_a_run_is_found_by_its_key(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store created the run and the response was lost: the next attempt continues with the same run."""
    lose_response(monkeypatch, "create_run")
    delivery = Delivery(card(started=1_000), folder, uri)
    with pytest.raises(ConnectionError):
        delivery.open()
    assert delivery.run_id is None
    delivery.open()
    (run,) = runs(uri)
    assert run.info.run_id == delivery.run_id == TrackingRecord.read(folder).run_id
    assert (run.info.run_name, run.info.start_time, run.info.status) == ("a run", 1_000, "RUNNING")
    assert run.data.params == {"seed": "0"}
    assert run.data.tags["device"] == "cpu"
    Delivery(card(), folder, uri, resumed=True).open()  # an equal card with another key is another run
    assert len(runs(uri)) == 2


def test_another_process_continues(uri: str, folder: Path) -> None:
    """It sends the missing metrics only; a step that a resumed run comes to again keeps its first value."""
    line = '{{"key": "train/loss", "value": 0.5, "step": {}, "timestamp": {}}}\n'
    (folder / "metrics.jsonl").write_text(line.format(3, 1000))
    first = Delivery(card(), folder, uri)
    first.open()
    first.send_metrics()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line.format(3, 1001) + line.format(4, 1001))
    second = Delivery(TrackingRecord.read(folder), folder, uri, resumed=True)
    second.open()
    second.send_metrics()
    assert second.run_id == first.run_id
    assert history(uri, second.run_id) == [(3, 0.5), (4, 0.5)]


def test_no_metric_is_sent_twice(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response to the second of three requests is lost; NaN and infinity are among the values."""
    log = MetricsLog(folder)
    for step in range(1250):
        loss = {600: math.nan, 700: math.inf, 800: -math.inf}.get(step, step / 7)
        log.write(step, {"train/loss": loss, "train/lr": 0.5})
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    sent = lose_response(monkeypatch, "log_batch", when=lambda: len(sent) == 2000)
    with pytest.raises(ConnectionError):
        delivery.send_metrics()
    log.write(1250, {"train/loss": 0.25, "train/lr": 0.5})
    delivery.send_metrics()
    delivery.send_metrics()
    assert len(sent) == len(set(sent)) == 2502
    stored = dict(history(uri, delivery.run_id))
    assert len(stored) == 1251
    assert math.isnan(stored[600])
    assert stored[700] > 1e300
    assert stored[800] < -1e300
    assert all(stored[step] == step / 7 for step in range(1250) if step not in (600, 700, 800))


def test_the_store_is_asked_only_after_a_failure(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_metric_history` is slow; a refused request is repeated as it is."""
    asked: list[str] = []
    get = MlflowClient.get_metric_history

    def record(self: MlflowClient, run_id: str, key: str) -> Any:
        asked.append(key)
        return get(self, run_id, key)

    monkeypatch.setattr(MlflowClient, "get_metric_history", record)
    log = MetricsLog(folder)
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    log.write(0, {"train/loss": 1.0})
    delivery.send_metrics()
    assert asked == []
    log.write(1, {"train/loss": 1.0})
    with monkeypatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> None:
            raise ConnectionError("connection refused")

        patch.setattr(MlflowClient, "log_batch", refuse)
        with pytest.raises(ConnectionError):
            delivery.send_metrics()
    delivery.send_metrics()
    log.write(2, {"train/loss": 1.0})
    delivery.send_metrics()
    assert asked == ["train/loss"]
    assert history(uri, delivery.run_id) == [(0, 1.0), (1, 1.0), (2, 1.0)]


def test_a_job_finds_its_sweep_in_any_store(tmp_path: Path) -> None:
    """The parent is found by its key; a job whose parent is uploaded later gets it when it is uploaded again."""
    parent_card = card(run_name="sweep")
    child_card = card(run_name="job", parent_key=parent_card.key)
    for name in ("parent", "child"):
        (tmp_path / name).mkdir()
    for store in ("one", "other"):
        uri = empty_store(tmp_path / store / "x.db")
        child = Delivery(child_card, tmp_path / "child", uri, resumed=True)
        child.open()
        assert "mlflow.parentRunId" not in MlflowClient(uri).get_run(child.run_id).data.tags
        parent = Delivery(parent_card, tmp_path / "parent", uri)
        parent.open()
        again = Delivery(child_card, tmp_path / "child", uri, resumed=True)
        again.open()
        assert again.run_id == child.run_id
        assert MlflowClient(uri).get_run(child.run_id).data.tags["mlflow.parentRunId"] == parent.run_id


def test_into_an_existing_run(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_RUN_ID: no run or experiment is created; an unknown id is an error.

    Later the run's own card is enough, but not one that anybody may have written.
    """
    client = MlflowClient(uri)
    existing = client.create_run(client.create_experiment("theirs", artifact_location=folder.parent.as_uri()))
    MetricsLog(folder).write(1, {"train/loss": 1.0})
    monkeypatch.setenv("MLFLOW_RUN_ID", existing.info.run_id)
    card(into_run=existing.info.run_id, store=uri).mark_ended(folder, "FINISHED")
    deliver(folder, uri)
    monkeypatch.delenv("MLFLOW_RUN_ID")
    deliver(folder, uri)
    (run,) = runs(uri)
    assert (run.info.run_id, run.info.status) == (existing.info.run_id, "FINISHED")
    assert (run.data.params, run.data.metrics) == ({"seed": "0"}, {"train/loss": 1.0})
    assert client.get_experiment_by_name("mine") is None
    with pytest.raises(MlflowException):
        Delivery(card(into_run="0" * 32, store=uri), folder, uri).open()
    card(into_run=existing.info.run_id, store=uri, key="another").mark_ended(folder, "FAILED")
    deliver(folder, uri)
    assert sorted(one.info.status for one in runs(uri)) == ["FAILED", "FINISHED"]


def test_another_store_has_no_such_run(uri: str, folder: Path) -> None:
    """A run that was logged into an existing run of the first store is created in the second one."""
    card(into_run="0" * 32, store="sqlite:///first.db").mark_ended(folder, "FINISHED")
    deliver(folder, uri)
    assert [run.info.run_name for run in runs(uri)] == ["a run"]


def test_a_name_given_in_mlflow_stays(uri: str, folder: Path) -> None:
    """Also when the run is resumed, by the second command of a process whose environment was restored."""
    first = Delivery(card(), folder, uri)
    first.begin()
    MlflowClient(uri).update_run(first.run_id, status="FAILED", name="mine")
    del os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]
    Delivery(first.card, folder, uri, resumed=True).begin()
    (run,) = runs(uri)
    assert (run.info.run_name, run.info.status) == ("mine", "RUNNING")
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"


@pytest.mark.parametrize("log_model", [False, True])
def test_close(uri: str, tmp_path: Path, folder: Path, log_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files except the card and hidden ones, next to the store; final tags, status, end; the model on request.

    The card says `delivered` only when everything is in the store, and has the status before that.
    """
    for name in ("summary.json", "config.yaml", ".summary.json", ".lock"):
        (folder / name).write_text("{}")
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("w")
    delivery = Delivery(card(log_model=log_model), folder, uri)
    delivery.open()
    delivery.mark_ended("KILLED", {"device": "tpu"})
    lose_response(monkeypatch, "set_terminated")
    with pytest.raises(ConnectionError):
        delivery.close()
    before = TrackingRecord.read(folder)
    assert (before.status, before.last_tags, before.delivered) == ("KILLED", {"device": "tpu"}, False)
    delivery.close()
    assert TrackingRecord.read(folder) == dataclasses.replace(before, delivered=True)
    (run,) = runs(uri)
    assert (run.info.status, run.info.end_time, run.data.tags["device"]) == ("KILLED", before.ended, "tpu")
    files = {path.name for path in tmp_path.glob("store/mlartifacts/*/artifacts/*")}
    assert files == {"summary.json", "config.yaml", *(["model"] if log_model else [])}


def test_names_tell_setups_apart(uri: str, folder: Path) -> None:
    """Another setup of the same name gets a part of its digest; another seed or the same run again does not."""
    for key, digest in (("a", "1234aaaa"), ("b", "1234aaaa"), ("c", "5678bbbb"), ("c", "5678bbbb")):
        delivery = Delivery(card(key=key, tags={"setup.digest": digest}), folder, uri, resumed=True)
        delivery.open()
    assert [run.info.run_name for run in runs(uri)] == ["a run", "a run", "a run · 5678"]
    Delivery(card(run_name="it's", tags={"setup.digest": "1"}), folder, uri).open()


def test_a_description_that_somebody_edited_stays(uri: str, folder: Path) -> None:
    note = "mlflow.note.content"
    delivery = Delivery(card(tags={note: "plan"}), folder, uri)
    delivery.open()
    delivery.mark_ended("FINISHED", {note: "result"})
    delivery.close()
    client = MlflowClient(uri)
    assert client.get_run(delivery.run_id).data.tags[note] == "result"
    deliver(folder, uri)
    assert client.get_run(delivery.run_id).data.tags[note] == "result"
    client.set_tag(delivery.run_id, note, "mine")
    deliver(folder, uri)
    assert client.get_run(delivery.run_id).data.tags[note] == "mine"


def test_quality_and_throughput_come_first(uri: str, folder: Path) -> None:
    """MLflow sorts charts by the part of the name before the last slash. Nothing is sent twice under such a name."""
    metrics = {"comm/bytes": 1.0, "eval/accuracy": 2.0, "step/data_s": 3.0, "train/loss": 4.0}
    MetricsLog(folder).write(1, metrics)
    for _ in range(2):
        delivery = Delivery(card(key="same"), folder, uri, resumed=True)
        delivery.open()
        delivery.send_metrics()
    (run,) = runs(uri)
    sections = sorted({name.rpartition("/")[0] for name in run.data.metrics})
    assert sections == ["eval", "train", "train/comm", "train/step"]
    assert history(uri, run.info.run_id, "train/comm/bytes") == [(1, 1.0)]


def test_a_deleted_experiment_is_refused(folder: Path, uri: str) -> None:
    client = MlflowClient(uri)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(UserError, match="'gone' was deleted"):
        Delivery(card(experiment="gone"), folder, uri).open()


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_that_lost_a_worker_sends_nothing_twice(uri: str, folder: Path, step: int) -> None:
    """It logs the steps after the checkpoint again; before that it has logged nothing, even after the start of all."""
    log = MetricsLog(folder)
    for number in range(1, 5):
        log.write(number, {"train/loss": float(number)})
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    delivery.send_metrics()
    log.close()
    cut_metrics(folder, step)
    delivery.send_metrics()
    log = MetricsLog(folder)
    for number in range(step + 1, 7):
        log.write(number, {"train/loss": number + 0.5 * (number > 4)})
        delivery.send_metrics()
    log.close()
    expected = [(number, float(number)) for number in range(1, 5)] + [(5, 5.5), (6, 6.5)]
    assert history(uri, delivery.run_id) == expected
