"""`python -m runner.track`: which runs it finds, to which store it uploads them, and wrong input."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from runner import cli
from runner.errors import UserError
from runner.folder.metrics_log import MetricsLog
from runner.track.card import TrackingRecord
from runner.track.command import runs_below, store_and_runs
from tests.processes import TIMEOUT_S
from tests.tools.sweep.stores import empty_store

pytestmark = pytest.mark.usefixtures("here")

DOWN = "http://127.0.0.1:9"


def database(name: str = "") -> str:
    """By default the default store of the current folder."""
    return empty_store(Path.cwd() / name / "outputs" / "mlflow.db")


def run_in(folder: Path, status: str | None = "FINISHED", **changes: Any) -> TrackingRecord:
    """A folder as a run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    card = dataclasses.replace(TrackingRecord("mine", folder.name, {"seed": "0"}, {"device": "cpu"}, None), **changes)
    card.write(folder)
    if status is not None:
        card.mark_ended(folder, status, {"certificate": "equivalent"})
    log = MetricsLog(folder)
    for step in (1, 2, 3):
        log.write(step, {"train/loss": 1 / step})
    log.close()
    (folder / "summary.json").write_text(json.dumps({"mlflow_run_id": None}))
    return card


def in_store(uri: str) -> dict[str, Any]:
    """Runs by name."""
    client = MlflowClient(uri)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


def everything(uri: str) -> dict[str, Any]:
    """All that a store contains, files included."""
    root = Path(uri.removeprefix("sqlite:///")).parent
    content: dict[str, Any] = {path: path.read_bytes() for path in root.glob("mlartifacts/**/*") if path.is_file()}
    client = MlflowClient(uri)
    for name, run in in_store(uri).items():
        history = client.get_metric_history(run.info.run_id, "train/loss")
        content[f"{name} metrics"] = sorted((m.step, m.value, m.timestamp) for m in history)
        content[name] = (run.info.to_proto().SerializeToString(), run.data.to_dictionary(), str(run.inputs))
    return content


def sync(*arguments: str) -> int:
    return cli.run_tool("track", ["sync", *arguments])


def test_a_sweep_comes_before_its_jobs(here: Path) -> None:
    """Jobs look up their parent in the store; folders without a card are skipped."""
    for name in ("b/a/deep", "b", "b/0", "a", "a/10"):
        run_in(here / "outputs" / name)
    (here / "outputs" / "b" / "compare").mkdir()
    found = [str(path.relative_to(here / "outputs")) for path in runs_below(here / "outputs")]
    assert found == ["a", "b", "a/10", "b/0", "b/a/deep"]
    assert runs_below(here / "outputs" / "a" / "10") == [here / "outputs" / "a" / "10"]


def test_the_store_is_the_one_that_runs_were_logged_to(here: Path) -> None:
    """Untracked runs are skipped, unless a store is given."""
    tracked, untracked = here / "s" / "0", here / "s" / "1"
    store = database()
    run_in(tracked, store=store)
    run_in(untracked, store=None)
    assert store_and_runs(here / "s", None) == (store, [tracked])
    assert store_and_runs(here / "s", DOWN) == (DOWN, [tracked, untracked])


@pytest.mark.parametrize(
    ("stores", "why"),
    [
        ([None, None], "not tracked"),
        (["sqlite:///outputs/mlflow.db", None, "sqlite:///b.db"], "sqlite:///b.db"),
        ([DOWN], DOWN),
        (["http://***@host/x"], "credentials"),
        (["postgresql://host/x?password=***"], "credentials"),
    ],
)
def test_a_store_that_must_be_given(here: Path, stores: list[str | None], why: str) -> None:
    for number, store in enumerate(stores):
        run_in(here / "s" / str(number), store=store)
    with pytest.raises(UserError, match=f"{why}.*--tracking-uri"):
        store_and_runs(here / "s", None)
    assert store_and_runs(here / "s", DOWN)[0] == DOWN


def test_runs_of_several_stores(here: Path) -> None:
    for name in ("a", "b"):
        run_in(here / "both" / name / "outputs" / "run", store=database(f"both/{name}"))
    with pytest.raises(UserError, match=r"several stores.*--tracking-uri"):
        store_and_runs(here / "both", None)
    assert store_and_runs(here / "both" / "a", None)[0] == database("both/a")


def test_a_link_is_not_uploaded(here: Path) -> None:
    """It could lead to any file of this machine."""
    run_in(here / "run", log_model=True)
    (here / "secret").write_text("secret")
    (here / "run" / "notes.txt").symlink_to(here / "secret")
    (here / "run" / "model").mkdir()
    (here / "run" / "model" / "weights").symlink_to(here / "secret")
    assert sync("run", "--tracking-uri", database()) == 1
    assert not [path for path in here.rglob("mlartifacts/**/*") if path.is_file() and "secret" in path.read_text()]
    (here / "run" / "model" / "weights").unlink()
    assert sync("run", "--tracking-uri", database()) == 0


