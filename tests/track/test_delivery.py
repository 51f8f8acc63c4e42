"""One run's way into a store: what arrived without an answer is found, and sent once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from runner.errors import UserError
from runner.folder.metrics_log import MetricsLog
from runner.track.card import RunCard, ending
from runner.track.delivery import Delivery
from tests.sweep.stores import empty_store


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return empty_store(tmp_path / "store" / "mlflow.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def card(**changes: Any) -> RunCard:
    return dataclasses.replace(RunCard("mine", "a run", {"seed": "0"}, {"device": "cpu"}, None), **changes)


def runs(uri: str) -> list[Any]:
    client = MlflowClient(uri)
    return client.search_runs([e.experiment_id for e in client.search_experiments()], order_by=["start_time"])


def history(uri: str, run_id: str | None, key: str = "train/loss") -> list[tuple[int, float]]:
    found = MlflowClient(uri).get_metric_history(run_id, key)
    return sorted((metric.step, metric.value) for metric in found)


def losing(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1, when: Callable[..., bool] | None = None) -> Any:
    """Let this call of the client be made, and its answer be lost; the arguments of all calls."""
    original = getattr(MlflowClient, name)
    calls: list[dict[str, Any]] = []
    left = [times]

    def lost(self: MlflowClient, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        calls.append(kwargs)
        if left[0] and (when is None or when(**kwargs)):
            left[0] -= 1
            raise ConnectionError("the answer was lost")
        return result

    monkeypatch.setattr(MlflowClient, name, lost)
    return calls


def test_a_run_is_found_by_its_key(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store made the run and could not say so: the next attempt goes on with it, with all that is on the card."""
    losing(monkeypatch, "create_run")
    delivery = Delivery(card(started=1_000), folder, uri)
    with pytest.raises(ConnectionError):
        delivery.open()
    assert delivery.run_id is None
    delivery.open()
    (run,) = runs(uri)
    assert run.info.run_id == delivery.run_id == RunCard.read(folder).run_id
    assert (run.info.run_name, run.info.start_time, run.info.status) == ("a run", 1_000, "RUNNING")
    assert run.data.params == {"seed": "0"}
    assert run.data.tags["device"] == "cpu"


def test_equal_cards_are_two_runs(uri: str, tmp_path: Path) -> None:
    """Another run of the same name with the same settings is not taken for this one."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Delivery(card(), tmp_path / name, uri, resumed=True).open()
    assert len(runs(uri)) == 2


def test_another_process_goes_on(uri: str, folder: Path) -> None:
    """`resumed`: the run is looked for before one is made, and of its metrics only the missing ones are sent."""
    log = MetricsLog(folder)
    log.write(1, {"train/loss": 1.0})
    first = Delivery(card(), folder, uri)
    first.open()
    first.ship()
    log.write(2, {"train/loss": 2.0})
    second = Delivery(RunCard.read(folder), folder, uri, resumed=True)
    second.open()
    second.ship()
    assert second.run_id == first.run_id
    assert history(uri, second.run_id) == [(1, 1.0), (2, 2.0)]


def sent(calls: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(m.key, m.step, m.timestamp) for call in calls for m in call.get("metrics", [])]


def test_what_arrived_is_not_sent_again(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,500 values the second thousand arrived unheard, NaN and infinity among them: each value is sent once."""
    log = MetricsLog(folder)
    for step in range(1250):
        loss = {600: math.nan, 700: math.inf, 800: -math.inf}.get(step, step / 7)
        log.write(step, {"train/loss": loss, "train/lr": 0.5})
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    calls = losing(monkeypatch, "log_batch", when=lambda **_: len(sent(calls)) == 2000)
    with pytest.raises(ConnectionError):
        delivery.ship()
    log.write(1250, {"train/loss": 0.25, "train/lr": 0.5})
    delivery.ship()
    delivery.ship()
    assert len(sent(calls)) == len(set(sent(calls))) == 2502
    stored = dict(history(uri, delivery.run_id))
    assert len(stored) == 1251
    assert math.isnan(stored[600])
    assert stored[700] > 1e300
    assert stored[800] < -1e300
    assert all(stored[step] == step / 7 for step in range(1250) if step not in (600, 700, 800))


