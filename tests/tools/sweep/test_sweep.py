"""A sweep's files, and the state of its jobs read from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.tools.sweep.job import free_folder
from runner.tools.sweep.sweep import JobState, attempts, finished_run, latest, note_wanted
from tests.tools.sweep.folders import job_in, sweep_in, train_to


def test_its_file_contains_no_secret(tmp_path: Path) -> None:
    sweep_in(tmp_path / "s", command=("seed=0,1", "recipe.data.train=http://me:word@host/x")).write()
    content = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert (content["id"], content["command"]) == ("s", ["seed=0,1", "recipe.data.train=http://***@host/x"])


def test_the_varied_settings_of_a_job(tmp_path: Path) -> None:
    """As typed; a value may contain an equals sign."""
    sweep = sweep_in(tmp_path, varied=("seed", "recipe.note"))
    varied = sweep.varied_by(["device=cpu", "seed=1", "+recipe.note='a=b'", "seeds=3"])
    assert varied == {"seed": "1", "recipe.note": "'a=b'"}


def test_a_second_attempt_has_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "3"
    assert free_folder(folder) == folder
    folder.mkdir()
    assert free_folder(folder) == folder  # Hydra creates it empty
    for number in (2, 3):
        (free_folder(folder) / "job.json").touch()
        assert free_folder(folder) == tmp_path / f"3-{number}"
        (tmp_path / f"3-{number}").mkdir()


def test_attempts(tmp_path: Path) -> None:
    """Sorted by start; a job without a summary is running."""
    assert attempts(tmp_path) == attempts(tmp_path / "missing") == []
    job_in(tmp_path, "0", "seed=2", 30.0, status="FAILED", error="out of memory", user_error=True, wall_s=4.0)
    job_in(tmp_path, "10", "seed=10", 20.0)
    job_in(tmp_path, "2", "seed=0", 10.0, status="FINISHED", wall_s=2.5)
    (tmp_path / "compare").mkdir()
    (tmp_path / "sweep.json").write_text("{}")
    assert attempts(tmp_path) == [
        JobState(tmp_path / "2", ("seed=0",), "seed=0", 10.0, "FINISHED", wall_s=2.5),
        JobState(tmp_path / "10", ("seed=10",), "seed=10", 20.0, "RUNNING"),
        JobState(tmp_path / "0", ("seed=2",), "seed=2", 30.0, "FAILED", None, 4.0, "out of memory", True),
    ]


@pytest.mark.parametrize(
    ("statuses", "digests", "counts"),
    [
        (["FAILED", "FINISHED", "KILLED"], "aaa", 1),
        (["FINISHED", "RUNNING"], "aa", 0),
        (["KILLED", "FAILED", "RUNNING"], "aaa", 2),
        (["FINISHED", "FAILED"], "ab", 1),  # its data have changed
    ],
)
def test_the_attempt_that_counts(statuses: list[str], digests: str, counts: int) -> None:
    """The one that finished, or else the last."""
    found = [
        JobState(Path(str(n)), ("seed=0",), "seed=0", float(n), status, digest)
        for n, (status, digest) in enumerate(zip(statuses, digests, strict=True))
    ]
    assert latest(found, None) == [found[counts]]


@pytest.mark.parametrize("digest", ["b", None])
def test_a_finished_job_counts_again_when_its_data_are_back(digest: str | None) -> None:
    """A later attempt with other data, or that could not read them, has failed."""
    finished = JobState(Path("0"), ("seed=0",), "seed=0", 1.0, "FINISHED", "a", wanted_at=3.0)
    failed = JobState(Path("1"), ("seed=0",), "seed=0", 2.0, "FAILED", digest)
    assert latest([finished, failed], None) == [finished]


def test_jobs_of_an_earlier_command_do_not_count() -> None:
    found = [JobState(Path(name), (name,), name, 0.0, "FAILED") for name in ("seed=0", "seed=1")]
    assert latest(found, ("seed=1", "seed=2")) == [found[1]]
    assert latest(found, None) == found


def test_a_job_may_have_several_names(tmp_path: Path) -> None:
    """Other overrides may mean the same settings: the job counts for each name."""
    folder = job_in(tmp_path, "0", "seed=0", 1.0, status="FINISHED", wall_s=2.0)
    note_wanted(folder, "seed=0 setup=one")
    note_wanted(folder, "seed=0 setup=one")
    (state,) = attempts(tmp_path)
    assert state.names == ("seed=0", "seed=0 setup=one")
    assert latest([state], ("seed=0", "seed=0 setup=one", "seed=1")) == [state, state]


def test_share_done(tmp_path: Path) -> None:
    """The last logged step over the plan's steps."""
    folder = job_in(tmp_path, "0", "seed=0")
    (state,) = attempts(tmp_path)
    assert state.share_done == 0.0  # neither plan nor metrics
    train_to(folder, 3, of=12)
    assert state.share_done == 0.25
    assert attempts(job_in(tmp_path / "x", "0", "a", status="KILLED"))[0].share_done == 1.0


def test_a_finished_job_is_found_by_its_settings(tmp_path: Path) -> None:
    job_in(tmp_path, "0", "a", 1.0, "x", status="FAILED")
    job_in(tmp_path, "1", "b", 2.0, "y", status="FINISHED")
    assert finished_run(tmp_path, "x") is None
    assert finished_run(tmp_path, "y") == tmp_path / "1"
    job_in(tmp_path, "0-2", "a", 5.0, "x", status="FINISHED")
    assert finished_run(tmp_path, "x") == tmp_path / "0-2"
