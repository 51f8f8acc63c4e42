"""Bringing runs to a store after they have ended, by `python -m runner.track sync` and what is behind it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from runner import cli
from runner.errors import UserError
from runner.folder.metrics_log import MetricsLog
from runner.track.card import RunCard, ending
from runner.track.upload import deliver, runs_below, store_and_runs
from tests.sweep.stores import empty_store

GONE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which nothing says where to log."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def database(folder: Path, name: str = "x") -> str:
    """An empty store, made here."""
    return empty_store(folder / f"{name}-store" / "mlflow.db")


def run_in(folder: Path, status: str | None = "FINISHED", **changes: Any) -> RunCard:
    """A run as it is left in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    card = dataclasses.replace(RunCard("mine", folder.name, {"seed": "0"}, {"device": "cpu"}, None), **changes)
    if status is not None:
        card = dataclasses.replace(card, **ending(status, {"certificate": "equivalent"}))
    card.write(folder)
    log = MetricsLog(folder)
    for step in (1, 2, 3):
        log.write(step, {"train/loss": 1 / step})
    log.close()
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    return card


def sweep_in(folder: Path, **changes: Any) -> RunCard:
    """A sweep of two jobs, of which one was killed."""
    parent = run_in(folder, **changes)
    for job, status in (("0", "FINISHED"), ("1", "KILLED")):
        run_in(folder / job, status, parent_key=parent.key, **changes)
    return parent


def in_store(uri: str) -> dict[str, Any]:
    client = MlflowClient(uri)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


def sync(*arguments: str) -> int:
    return cli.track_main(["sync", *arguments])


# --- Which runs, and where to -------------------------------------------------------------------------------


def test_a_sweep_stands_before_its_jobs(here: Path) -> None:
    """Parents first, since jobs look for theirs in the store; folders without a card are none."""
    for name in ("b/a/deep", "b", "b/0", "a", "a/10"):
        run_in(here / "outputs" / name)
    (here / "outputs" / "b" / "compare").mkdir()
    found = [str(path.relative_to(here / "outputs")) for path in runs_below(here / "outputs")]
    assert found == ["a", "b", "a/10", "b/0", "b/a/deep"]
    assert runs_below(here / "outputs" / "a" / "10") == [here / "outputs" / "a" / "10"]


def test_the_store_is_the_one_that_runs_were_logged_to(here: Path) -> None:
    """Unless another one is given; a database that was moved away is not made anew where nobody looks for it."""
    store = f"sqlite:///{here / 'x.db'}"
    for name in ("0", "1"):
        run_in(here / "s" / name, store=store)
    with pytest.raises(UserError, match=r"x\.db, which is not there: say where to with --tracking-uri"):
        store_and_runs(here / "s", None)
    (here / "x.db").touch()
    logged = [here / "s" / name for name in ("0", "1")]
    assert store_and_runs(here / "s", None) == (store, logged)
    assert store_and_runs(here / "s", GONE) == (GONE, logged)


def test_a_run_without_a_store_stays_where_it_is(here: Path) -> None:
    """Beside runs that were logged it is left alone, unless a store is given: then all are brought there."""
    (here / "x.db").touch()
    store = f"sqlite:///{here / 'x.db'}"
    logged, untracked = here / "s" / "0", here / "s" / "1"
    run_in(logged, store=store)
    run_in(untracked, store=None)
    assert store_and_runs(here / "s", None) == (store, [logged])
    assert store_and_runs(here / "s", GONE) == (GONE, [logged, untracked])


@pytest.mark.parametrize(
    ("stores", "why"),
    [
        ([None, None], "was logged to no store"),
        (["sqlite:///a.db", "sqlite:///b.db"], "holds runs of several stores"),
        (["sqlite:///a.db", None, "sqlite:///b.db"], "holds runs of several stores"),
        (["http://***@host/x"], "does not say the credentials of its store"),
        (["postgresql://host/x?password=***"], "does not say the credentials of its store"),
    ],
)
def test_a_store_that_cannot_be_known(here: Path, stores: list[str | None], why: str) -> None:
    """One sentence that says why, and how to say it; given a store, none of it matters."""
    for number, store in enumerate(stores):
        run_in(here / "s" / str(number), store=store)
    with pytest.raises(UserError, match=f"{why}.*--tracking-uri"):
        store_and_runs(here / "s", None)
    assert store_and_runs(here / "s", GONE)[0] == GONE