def test_an_untracked_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of `tracking=none` is uploaded completely, with its own times; a second upload changes nothing."""
    dataset = {"name": "cola", "digest": "d", "source": "s", "profile": "{}"}
    run_in(here / "run", started=1_000, dataset=dataset)
    uri = database()
    assert sync("run", "--tracking-uri", uri) == 0
    (run,) = in_store(uri).values()
    assert run.info.run_id in capsys.readouterr().out
    card = TrackingRecord.read(here / "run")
    assert card.delivered
    assert json.loads((here / "run" / "summary.json").read_text()) == {"mlflow_run_id": run.info.run_id}
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", 1_000, card.ended)
    assert run.data.params == {"seed": "0"}
    assert (run.data.tags["device"], run.data.tags["certificate"]) == ("cpu", "equivalent")
    assert run.inputs.dataset_inputs[0].dataset.name == "cola"
    before = everything(uri)
    assert before["run metrics"][-1][:2] == (3, 1 / 3)
    assert sync("run", "--tracking-uri", uri) == 0
    assert everything(uri) == before


def test_the_environment_chooses_the_store(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs that were tracked. The command line takes precedence."""
    run_in(here / "run", store="http://127.0.0.1:7777")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database("environment"))
    assert sync("run") == 0
    run_in(here / "second")
    assert sync("second", "--tracking-uri", database("typed")) == 0
    assert [list(in_store(database(name))) for name in ("environment", "typed")] == [["run"], ["second"]]


def test_a_run_that_has_not_ended(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stays RUNNING; `--killed` closes it, and no run that has ended."""
    uri = database()
    run_in(here / "runs" / "lost", None, store=uri)
    run_in(here / "runs" / "done", store=uri)
    assert sync("runs") == 0
    assert "--killed" in capsys.readouterr().out
    assert in_store(uri)["lost"].info.status == "RUNNING"
    assert in_store(uri)["lost"].data.metrics["train/loss"] == 1 / 3
    assert sync("runs", "--killed") == 0
    assert {name: run.info.status for name, run in in_store(uri).items()} == {"done": "FINISHED", "lost": "KILLED"}
    card = TrackingRecord.read(here / "runs" / "lost")
    assert (card.status, card.delivered) == ("KILLED", True)


def test_a_run_that_fails_does_not_stop_the_others(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid card: named, exit code 1. Damaged metrics: named, and left out. Every folder goes to its own store."""
    for name in ("a", "b", "c"):
        run_in(here / "runs" / name, store=database())
    run_in(here / "elsewhere" / "outputs" / "more", store=database("elsewhere"))
    (here / "runs" / "a" / "metrics.jsonl").write_text("not JSON\n")
    (here / "runs" / "b" / "tracking.json").write_text("")
    assert sync("runs", "elsewhere") == 1
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "not delivered" in line] == ["runs/b"]
    assert [line.split()[0] for line in out.splitlines() if "damaged" in line] == ["runs/a"]
    assert "Traceback" not in out
    assert in_store(database())["c"].info.status == "FINISHED"
    assert list(in_store(database("elsewhere"))) == ["more"]


def test_the_ui_prints_the_pages_that_show_runs(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line per experiment with runs, the newest first."""
    uri = database()
    for number, name in enumerate(("old", "new")):
        run_in(here / name, experiment=name, started=1_000 + number)
        assert sync(name, "--tracking-uri", uri) == 0
    MlflowClient(uri).create_experiment("empty")
    capsys.readouterr()
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append(command))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    cli.run_tool("track", ["ui", "--tracking-uri", uri, "--port", "5987"])
    assert "5987" in started[0]
    found = re.findall(r"(\w+): http://127\.0\.0\.1:5987/#/experiments/(\d+)/runs\?\S*", capsys.readouterr().out)
    ids = {one.name: one.experiment_id for one in MlflowClient(uri).search_experiments()}
    assert found == [("new", ids["new"]), ("old", ids["old"])]


@pytest.mark.long
def test_the_ui_is_quiet_and_ends_on_ctrl_c(here: Path) -> None:
    """Requests and the end leave no lines below the addresses, and no process stays."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "runner.track", "ui", "--tracking-uri", database(), "--port", str(port)]
    with (here / "ui.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"http://127.0.0.1:{port}/"):
                break
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
        assert process.wait(TIMEOUT_S) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    content = (here / "ui.log").read_text()
    assert f"http://127.0.0.1:{port}/" in content
    assert not re.search("Traceback|GET |Warning", content), content
