"""A sweep as its jobs know it, and the run under which they are found."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from runner.config.choices import TrackerName
from runner.config.schema import Tracking
from runner.errors import UserError
from runner.sweep import command
from runner.sweep.job import free_folder
from runner.sweep.parent_run import ParentRun, parent_card
from runner.sweep.sweep import job_name, tags_of
from runner.track.card import RunCard, ending
from tests.sweep.folders import job_in, sweep_in
from tests.sweep.stores import empty_store


def test_launchers_can_send_it_to_other_processes(tmp_path: Path) -> None:
    """It comes out of a pickle as it went in."""
    sweep = sweep_in(tmp_path / "2026-a1b2")
    assert pickle.loads(pickle.dumps(sweep)) == sweep  # noqa: S301 - of our own making
    assert sweep.id == "2026-a1b2"


def test_its_file_keeps_no_secret(tmp_path: Path) -> None:
    """`sweep.json` says what was typed, without the password in it."""
    sweep = sweep_in(tmp_path / "s", command=("seed=0,1", "recipe.data.train=http://me:word@host/x"))
    sweep.write()
    text = (tmp_path / "s" / "sweep.json").read_text()
    assert "word" not in text
    content = json.loads(text)
    assert (content["id"], content["command"]) == ("s", ["seed=0,1", "recipe.data.train=http://***@host/x"])


def test_what_is_special_about_a_job(tmp_path: Path) -> None:
    """Of its overrides those that vary, with their values as typed; a value may hold an equals sign."""
    sweep = sweep_in(tmp_path, varied=("seed", "recipe.note", "device.length_buckets"))
    overrides = ["device=cpu", "seed=1", "+recipe.note='a=b'", "device.length_buckets=[8,16]", "seeds=3"]
    varied = sweep.varied_by(overrides)
    assert varied == {"seed": "1", "recipe.note": "'a=b'", "device.length_buckets": "[8,16]"}
    assert tags_of(sweep, varied) == {
        "sweep.id": sweep.id,
        "varied.seed": "1",
        "varied.recipe.note": "'a=b'",
        "varied.device.length_buckets": "[8,16]",
    }


def test_jobs_that_differ_have_different_names() -> None:
    """A job's name tells it from every other, and is the same in whatever order its settings are typed."""
    jobs = [["seed=0", "device=cpu"], ["seed=1", "device=cpu"], ["seed=0", "device=cpu2"], ["seed=0"]]
    assert len({job_name(job) for job in jobs}) == 4
    assert job_name(jobs[0]) == job_name(list(reversed(jobs[0])))


def test_a_second_attempt_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """What an earlier attempt has left is kept: the next one goes beside it."""
    folder = tmp_path / "3"
    assert free_folder(folder) == folder
    folder.mkdir()
    assert free_folder(folder) == folder  # Hydra has made it, and it is empty
    (folder / "job.json").touch()
    assert free_folder(folder) == tmp_path / "3-2"
    (tmp_path / "3-2").mkdir()
    (tmp_path / "3-2" / "job.json").touch()
    assert free_folder(folder) == tmp_path / "3-3"


def test_a_parent_run_is_opened_closed_and_opened_again(tmp_path: Path) -> None:
    """It is the same run each time, RUNNING while jobs run, and its counts are those of the last time."""
    uri = f"sqlite:///{tmp_path / 'x.db'}"
    tracking = Tracking(TrackerName.mlflow, uri)
    sweep = sweep_in(tmp_path / "s")
    card = parent_card(tracking, tmp_path / "s", ("seed", "device"))
    assert card.run_name == "sweep · seed × device"
    resumed = parent_card(tracking, tmp_path / "s", ("seed", "device"))
    assert resumed == card
    assert parent_card(tracking, tmp_path / "s", ("other",)).run_name == "sweep · other"  # a command of more values
    with pytest.raises(UserError, match="start it where it was started"):
        parent_card(Tracking(TrackerName.none), tmp_path / "s", ("seed",))
    client = MlflowClient(uri)
    parent = ParentRun(card, sweep, uri)
    run_id = parent.open()
    assert client.get_run(run_id).info.status == "RUNNING"
    parent.settle("FAILED", {"FINISHED": 1, "FAILED": 2, "KILLED": 0})
    parent.close()
    tags = client.get_run(run_id).data.tags
    assert client.get_run(run_id).info.status == "FAILED"
    assert {name: tags[f"sweep.{name}"] for name in ("jobs", "finished", "failed", "killed")} == {
        "jobs": "3",
        "finished": "1",
        "failed": "2",
        "killed": "0",
    }
    again = ParentRun(RunCard.read(tmp_path / "s"), sweep, uri)
    assert again.open() == run_id
    assert client.get_run(run_id).info.status == "RUNNING"
    assert RunCard.read(tmp_path / "s").status is None  # killed now, it has not ended
    unanswered = RunCard.read(tmp_path / "s").changed(tmp_path / "s", run_id=None)
    assert ParentRun(unanswered, sweep, uri).open() == run_id  # the store had taken it, and could not say so
    again.settle("FINISHED", {"FINISHED": 3, "FAILED": 0, "KILLED": 0})
    again.close()
    assert (client.get_run(run_id).info.status, client.get_run(run_id).data.tags["sweep.failed"]) == ("FINISHED", "0")


def test_a_store_that_takes_no_parent_run_is_a_sentence(tmp_path: Path) -> None:
    """Before any job has begun: what is wrong, without the password, and the mend."""
    (tmp_path / "x.db").write_text("this is no database, and was never one" * 100)
    uri = f"sqlite:///{tmp_path / 'x.db'}"
    tracking = Tracking(TrackerName.mlflow, uri)
    sweep = sweep_in(tmp_path / "s")
    parent = ParentRun(parent_card(tracking, tmp_path / "s", ("seed",)), sweep, uri)
    with pytest.raises(UserError, match=r"^tracking\.uri=sqlite:.*tracking=none$"):
        parent.open()


def test_only_jobs_of_the_sweeps_store_are_brought_there(tmp_path: Path) -> None:
    """A job that was not to be tracked, or in another store, is left alone when the sweep ends."""
    uri = empty_store(tmp_path / "x.db")
    for number, store in enumerate((uri, None, "sqlite:///another.db")):
        job = job_in(tmp_path / "s", str(number), f"seed={number}", status="FINISHED")
        card = RunCard("mine", f"job {number}", {}, {}, store)
        dataclasses.replace(card, **ending("FINISHED", {})).write(job)
    command._close_runs(sweep_in(tmp_path / "s"), Tracking(TrackerName.mlflow, uri))
    client = MlflowClient(uri)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert [run.info.run_name for run in found] == ["job 0"]