def test_a_spoilt_card_is_one_run_that_is_not_delivered(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others arrive; which store the spoilt one was logged to need not be known."""
    uri = empty_store(here / "x.db")
    run_in(here / "s" / "0", store=uri)
    run_in(here / "s" / "1", store=uri)
    (here / "s" / "1" / "tracking.json").write_text("")
    for more in ([], ["--tracking-uri", uri]):
        assert sync("s", *more) == 1
        said = capsys.readouterr().out
        assert "s/1  not delivered" in said
        assert set(in_store(uri)) == {"0"}


# --- Delivering ---------------------------------------------------------------------------------------------


def everything(uri: str) -> dict[str, Any]:
    """What a store holds, files included."""
    root = Path(uri.removeprefix("sqlite:///")).parent
    held: dict[str, Any] = {
        name: (run.info.to_proto().SerializeToString(), run.data.to_dictionary(), str(run.inputs))
        for name, run in in_store(uri).items()
    }
    client = MlflowClient(uri)
    for name, run in in_store(uri).items():
        history = client.get_metric_history(run.info.run_id, "train/loss")
        held[f"{name} metrics"] = sorted((m.step, m.value, m.timestamp) for m in history)
    held["files"] = {path: path.read_bytes() for path in (root / "mlartifacts").rglob("*") if path.is_file()}
    return held


def test_a_run_that_was_logged_nowhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of `tracking=none` is brought to a store whole, with its own times; twice is the same as once."""
    card = run_in(here / "run", started=1_000, dataset={"name": "cola", "digest": "d", "source": "s", "profile": "{}"})
    uri = database(here)
    assert sync("run", "--tracking-uri", uri) == 0
    said = capsys.readouterr()
    (run,) = in_store(uri).values()
    assert run.info.run_id in said.out
    assert "delivered" in said.out
    assert "error" not in said.err
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", 1_000, card.ended)
    assert run.data.params == {"seed": "0"}
    assert (run.data.tags["device"], run.data.tags["certificate"]) == ("cpu", "equivalent")
    assert run.inputs.dataset_inputs[0].dataset.name == "cola"
    history = MlflowClient(uri).get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    files = {item.path for item in MlflowClient(uri).list_artifacts(run.info.run_id)}
    assert files == {"metrics.jsonl", "summary.json"}
    before = everything(uri)
    for _ in range(2):
        assert sync("run", "--tracking-uri", uri) == 0
        assert everything(uri) == before
    assert RunCard.read(here / "run").delivered


def test_the_environment_says_where_to(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_TRACKING_URI is asked where the command line says nothing, and the command line goes before it."""
    run_in(here / "run")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database(here, "environment"))
    assert sync("run") == 0
    assert len(in_store(database(here, "environment"))) == 1
    run_in(here / "second")
    assert sync("second", "--tracking-uri", database(here, "typed")) == 0
    assert [list(in_store(database(here, name))) for name in ("environment", "typed")] == [["run"], ["second"]]


def test_a_run_that_has_not_ended(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is delivered as far as it is and stays RUNNING; with `--killed` it is closed, and says so in its folder."""
    run_in(here / "run", None, store=database(here))
    assert sync("run") == 0
    assert "it has not ended (--killed if it was)" in capsys.readouterr().out
    (run,) = in_store(database(here)).values()
    assert run.info.status == "RUNNING"
    assert run.data.metrics["train/loss"] == 1 / 3
    assert RunCard.read(here / "run").status is None
    assert sync("run", "--killed") == 0
    (closed,) = in_store(database(here)).values()
    assert (closed.info.run_id, closed.info.status) == (run.info.run_id, "KILLED")
    card = RunCard.read(here / "run")
    assert (card.status, card.delivered) == ("KILLED", True)
    assert sync("run") == 0
    assert in_store(database(here))["run"].info.end_time == card.ended


def test_killed_is_said_of_those_only_that_never_ended(here: Path) -> None:
    """A run that finished is not made KILLED."""
    run_in(here / "runs" / "done", store=database(here))
    run_in(here / "runs" / "lost", None, store=database(here))
    assert sync("runs", "--killed") == 0
    assert {name: run.info.status for name, run in in_store(database(here)).items()} == {
        "done": "FINISHED",
        "lost": "KILLED",
    }


def test_a_sweep_in_another_store(here: Path) -> None:
    """A whole sweep goes to one store and then to another: in each its jobs are below it, each run once."""
    sweep_in(here / "sweep")
    for name in ("one", "other", "one"):
        uri = database(here, name)
        assert sync("sweep", "--tracking-uri", uri) == 0
        found = in_store(uri)
        assert {run: found[run].info.status for run in found} == {"sweep": "FINISHED", "0": "FINISHED", "1": "KILLED"}
        for job in ("0", "1"):
            assert found[job].data.tags["mlflow.parentRunId"] == found["sweep"].info.run_id
        assert "mlflow.parentRunId" not in found["sweep"].data.tags
    assert in_store(database(here, "one")).keys() == in_store(database(here, "other")).keys()


def test_a_job_before_its_sweep(here: Path) -> None:
    """A job that is brought by itself has no parent there; when the sweep follows, it gets one and is no second run."""
    sweep_in(here / "sweep")
    uri = database(here)
    assert sync("sweep/0", "--tracking-uri", uri) == 0
    (job,) = in_store(uri).values()
    assert "mlflow.parentRunId" not in job.data.tags
    assert sync("sweep", "--tracking-uri", uri) == 0
    found = in_store(uri)
    assert found["0"].info.run_id == job.info.run_id
    assert found["0"].data.tags["mlflow.parentRunId"] == found["sweep"].info.run_id


def test_a_run_that_does_not_arrive_stops_no_other(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three runs one has a file that cannot be read: the others are delivered, it is named, the exit code is 1."""
    for name in ("a", "b", "c"):
        run_in(here / "runs" / name)
    (here / "runs" / "b" / "metrics.jsonl").write_text("this is no metric\n")
    assert sync("runs", "--tracking-uri", database(here)) == 1
    out = capsys.readouterr().out
    assert next(line for line in out.splitlines() if "not delivered" in line).startswith("runs/b")
    assert "Traceback" not in out
    found = in_store(database(here))
    assert (found["a"].info.status, found["c"].info.status) == ("FINISHED", "FINISHED")


def test_several_folders(here: Path) -> None:
    """Each goes to the store that it was logged to."""
    for name in ("a", "b"):
        run_in(here / name, store=database(here, name))
    assert sync("a", "b") == 0
    assert [list(in_store(database(here, name))) for name in ("a", "b")] == [["a"], ["b"]]


def test_a_run_that_was_logged_into_another(here: Path) -> None:
    """MLFLOW_RUN_ID of its time is on its card: it is brought to that run, and no other is made."""
    uri = database(here)
    client = MlflowClient(uri)
    there = client.create_run(client.create_experiment("theirs", artifact_location=(here / "art").as_uri()))
    run_in(here / "run", into_run=there.info.run_id, store=uri)
    assert sync("run") == 0
    (run,) = in_store(uri).values()
    assert (run.info.run_id, run.info.status) == (there.info.run_id, "FINISHED")
    assert run.data.metrics["train/loss"] == 1 / 3


def test_deliver_tells_what_it_did(here: Path) -> None:
    """Folder, run and whether it is closed; a status that is given changes no run that has one."""
    run_in(here / "run", "FAILED")
    done = deliver(here / "run", database(here), "KILLED")
    (run,) = in_store(database(here)).values()
    assert (done.folder, done.run_id, done.closed) == (here / "run", run.info.run_id, True)
    assert run.info.status == "FAILED"


# --- What is wrong ------------------------------------------------------------------------------------------

#: What is typed after `runner.track`, and what the sentence must name.
WRONG: list[tuple[list[str], list[str]]] = [
    ([], ["command", "runner.track --help"]),
    (["sink", "run"], ["'sink'"]),
    (["sync"], ["FOLDER"]),
    (["sync", "nowhere"], ["nowhere", "is no folder"]),
    (["sync", "run/summary.json"], ["run/summary.json", "is no folder"]),
    (["sync", "empty"], ["empty", "holds no run", "tracking.json"]),
    (["sync", "none"], ["none was logged to no store", "--tracking-uri"]),
    (["sync", "secret"], ["credentials", "--tracking-uri"]),
    (["sync", "mixed"], ["mixed holds runs of several stores"]),
    (["sync", "spoilt"], ["spoilt", "tracking.json"]),
    (["sync", "away"], ["127.0.0.1:9", "does not answer"]),
    (["sync", "run", "--tracking-uri", GONE], ["127.0.0.1:9", "does not answer"]),
    (["sync", "run", "--tracking-uri", "http://me:word@127.0.0.1:9"], ["***@127.0.0.1:9"]),
    (["sync", "run", "--tracking-uri", "gopher://x"], ["gopher"]),
    (["sync", "run", "--tracking-uri", "localhost:5000"], ["http://localhost:5000"]),
    (["sync", "run", "--tracking-uri", "sqlite:///run/summary.json/x.db"], ["summary.json"]),
    (["sync", "run", "--tracking-uri"], ["--tracking-uri"]),
    (["sync", "run", "--kill"], ["--kill"]),
    (["sync", "run", "tracking.uri=x"], ["tracking.uri=x", "is no folder"]),
    (["sync", "run", "--tracking-uri=sqlite:///run"], ["sqlite:///run"]),
    (["ui", "--port", "many"], ["many"]),
    (["ui", "--tracking-uri", "sqlite:///there.db", "--port", "99999"], ["--port=99999"]),
    (["ui", "--tracking-uri", "sqlite:///there.db", "--port", "-1"], ["--port=-1"]),
    (["ui"], ["outputs/mlflow.db"]),
    (["ui", "--tracking-uri", "sqlite:///missing.db"], ["missing.db"]),
    (["ui", "empty"], ["empty"]),
]


@pytest.mark.parametrize(("typed", "named"), WRONG, ids=[" ".join(typed) or "nothing" for typed, _ in WRONG])
def test_wrong_input_is_one_sentence(
    typed: list[str], named: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each ends with exit code 2 and one line that names what is wrong; nothing is made, and no card is changed."""
    run_in(here / "run", store=f"sqlite:///{here}/there.db")
    run_in(here / "none")
    run_in(here / "secret", store="http://***@host")
    run_in(here / "away", store=GONE)
    run_in(here / "mixed" / "0", store="sqlite:///a.db")
    run_in(here / "mixed" / "1", store="sqlite:///b.db")
    (here / "there.db").touch()
    (here / "empty").mkdir()
    (here / "spoilt").mkdir()
    (here / "spoilt" / "tracking.json").write_text('{"experiment":')
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert cli.track_main(typed) == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert "word" not in line
    for part in named:
        assert part in line
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
