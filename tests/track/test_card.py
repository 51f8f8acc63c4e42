"""A run's card: written whole, read back, refused when it is none."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from runner.config.compose import compose, settings
from runner.errors import UserError
from runner.plan.experiment import prepare
from runner.track import card as module
from runner.track.card import FILE_NAME, RunCard, dataset_of, ending, user_tags
from runner.track.tracker import card_of
from tests.replicas import TINY

FULL = RunCard(
    experiment="runner",
    run_name="cpu4 · k=4 · s0",
    params={"k": "4", "note": 'a "quoted" ü\n'},
    tags={"sweep.id": "x"},
    store="sqlite:////tmp/x.db",
    dataset={"name": "cola", "digest": "abc"},
    parent_key="the sweep",
    into_run="123",
    log_model=True,
    ended=1_800_000_000_123,
    status="KILLED",
    last_tags={"error": "out of memory"},
    run_id="456",
    delivered=True,
)


@pytest.mark.parametrize("card", [FULL, RunCard("e", "r", {}, {}, None)], ids=["full", "bare"])
def test_round_trip(tmp_path: Path, card: RunCard) -> None:
    """Everything on a card comes back as it was, and there is no other file."""
    card.write(tmp_path)
    assert RunCard.read(tmp_path) == card
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME] == ["tracking.json"]


def test_every_card_has_a_key_of_its_own() -> None:
    """Two runs that are equal in everything are two runs; a card's key and start stay through its changes."""
    before = time.time() * 1000
    one, other = (RunCard("e", "r", {}, {}, None) for _ in range(2))
    assert one.key != other.key
    assert before - 1 <= one.started <= time.time() * 1000
    assert dataclasses.replace(one, status="FINISHED").key == one.key


def test_a_change_is_in_the_folder(tmp_path: Path) -> None:
    """A changed card is the one in the folder; what was not changed, and the card before, stay as they were."""
    card = RunCard("e", "r", {"a": "1"}, {}, None)
    card.write(tmp_path)
    changed = card.changed(tmp_path, **ending("FAILED", {"error": "x"}))
    assert RunCard.read(tmp_path) == changed
    assert (changed.status, changed.last_tags, changed.key, changed.params) == (
        "FAILED",
        {"error": "x"},
        card.key,
        {"a": "1"},
    )
    assert card.status is None
    assert changed.ended is not None
    assert card.started <= changed.ended <= time.time() * 1000


def test_a_card_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while it writes leaves the card before: the new one appears by a rename."""
    FULL.write(tmp_path)

    def half(descriptor: int) -> None:
        os.ftruncate(descriptor, 20)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", half)
    with pytest.raises(KeyboardInterrupt):
        FULL.changed(tmp_path, status="FINISHED")
    monkeypatch.undo()
    assert RunCard.read(tmp_path) == FULL
    assert FULL.changed(tmp_path, status="FINISHED") == RunCard.read(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"{}",
        b'{"experiment": "e"}',
        json.dumps({**dataclasses.asdict(FULL), "colour": "red"}).encode(),
        b"\x00\x01",
        b"\xff\xfe\x00",
        None,
    ],
)
def test_a_file_that_holds_no_card(tmp_path: Path, content: bytes | None) -> None:
    """Whatever somebody has left there, or no file at all: one sentence that names the file."""
    if content is not None:
        (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(UserError, match=r"tracking\.json") as caught:
        RunCard.read(tmp_path)
    assert "\n" not in str(caught.value)


def card(*overrides: str, parent_key: str | None = None) -> RunCard:
    experiment = prepare(settings(compose([*TINY, "device=cpu", "tracking=mlflow", *overrides])))
    return card_of(experiment, {"sweep.id": "mine"}, parent_key)


def test_the_card_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Params are text; tags are the run's and those given; the store is said without its password."""
    monkeypatch.chdir(tmp_path)
    found = card("tracking.uri=http://me:word@host", "tracking.log_model=true", parent_key="of the sweep")
    assert all(isinstance(value, str) for value in found.params.values())
    assert (found.params["recipe"], found.params["seed"]) == ("acceptability", "0")
    assert (found.tags["sweep.id"], found.tags["setup"], found.tags["device"]) == ("mine", "cpu · fp64 · s0", "cpu")
    assert found.store == "http://***@host"
    assert (found.parent_key, found.log_model, found.run_name) == ("of the sweep", True, "cpu · fp64 · s0")
    assert card().store == f"sqlite:///{tmp_path}/outputs/mlflow.db"
    assert card("tracking.run_name=mine").run_name == "mine"


def test_a_run_that_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_RUN_ID is on the card, unless nothing is logged to a store."""
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    assert card().into_run == "abc"
    without = card("tracking=none")
    assert (without.into_run, without.store) == (None, None)
    monkeypatch.delenv("MLFLOW_RUN_ID")
    assert card().into_run is None


def test_the_data_are_named_without_secrets() -> None:
    """The data set has a digest that MLflow's column holds, and its size."""
    experiment = prepare(settings(compose([*TINY, "device=cpu"])))
    named = dataset_of(experiment)
    assert (named["name"], len(named["digest"])) == ("acceptability", 16)
    assert json.loads(named["profile"]) == {"train_samples": 100, "eval_samples": 30}


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that knows no user, and outside a repository, a run has the other tags."""

    def nobody() -> str:
        raise KeyError("uid not found: 1234")

    monkeypatch.setattr(module.getpass, "getuser", nobody)
    monkeypatch.setattr(module, "git_commit", lambda: None)
    assert user_tags() == {"mlflow.source.name": "python -m runner", "mlflow.source.type": "LOCAL"}
    monkeypatch.setattr(module.getpass, "getuser", lambda: "me")
    monkeypatch.setattr(module, "git_commit", lambda: "c0ffee")
    tags = user_tags()
    assert (tags["mlflow.user"], tags["mlflow.source.git.commit"]) == ("me", "c0ffee")