def test_what_did_not_arrive_is_sent_again(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refused a batch, however often, gets it when it takes it."""
    MetricsLog(folder).write(1, {"train/loss": 1.0, "train/lr": 0.5})
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    with monkeypatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> None:
            raise ConnectionError("nobody there")

        patch.setattr(MlflowClient, "log_batch", refuse)
        for _ in range(3):
            with pytest.raises(ConnectionError):
                delivery.ship()
    delivery.ship()
    assert history(uri, delivery.run_id) == [(1, 1.0)]
    assert history(uri, delivery.run_id, "train/lr") == [(1, 0.5)]


def test_the_store_is_asked_only_in_doubt(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the history of every metric is slow: a run in which nothing went wrong never does."""
    asked: list[str] = []
    get = MlflowClient.get_metric_history

    def noted(self: MlflowClient, run_id: str, key: str) -> Any:
        asked.append(key)
        return get(self, run_id, key)

    monkeypatch.setattr(MlflowClient, "get_metric_history", noted)
    log = MetricsLog(folder)
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    for step in range(3):
        log.write(step, {"train/loss": 1.0})
        delivery.ship()
    assert asked == []
    losing(monkeypatch, "log_batch")
    log.write(3, {"train/loss": 1.0})
    with pytest.raises(ConnectionError):
        delivery.ship()
    delivery.ship()
    assert asked == ["train/loss"]
    log.write(4, {"train/loss": 1.0})
    delivery.ship()
    assert asked == ["train/loss"]  # once in doubt, not for ever
    assert [step for step, _ in history(uri, delivery.run_id)] == [0, 1, 2, 3, 4]


def test_equal_values_at_one_step_are_told_apart_by_their_time(uri: str, folder: Path) -> None:
    """A step that is logged twice, as an evaluation may be, keeps both values."""
    lines = '{{"key": "eval/loss", "value": 0.5, "step": 3, "timestamp": {}}}\n'
    for stamp in (1000, 1001):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines.format(stamp))
        delivery = Delivery(card(key="same"), folder, uri, resumed=True)
        delivery.open()
        delivery.ship()
    assert history(uri, delivery.run_id, "eval/loss") == [(3, 0.5), (3, 0.5)]


def test_a_job_finds_its_sweep_in_any_store(tmp_path: Path) -> None:
    """The parent is found by its key, whatever its id is there; where there is none the job stands by itself."""
    parent_card, child_card = card(run_name="sweep"), card(run_name="job")
    child_card = dataclasses.replace(child_card, parent_key=parent_card.key)
    ids = set()
    for name in ("one", "other"):
        uri = empty_store(tmp_path / name / "x.db")
        for of in ("parent", "child"):
            (tmp_path / name / of).mkdir(parents=True)
        parent = Delivery(parent_card, tmp_path / name / "parent", uri)
        parent.open()
        child = Delivery(child_card, tmp_path / name / "child", uri)
        child.open()
        tags = MlflowClient(uri).get_run(child.run_id).data.tags
        assert tags["mlflow.parentRunId"] == parent.run_id
        ids.add(parent.run_id)
    assert len(ids) == 2
    (tmp_path / "alone").mkdir()
    uri = empty_store(tmp_path / "alone" / "x.db")
    alone = Delivery(child_card, tmp_path / "alone", uri)
    alone.open()
    assert "mlflow.parentRunId" not in MlflowClient(uri).get_run(alone.run_id).data.tags
    # And if the sweep follows, its job is told.
    (tmp_path / "late").mkdir()
    late = Delivery(parent_card, tmp_path / "late", uri)
    late.open()
    again = Delivery(child_card, tmp_path / "alone", uri, resumed=True)
    again.open()
    assert MlflowClient(uri).get_run(again.run_id).data.tags["mlflow.parentRunId"] == late.run_id


