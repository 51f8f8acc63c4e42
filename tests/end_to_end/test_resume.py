"""A run that is killed and continues by `resume=`: one folder, one MLflow run, and everything in both once."""

from __future__ import annotations

import collections
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner import cli
from runner.folder.files import digest_of, write_json
from runner.folder.reading import read_settings
from runner.plan.plan import digest_of_numbers
from runner.track.delivery import stored_key
from runner.train.checkpoint import FOLDER
from tests import processes
from tests.processes import kill, left_of_session, wait_for_gate, wait_until
from tests.runs import only_folder, read, store, stored_runs
from tests.tools.sweep.gated import GATED, hold

#: One optimizer step and one evaluation per epoch. Saved after steps 2, 4 and 6, killed before step 8.
RUN = [*GATED, "epochs=10", "log_every=1"]
HELD, NEWEST, STEPS = 8, "step-00000006", 10
TRUST = "trusted_packages=[tests]"


def run(*arguments: str) -> int:
    return cli.main(arguments, time.time())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run was started and killed with all its processes."""
    root = tmp_path_factory.mktemp("killed")
    hold(root, HELD)
    process = processes.start(root, "-m", "runner", *RUN, "checkpoint.every_steps=2")
    wait_for_gate(root, HELD, process)
    wait_until(lambda: list(root.glob(f"outputs/linear/*/{FOLDER}/{NEWEST}")), "not saved")
    wait_until(lambda: read(only_folder(root, "linear"), "tracking.json")["run_id"], "no run in the store")
    wait_until(lambda: ("train/loss", HELD - 1) in delivered(root), "not delivered")
    kill(process)
    assert left_of_session(process.pid) == []
    return root


def delivered(root: Path) -> collections.Counter[tuple[str, int]]:
    """How often the store has each metric and step."""
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for one in stored_runs(root):
        for key in one.data.metrics:
            history = store(root).get_metric_history(one.info.run_id, key)
            found.update((metric.key, metric.step) for metric in history)
    return found


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["value"] for line in logged(folder) if line["key"] == "train/loss"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimizer.lr=1"], ["optimizer.lr=1"]),
        (["seed=1"], ["seed=1"]),
        (["recipe=acceptability"], ["recipe=acceptability"]),
        (["+new=1"], ["+new=1"]),
        (["device=cpu,cpu2"], ["device=cpu,cpu2"]),
        (["device.workers=9"], ["device.workers=9", "8"]),
        (["precision=fp31"], ["precision=fp31"]),
        (["log_every=0"], ["log_every=0"]),
    ],
    ids=str,
)
def test_what_would_change_the_experiment_is_refused_by_name(
    killed: Path,
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(killed)
    before = logged(only_folder(killed, "linear"))
    assert run("resume=latest", TRUST, *arguments) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words)
    assert logged(only_folder(killed, "linear")) == before


def test_the_file_of_a_run_grants_no_trust(
    killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(killed)
    assert run("resume=latest") == 2
    assert "trusted_packages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resume=nowhere"], "resume=nowhere"),
        (["resume=latest"], "resume=latest"),
        (["resume="], "resume="),
        (["-m", "resume=x"], "resume_sweep"),
        (["resume=a", "resume=b"], "resume=a resume=b"),
    ],
    ids=str,
)
def test_a_run_that_is_not_there(
    here: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_run_without_a_checkpoint(killed: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It starts from step 0 in the same folder, also as the latest run. One with damaged ones is refused."""
    folder = here / "outputs" / "linear" / "run"
    shutil.copytree(only_folder(killed, "linear"), folder, ignore=shutil.ignore_patterns(FOLDER, "tracking.json"))
    assert run("resume=latest", TRUST, "tracking=none") == 0
    steps = [line["step"] for line in logged(folder) if line["key"] == "train/loss"]
    assert steps == list(range(1, STEPS + 1))
    assert read(folder, "summary.json")["resumed_after"] == []

    damaged = here / "damaged"
    shutil.copytree(only_folder(killed, "linear"), damaged)
    for file in damaged.glob(f"{FOLDER}/*/worker-0/state.json"):
        file.write_text("")
    assert run(f"resume={damaged}", TRUST) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


