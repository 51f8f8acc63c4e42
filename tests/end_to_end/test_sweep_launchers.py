"""Sweeps by other launchers than Hydra's own: jobs side by side, interruptions, and jobs that outlive their sweep."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import cli
from runner.folder.metrics_log import MetricsReader
from runner.launch.signals import EXIT_PREEMPTED
from tests.end_to_end.sweeps import (
    assert_metrics_complete,
    attempts,
    family,
    only_sweep,
    start,
    statuses,
    sweep,
)
from tests.processes import TIMEOUT_S, left_of_session, output, wait_until
from tests.runs import read
from tests.tools.sweep.gated import hold, release

pytestmark = pytest.mark.usefixtures("without_comparison")

JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def start_two_held(root: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """A sweep whose two jobs wait before their second step. Either job may be the first to begin."""
    for job in (0, 1):
        hold(root, 2, job)
    process = start(root, *overrides)

    def both_train() -> bool:
        assert process.poll() is None, output(root)
        return len(list(root.glob("outputs/sweeps/*/*/metrics.jsonl"))) == 2

    wait_until(both_train, f"two jobs never trained: {root}")
    return process


@pytest.mark.long
def test_joblib(here: Path) -> None:
    """Two jobs at a time, the first two at the same step: neither metrics nor lines are mixed up."""
    (here / "meet").touch()  # the first two jobs wait for each other
    process = start(here, *JOBLIB, "epochs=100", "seed=0,1,2")
    assert process.wait(timeout=TIMEOUT_S) == 0, output(here)
    assert "locked" not in output(here)
    assert "Traceback" not in output(here)
    assert statuses(here) == ("FINISHED", ["FINISHED"] * 3)
    jobs = family(here)[1]
    assert sorted(job.data.tags["varied.seed"] for job in jobs) == ["0", "1", "2"]
    for job in jobs:
        assert_metrics_complete(here, job)
    for path in only_sweep(here).glob("*/summary.json"):
        summary = read(path.parent, "summary.json")
        assert summary["jobs_at_once"] == 2
        console = (path.parent / "console.log").read_text()
        assert set(re.findall(r"cpu · s(\d)", console)) == {str(summary["seed"])}


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Commands that this test starts may use two cores."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.long
def test_jobs_that_divide_the_cores(here: Path, two_cores: None) -> None:
    """As many at a time as fit, each with its own cores, and with the results of jobs one after the other."""
    grid = ["device=cpu,cpu2", "seed=0,1,2", "tracking=none"]
    process = start(here, "hydra/launcher=joblib", *grid)
    assert process.wait(timeout=TIMEOUT_S) == 0, output(here)
    assert "2 at a time, which share 2 cores" in " ".join(output(here).split())
    side_by_side = only_sweep(here).rename(here / "side_by_side")
    found = []
    for path in side_by_side.glob("*/summary.json"):
        start_s, summary = read(path.parent, "job.json")["started_at"], read(path.parent, "summary.json")
        assert summary["jobs_at_once"] == 2
        workers = read(path.parent, "plan.json")["world_size"]
        found.append((start_s, start_s + summary["wall_s"], workers))
    assert len(found) == 6
    for moment, _, _ in found:
        assert sum(workers for start_s, end_s, workers in found if start_s <= moment < end_s) <= 2
    assert sweep(*grid) == 0
    assert metrics_of(side_by_side) == metrics_of(only_sweep(here))


def metrics_of(folder: Path) -> dict[str, list[tuple[str, int, float]]]:
    """The losses and metrics of each job, with all their digits, and a digest of its weights."""
    found = {}
    for job in (path.parent for path in folder.glob("*/summary.json")):
        logged = [(m.key, m.step, m.value) for m in MetricsReader(job).read()]
        values = [one for one in logged if one[0].startswith(("train/loss", "eval/"))]
        (weights,) = job.glob("model/*.safetensors")
        found[read(job, "summary.json")["setup"]] = [
            (hashlib.sha256(weights.read_bytes()).hexdigest(), 0, 0.0),
            *values,
        ]
    return found


@pytest.mark.long
def test_joblib_is_interrupted(here: Path) -> None:
    """Ctrl-C while two jobs train: both KILLED, no process left; another launcher can resume the sweep."""
    process = start_two_held(here, *JOBLIB, "seed=0,1,2")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=TIMEOUT_S) == 130, output(here)
    assert left_of_session(process.pid) == []
    assert [status for _, status in attempts(here)] == ["KILLED", "KILLED"]
    assert statuses(here) == ("KILLED", ["KILLED", "KILLED"])
    for job in (0, 1):
        release(here, 2, job)
    assert sweep("seed=0,1,2", f"resume_sweep={only_sweep(here).name}") == 0
    assert statuses(here) == ("FINISHED", ["FINISHED"] * 3 + ["KILLED"] * 2)


#: In place of Slurm: jobs in processes of their own.
SUBMITIT = ["hydra/launcher=submitit_local", "seed=0,1"]


@pytest.mark.long
def test_submitit_is_interrupted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt of the command alone ends its jobs, too; and no file of theirs holds a password."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here / 'outputs' / 'mlflow.db'}?some_token=hunter2")
    process = start_two_held(here, *SUBMITIT)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=TIMEOUT_S) == 130, output(here)
    assert left_of_session(process.pid) == []
    assert [status for _, status in attempts(here)] == ["PREEMPTED", "PREEMPTED"]
    files = [path for path in (here / "outputs").rglob("*") if path.is_file() and path.suffix != ".db"]
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


@pytest.mark.long
def test_jobs_that_outlive_their_sweep(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command is killed, its jobs train on: none is started a second time, and they count when they are done."""
    process = start_two_held(here, *SUBMITIT)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resume = ["seed=0,1", f"resume_sweep={only_sweep(here).name}"]
    assert sweep(*resume) == cli.EXIT_USER_ERROR
    assert "still running" in capsys.readouterr().err
    for job in (0, 1):
        release(here, 2, job)
    wait_until(lambda: sorted(status for _, status in attempts(here)) == ["FINISHED"] * 2, "the jobs do not end")
    wait_until(lambda: sweep(*resume) == 0, "the jobs keep their locks")
    assert len(attempts(here)) == 2
    assert statuses(here) == ("FINISHED", ["FINISHED"] * 2)


@pytest.mark.long
def test_job_process_that_is_killed(here: Path) -> None:
    """By the scheduler: the other job counts, and the sweep says how to run the rest, and that it is worth it."""
    process = start_two_held(here, *SUBMITIT)
    victim = next(path.parent for path in here.glob("outputs/sweeps/*/*/job.json"))
    os.kill(read(victim, ".lock")["pid"], signal.SIGTERM)
    wait_until(lambda: (victim / "summary.json").exists(), "the job does not end")
    for job in (0, 1):
        (here / f"hold-{job}-2").unlink(missing_ok=True)
    assert process.wait(timeout=TIMEOUT_S) == EXIT_PREEMPTED, output(here)
    assert sorted(status for _, status in attempts(here)) == ["FINISHED", "PREEMPTED"]
    assert "1 of 2 jobs finished" in output(here)
    assert "resume_sweep=" in output(here)
    assert statuses(here)[0] == "FAILED"