def test_into_a_run_that_was_there(uri: str, folder: Path) -> None:
    """MLFLOW_RUN_ID: nothing is made, params and metrics go into that run; one that is not there is no run."""
    client = MlflowClient(uri)
    there = client.create_run(client.create_experiment("theirs", artifact_location=folder.parent.as_uri()))
    MetricsLog(folder).write(1, {"train/loss": 1.0})
    delivery = Delivery(card(into_run=there.info.run_id), folder, uri)
    delivery.open()
    delivery.ship()
    delivery.settle("FINISHED", {})
    delivery.close()
    (run,) = runs(uri)
    assert (run.info.run_id, run.info.status, run.data.params) == (there.info.run_id, "FINISHED", {"seed": "0"})
    assert delivery.experiment_id == there.info.experiment_id
    assert client.get_experiment_by_name("mine") is None
    missing = Delivery(card(into_run="0" * 32), folder, uri)
    with pytest.raises(MlflowException):
        missing.open()


def test_what_closing_brings(uri: str, folder: Path) -> None:
    """Files of the folder but the card and drafts, last tags, status and the run's own end; the model on request."""
    for name in ("summary.json", "config.yaml", ".summary.json", ".lock"):
        (folder / name).write_text(name)
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("w")
    for log_model in (False, True):
        delivery = Delivery(card(log_model=log_model, **ending("KILLED", {"device": "tpu"}), key="k"), folder, uri)
        delivery.card = dataclasses.replace(delivery.card, ended=2_000)
        delivery._may_exist = log_model  # the second time it is the same run
        delivery.open()
        delivery.close()
        client = MlflowClient(uri)
        (run,) = runs(uri)
        files = {item.path for item in client.list_artifacts(run.info.run_id)}
        assert files == {"summary.json", "config.yaml", *(["model"] if log_model else [])}
        assert (run.info.status, run.info.end_time, run.data.tags["device"]) == ("KILLED", 2_000, "tpu")
        assert RunCard.read(folder).delivered is True


def test_a_delivery_that_fails_halfway_is_not_delivered(
    uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card says delivered when everything is there, and not before; how the run ended it says at once."""
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    (folder / "summary.json").write_text("{}")
    losing(monkeypatch, "set_terminated")
    delivery.settle("FINISHED", {"certificate": "equivalent"})
    with pytest.raises(ConnectionError):
        delivery.close()
    left = RunCard.read(folder)
    assert (left.status, left.last_tags, left.delivered) == ("FINISHED", {"certificate": "equivalent"}, False)
    delivery.close()
    assert RunCard.read(folder) == dataclasses.replace(left, delivered=True)


def test_a_run_that_goes_on(uri: str, folder: Path) -> None:
    """A sweep's run that has ended is RUNNING again, in store and card; one that has not is left alone."""
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    delivery.reopen()
    assert runs(uri)[0].info.status == "RUNNING"
    delivery.settle("FAILED", {"error": "x"})
    delivery.close()
    again = Delivery(RunCard.read(folder), folder, uri, resumed=True)
    again.open()
    again.reopen()
    (run,) = runs(uri)
    assert (run.info.run_id, run.info.status) == (delivery.run_id, "RUNNING")
    left = RunCard.read(folder)
    assert (left.status, left.ended, left.delivered) == (None, None, False)


def test_a_store_in_a_folder_that_is_not_there(tmp_path: Path, folder: Path) -> None:
    """The database's folder is made, and artifacts go beside the database, not below the current folder."""
    store = tmp_path / "not" / "there"
    uri = f"sqlite:///{store / 'mlflow.db'}"
    (folder / "summary.json").write_text("{}")
    delivery = Delivery(card(), folder, uri)
    delivery.open()
    delivery.settle("FINISHED", {})
    delivery.close()
    assert [path.name for path in store.glob("mlartifacts/*/artifacts/*")] == ["summary.json"]


def test_a_deleted_experiment_is_refused(folder: Path, uri: str) -> None:
    """MLflow makes no run in it: said in a sentence that names it, with the mend."""
    client = MlflowClient(uri)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(UserError, match=r"^the experiment 'gone' was deleted: restore it"):
        Delivery(card(experiment="gone"), folder, uri).open()