def test_damaged_records(killed: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What training does not need is set aside, with a sentence. MLflow needs the card: refused before any change."""
    folder = here / "run"
    shutil.copytree(only_folder(killed, "linear"), folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    damaged = {
        "metrics.jsonl": "".join([*lines[:4], "\n", *lines[4:8], "\0" * 100 + "\n", *lines[8:]]),
        "environment.json": "\0" * 100,
        "tracking.json": (folder / "tracking.json").read_text()[:100],
    }
    for name, content in damaged.items():
        (folder / name).write_text(content)
    before = sorted(folder.rglob("*"))
    assert run(f"resume={folder}", TRUST) == 2
    assert "tracking.json" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
    assert {name: (folder / name).read_text() for name in damaged} == damaged

    assert run(f"resume={folder}", TRUST, "tracking=none") == 0
    out = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith("warning:") and name in line for line in out) for name in damaged)
    assert (folder / "damaged-tracking.json").read_text() == damaged["tracking.json"]
    assert losses(folder).keys() == set(range(1, STEPS + 1))
    assert [one["after_step"] for one in read(folder, "environment.json")] == [6]


@pytest.fixture
def copy(killed: Path, here: Path) -> Path:
    """The folder of the killed run, as somebody else may pass it on."""
    return Path(shutil.copytree(only_folder(killed, "linear"), here / "run"))


def change_settings(folder: Path, **changes: Any) -> None:
    content = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**content, **changes}))


def change_json(file: Path, **changes: Any) -> None:
    """As the runner would have written it: with its digest."""
    content = {name: value for name, value in json.loads(file.read_text()).items() if name != "digest"} | changes
    digest = digest_of_numbers(content) if file.name == "plan.json" else digest_of(content)
    file.write_text(json.dumps({**content, "digest": digest}))


@pytest.fixture
def newest_identity(copy: Path) -> dict[str, Any]:
    identity: dict[str, Any] = read(copy / FOLDER / NEWEST, "complete.json")["identity"]
    return identity


def test_changed_data_are_refused(
    copy: Path, newest_identity: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    change_json(copy / FOLDER / NEWEST / "complete.json", identity={**newest_identity, "data": "other"})
    assert run(f"resume={copy}", TRUST, "tracking=none") == 2
    assert "the data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        (lambda folder: change_settings(folder, seed=7), ["config.yaml", "seed is 7, and was 0"]),
        (lambda folder: change_settings(folder, epochs=3), ["config.yaml", "epochs"]),
        (
            lambda folder: change_settings(folder, recipe={**read_settings(folder / "config.yaml")["recipe"], "x": 1}),
            ["config.yaml", "recipe.x is 1"],
        ),
        (lambda folder: change_json(folder / "plan.json", lr=0.5), ["plan.json", "lr is 0.5"]),
        (lambda folder: write_json(folder / "plan.json", {**read(folder, "plan.json"), "lr": 0.5}), ["plan.json"]),
        (lambda folder: change_settings(folder, hydra={"run": {"dir": "x"}}), ["config.yaml", "hydra"]),
    ],
    ids=["seed", "epochs", "recipe", "plan", "plan without its digest", "hydra"],
)
def test_edited_files_of_the_run_are_refused(
    copy: Path, edit: Callable[[Path], None], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copy)
    before = logged(copy)
    assert run(f"resume={copy}", TRUST, "tracking=none") == 2
    error = capsys.readouterr().err
    assert all(name in error for name in names), error
    assert logged(copy) == before


def test_a_folder_decides_neither_where_a_run_is_sent_nor_what_is_written(
    copy: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its store is used if the command names it, its cache is not, `${…}` in it is text, and links are refused."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    card = read(copy, "tracking.json")
    tracking = read_settings(copy / "config.yaml")["tracking"] | {"run_name": "${oc.env:AWS_SECRET_ACCESS_KEY}"}
    change_settings(copy, cache_dir=str(here / "cache"), tracking=tracking)
    for uri in ("http://127.0.0.1:9", f"sqlite:///{here / 'other.db'}"):
        write_json(copy / "tracking.json", {**card, "store": uri, "into_run": "0" * 32})
        assert run(f"resume={copy}", TRUST) == 2
        assert f"tracking.uri={uri}" in capsys.readouterr().err
    (copy / "notes.txt").symlink_to(here)
    assert run(f"resume={copy}", TRUST, "tracking=none") == 2
    assert "notes.txt is a link" in capsys.readouterr().err
    (copy / "notes.txt").unlink()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here / 'named.db'}")
    assert run(f"resume={copy}", TRUST) == 0
    assert {path.name for path in here.iterdir()} == {"run", "named.db", "mlartifacts", "forked_by.txt"}
    assert read(copy, "tracking.json")["delivered"]
    assert "hunter2" not in (copy / "config.yaml").read_text()


def test_changed_code_is_told_and_certified(
    copy: Path, newest_identity: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run continues, since a mended recipe is why runs are resumed; the change stays in its certificate."""
    folder = copy
    changed = {
        "code of tests.tools.sweep.gated": "another",
        "code of tests.removed": "x",
        "runner": "0.0.9",
        "torch": "1.0",
    }
    assert changed.keys() - newest_identity.keys() == {"code of tests.removed"}
    change_json(folder / FOLDER / NEWEST / "complete.json", identity={**newest_identity, **changed})
    assert run(f"resume={folder}", TRUST, "tracking=none") == 0
    out = capsys.readouterr().out
    (note, *_) = (line for line in out.splitlines() if line.startswith("note:"))
    names = ("code of tests.tools.sweep.gated", "code of tests.removed", "runner 0.0.9 →", "torch 1.0 →")
    assert all(name in note for name in names)
    assert any("code of tests.tools.sweep.gated" in one for one in read(folder, "summary.json")["notes"])
    certificate = read(folder, "certificate.json")
    assert certificate["level"] == "comparable"
    assert [one["level"] for one in certificate["segments"]] == ["equivalent", "comparable"]
    assert len(certificate["segments"][1]["differs"]) == len(changed)


def test_a_killed_run_continues(
    killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two workers instead of one, from the checkpoint before the newest, which is damaged.

    The ledger is that of a run that was not interrupted, and the store has each metric and step once.
    """
    monkeypatch.chdir(killed)
    folder = only_folder(killed, "linear")
    state = folder / FOLDER / NEWEST / "worker-0" / "state.json"
    state.write_bytes(state.read_bytes()[:100])
    before = {line["step"]: line for line in logged(folder) if line["key"] == "train/loss"}
    run_id = read(folder, "tracking.json")["run_id"]

    assert run(f"resume={run_id}", TRUST, "device=cpu2") == 0
    out = capsys.readouterr().out
    assert f"{NEWEST} is damaged" in out
    assert "step 4" in out
    assert folder == only_folder(killed, "linear")
    (found,) = stored_runs(killed)
    assert (found.info.run_id, found.info.status) == (run_id, "FINISHED")
    assert set(delivered(killed).values()) == {1}
    keys = [(line["key"], line["step"]) for line in logged(folder)]
    assert len(keys) == len(set(keys))
    assert {(stored_key(key), step) for key, step in keys} <= set(delivered(killed))
    assert {line["step"]: line for line in logged(folder) if line["key"] == "train/loss" and line["step"] <= 4} == {
        step: before[step] for step in range(1, 5)
    }
    summary, certificate = read(folder, "summary.json"), read(folder, "certificate.json")
    assert (summary["status"], summary["optimizer_steps"], summary["resumed_after"]) == ("FINISHED", STEPS, [4])
    assert summary["checkpoint_stall_s"] > 0
    segments = certificate["segments"]
    assert [(one["after_step"], one["until_step"], one["workers"]) for one in segments] == [(0, 4, 1), (4, STEPS, 2)]
    assert [one["differs"] for one in segments] == [[], ["world_size"]]
    assert "changed since" not in out
    assert not any(path.name.startswith(".") for path in (folder / FOLDER).iterdir())

    whole = ["hydra.run.dir=whole", "tracking=none", "checkpoint=none"]
    assert run(*RUN, *whole) == 0
    assert not (killed / "whole" / FOLDER).exists()
    assert read(folder, "ledger.json") == read(killed / "whole", "ledger.json")
    assert losses(folder) == pytest.approx(losses(killed / "whole"), rel=1e-5)
    assert summary["eval"] == pytest.approx(read(killed / "whole", "summary.json")["eval"], rel=1e-5)
    assert summary["setup_digest"] != read(killed / "whole", "summary.json")["setup_digest"]

    assert run(f"resume={folder}", TRUST) == 2
    assert "finished" in capsys.readouterr().err
