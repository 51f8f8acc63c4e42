"""Finding a sweep again, one command at a time, and closing the books of jobs that were killed."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from runner.config.arguments import take_resume
from runner.errors import UserError
from runner.sweep.resume import close_books, find_sweep, only_one
from runner.sweep.states import attempts, finished_run
from runner.track.card import RunCard
from tests.sweep.folders import job_in, sweep_in


@pytest.mark.parametrize(
    ("typed", "rest", "value"),
    [
        (["seed=0"], ["seed=0"], None),
        (["seed=0", "resume_sweep=x", "device=cpu"], ["seed=0", "device=cpu"], "x"),
        (["+resume_sweep=x"], [], "x"),
        (["++resume_sweep=x"], [], "x"),
        (["resume_sweep='a b'"], [], "a b"),
        (["resume_sweep=outputs/sweeps/a=b"], [], "outputs/sweeps/a=b"),
        (["recipe.resume_sweep=x"], ["recipe.resume_sweep=x"], None),
        (["resume_sweeps=x"], ["resume_sweeps=x"], None),
    ],
)
def test_take_resume(typed: list[str], rest: list[str], value: str | None) -> None:
    """It is no setting: it is taken out of the overrides, and the others stay in their order."""
    assert take_resume(typed) == (rest, value)


@pytest.mark.parametrize(
    "typed", [["resume_sweep="], ["resume_sweep"], ["resume_sweep=a,b"], ["resume_sweep=a", "resume_sweep=a"]]
)
def test_not_one_sweep(typed: list[str]) -> None:
    """None, or two, cannot be gone on with: one sentence that repeats what was typed."""
    with pytest.raises(UserError, match="is not one sweep") as caught:
        take_resume(["seed=0", *typed])
    assert " ".join(typed) in str(caught.value)


def card(folder: Path, run_id: str | None) -> RunCard:
    card = RunCard("e", "r", {}, {}, "sqlite:///x.db", run_id=run_id)
    card.write(folder)
    return card


def test_find_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its id, its MLflow run or its folder; a job's run, a part of an id, or any folder is not one."""
    sweeps = tmp_path / "sweeps"
    for name, run_id in (("monday", "aaa1"), ("tuesday", "bbb2"), ("untracked", None)):
        sweep_in(sweeps / name).write()
        job = job_in(sweeps / name, "0", "seed=0")
        if run_id is not None:
            card(sweeps / name, run_id)
            card(job, f"{run_id}-job")
    monkeypatch.chdir(tmp_path)
    found = {name: find_sweep(name, sweeps) for name in ("tuesday", "bbb2", "untracked", str(sweeps / "monday"))}
    assert found == {
        "tuesday": sweeps / "tuesday",
        "bbb2": sweeps / "tuesday",
        "untracked": sweeps / "untracked",
        str(sweeps / "monday"): sweeps / "monday",
    }
    assert find_sweep("sweeps/monday", sweeps).resolve() == sweeps / "monday"
    for wrong in ("bbb2-job", "tues", "sweeps", "sweeps/monday/0", "None", "*"):
        with pytest.raises(UserError, match="is no sweep in"):
            find_sweep(wrong, sweeps)
    with pytest.raises(UserError, match=r"resume_sweep=mondya is no sweep in .*; did you mean 'monday'"):
        find_sweep("mondya", sweeps)
    with pytest.raises(UserError, match=r"is no sweep in elsewhere: there are no sweeps"):
        find_sweep("monday", Path("elsewhere"))


def test_a_card_that_is_broken_does_not_hide_other_sweeps(tmp_path: Path) -> None:
    """A file that somebody has spoilt in one sweep is no reason not to find another."""
    for name in "abcde":
        sweep_in(tmp_path / name).write()
        (tmp_path / name / "tracking.json").write_text("{" if name < "d" else "[]")
    card(tmp_path / "c", "ccc3")
    assert find_sweep("ccc3", tmp_path) == tmp_path / "c"
    assert [find_sweep(name, tmp_path).name for name in "abcde"] == list("abcde")
    with pytest.raises(UserError, match="is no sweep in"):
        find_sweep("fff6", tmp_path)


def _hold(folder: Path, held: object, done: object) -> None:
    with only_one(folder):
        held.set()  # type: ignore[attr-defined]
        done.wait(60)  # type: ignore[attr-defined]


def test_only_one_process_at_a_time(tmp_path: Path) -> None:
    """Another process is refused as long as the first one holds the folder, and not after it was killed."""
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path, held, done))
    process.start()
    assert held.wait(60)
    with pytest.raises(UserError, match=f"^the sweep {tmp_path.name} is still running"), only_one(tmp_path):
        raise AssertionError("it was let in")
    process.kill()
    process.join()
    with only_one(tmp_path):
        pass
    with only_one(tmp_path):  # and again
        pass


def test_files_that_were_cut_off(tmp_path: Path) -> None:
    """A machine that dies may leave empty files: such a job counts as killed, or as never begun, and others go on."""
    done = job_in(tmp_path, "0", "seed=0", 1.0, status="FINISHED", eval={"loss": 1.0})
    no_summary = job_in(tmp_path, "1", "seed=1", 2.0, status="FINISHED")
    no_note = job_in(tmp_path, "2", "seed=2", 3.0)
    no_card = job_in(tmp_path, "3", "seed=3", 4.0)
    for empty in (no_summary / "summary.json", no_note / "job.json", no_card / "tracking.json"):
        empty.write_text("")
    with only_one(tmp_path):
        close_books(tmp_path)
    assert {state.folder: state.status for state in attempts(tmp_path)} == {
        done: "FINISHED",
        no_summary: "KILLED",
        no_card: "KILLED",
    }
    assert finished_run(tmp_path, "x", 0) is None


def test_books_are_closed(tmp_path: Path) -> None:
    """A job without a summary was killed: its summary and its card say so; those of the others stay as they are.

    A job that was killed between the two has a card that says what its summary says.
    """
    done = job_in(tmp_path, "0", "seed=0", 1.0, status="FINISHED", eval={"loss": 1.0})
    killed = job_in(tmp_path, "1", "seed=1", 2.0)
    untracked = job_in(tmp_path, "2", "seed=2", 3.0)
    between = [job_in(tmp_path, status, f"seed={status}", 4.0, status=status) for status in ("FAILED", "FINISHED")]
    for folder in between:
        card(folder, "three")
    card(done, "one").changed(done, status="FINISHED", ended=5)
    started = card(killed, "two").started
    before = [(path, path.read_bytes()) for path in sorted(done.iterdir())]
    close_books(tmp_path)
    assert [state.status for state in attempts(tmp_path)] == ["FINISHED", "KILLED", "KILLED", "FAILED", "FINISHED"]
    assert [RunCard.read(folder).status for folder in between] == ["FAILED", "FINISHED"]
    assert [(path, path.read_bytes()) for path in sorted(done.iterdir())] == before
    assert json.loads((killed / "summary.json").read_text())["error"] == "the process was killed"
    closed = RunCard.read(killed)
    assert (closed.status, closed.run_id, closed.delivered) == ("KILLED", "two", False)
    assert closed.ended is not None
    assert closed.ended >= started
    assert not (untracked / "tracking.json").exists()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    close_books(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == after
