"""`tracking.json`: written atomically, read back, refused when invalid; and what it says about a run."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path

import pytest

from runner.config.compose import compose, settings
from runner.errors import UserError
from runner.plan.experiment import Experiment, prepare
from runner.track import card as module
from runner.track.card import FILE_NAME, TrackingRecord, card_of, run_params, user_tags
from tests.replicas import TINY

FULL = TrackingRecord(
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
KEYS = (
    *("experiment", "run_name", "params", "tags", "store", "dataset", "dataset_context", "parent_key", "into_run"),
    *("log_model", "key", "started", "ended", "status", "last_tags", "run_id", "delivered", "undelivered"),
)


def test_round_trip(tmp_path: Path) -> None:
    """All values are restored, under the documented keys."""
    FULL.write(tmp_path)
    assert TrackingRecord.read(tmp_path) == FULL
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME] == ["tracking.json"]
    assert tuple(json.loads((tmp_path / FILE_NAME).read_text())) == KEYS


def test_an_update_is_written(tmp_path: Path) -> None:
    """The key stays; two cards with equal values have different keys."""
    card = TrackingRecord("e", "r", {"a": "1"}, {}, None)
    assert TrackingRecord("e", "r", {"a": "1"}, {}, None).key != card.key
    ended = card.mark_ended(tmp_path, "FAILED", {"error": "x"})
    assert TrackingRecord.read(tmp_path) == ended
    assert (ended.status, ended.last_tags, ended.key, ended.params) == ("FAILED", {"error": "x"}, card.key, {"a": "1"})
    assert ended.ended is not None
    assert time.time() * 1000 - 60_000 < card.started <= ended.ended <= time.time() * 1000


def test_an_interrupted_write_leaves_the_old_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FULL.write(tmp_path)

    def interrupt(descriptor: int) -> None:
        os.ftruncate(descriptor, 20)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        FULL.update(tmp_path, status="FINISHED")
    assert TrackingRecord.read(tmp_path) == FULL


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"experiment": "e"}', b"\xff\xfe\x00"])
def test_an_invalid_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(UserError, match=r"tracking\.json"):
        TrackingRecord.read(tmp_path)


@functools.lru_cache
def experiment(*overrides: str) -> Experiment:
    return prepare(settings(compose([*TINY, "device=cpu", "tracking=mlflow", *overrides])))


def test_the_card_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Params are strings; tags are the run's and those given; the store is named without its password."""
    monkeypatch.chdir(tmp_path)
    of = experiment("tracking.uri=http://me:word@host", "tracking.log_model=true", "tracking.run_name=mine")
    card = card_of(of, {"sweep.id": "s"}, "key of the sweep")
    assert all(isinstance(value, str) for value in card.params.values())
    assert (card.params["recipe"], card.params["seed"]) == ("acceptability", "0")
    assert (card.tags["sweep.id"], card.tags["setup"], card.tags["device"]) == ("s", "cpu · fp64 · s0", "cpu")
    assert (card.store, card.parent_key, card.log_model) == ("http://***@host", "key of the sweep", True)
    assert card.run_name == "mine"
    assert card.dataset is not None
    assert (card.dataset["name"], len(card.dataset["digest"])) == ("acceptability", 16)
    assert json.loads(card.dataset["profile"]) == {"train_samples": 100, "eval_samples": 30}
    configs = {name: experiment(f"max_steps={name}").config for name in (2, 9999)}
    typed = {name: prepare(config, typed=(f"max_steps={name}",)) for name, config in configs.items()}
    assert [card_of(one, {}).run_name.endswith(f"max_steps={name}") for name, one in typed.items()] == [True, False]
    default = card_of(experiment(), {})
    assert (default.store, default.run_name) == (
        f"sqlite:///{tmp_path}/outputs/mlflow.db",
        "cpu · fp64 · s0 · acceptability",
    )


def test_mlflow_run_id_is_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the run is not tracked."""
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    assert card_of(experiment(), {}).into_run == "abc"
    untracked = card_of(experiment("tracking=none"), {})
    assert (untracked.into_run, untracked.store) == (None, None)


def test_params_are_few_and_tell_setups_apart() -> None:
    one, other = (run_params(experiment("batch.global_batch=48", *o)) for o in ([], ["device.workers=2", "sync.k=4"]))
    assert len(one) <= 30
    assert "base_lr" not in one  # it equals `lr`
    assert {key for key in one if one[key] != other[key]} == {"device", "world_size", "micro_batch", "k"}


LINEAR = ("scaling=linear", "scaling.reference_batch=24")


def test_params_are_as_typed() -> None:
    """Numbers without rounding errors; data files by name, with what else distinguishes runs."""
    card = card_of(experiment("optimizer.lr=5e-5", "batch.global_batch=72", *LINEAR), {})
    assert experiment("optimizer.lr=5e-5", "batch.global_batch=72", *LINEAR).plan.lr != 0.00015
    shown = {name: card.params[name] for name in ("lr", "base_lr", "max_length", "clip_norm", "compile")}
    assert shown == {"lr": "0.00015", "base_lr": "5e-05", "max_length": "32", "clip_norm": "1", "compile": "false"}
    files = {"data": {"train": "/mine/in_domain_train.tsv", "eval": None, "hub_name": "glue", "hub_eval": "dev"}}
    assert module.data_params(files) == {"train_data": "in_domain_train.tsv", "eval_data": "glue dev"}


def test_tags_of_a_rehearsal() -> None:
    tags = card_of(experiment("device=tpu8", "device.workers=8"), {}).tags
    assert (tags["device"], tags["device.rehearsed"], tags["device.executed_on"]) == ("tpu8", "true", "cpu")
    assert len(tags["plan.digest"]) == 16
    assert tags["certificate"] == "comparable"


def test_user_and_commit_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may not know its user, and an installed package is in no repository."""

    def unknown() -> str:
        raise KeyError("uid not found: 1234")

    monkeypatch.setattr(module.getpass, "getuser", lambda: "me")
    monkeypatch.setattr(module, "git_commit", lambda: "c0ffee")
    program = {"mlflow.source.name": "python -m runner", "mlflow.source.type": "LOCAL"}
    assert user_tags() == {**program, "mlflow.user": "me", "mlflow.source.git.commit": "c0ffee"}
    monkeypatch.setattr(module.getpass, "getuser", unknown)
    monkeypatch.setattr(module, "git_commit", lambda: None)
    assert user_tags() == program
