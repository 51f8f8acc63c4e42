"""Sweeps by the command line: parent and jobs in folder and store, what fails, what is interrupted, and going on."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from runner import cli
from runner.compare.from_folders import run_folders
from runner.config.compose import compose
from runner.config.hydra_options import HydraOptions
from runner.errors import UserError
from runner.folder.lock import is_locked
from runner.folder.metrics_log import MetricsReader
from runner.run.preflight import sweep_preflight
from runner.sweep import command
from tests.processes import start_noted, still_alive_in_session
from tests.replicas import TINY
from tests.sweep.gated import GATED, begun, hold, release, wait_until

#: Jobs of three optimizer steps.
QUICK = [*GATED, "epochs=3"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder. The comparison at the end of a sweep takes seconds: the sweep of `swept` has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_compare", lambda *_: None)
    return tmp_path


def sweep(*overrides: str) -> int:
    """A sweep in this process; the exit code."""
    return cli.main(["-m", *QUICK, *overrides], time.time())


def swept_in(root: Path, *overrides: str) -> Path:
    """A folder in which a sweep was run, without a mistake."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert sweep(*overrides) == 0
    return root


def start(root: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """A sweep in a session of its own; what it says goes to files."""
    return start_noted(root, "-m", "runner", "-m", *QUICK, *overrides)


def said(root: Path) -> str:
    return (root / "out.txt").read_text() + (root / "err.txt").read_text()


def comes_to(root: Path, job: int, step: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until this job of the sweep waits before this step."""

    def there() -> bool:
        assert process.poll() is None, said(root)
        return (root / f"at-{job}-{step}").exists()

    wait_until(there, f"job {job} never came to step {step}")


def only_sweep(root: Path) -> Path:
    (folder,) = (root / "outputs" / "sweeps").iterdir()
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'outputs' / 'mlflow.db'}")


def family(root: Path) -> tuple[Run, list[Run]]:
    """The only parent run in the store, and its jobs; there is no other run."""
    store = client(root)
    found = store.search_runs([e.experiment_id for e in store.search_experiments()], order_by=["start_time"])
    (parent,) = (run for run in found if "mlflow.parentRunId" not in run.data.tags)
    jobs = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(jobs) == len(found) - 1
    return parent, jobs


def statuses(root: Path) -> tuple[str, list[str]]:
    parent, jobs = family(root)
    return parent.info.status, sorted(job.info.status for job in jobs)


def attempts(root: Path) -> list[tuple[str, str]]:
    """Of every job's folder its name and how the attempt in it ended."""
    return sorted((path.parent.name, read(path)["status"]) for path in only_sweep(root).glob("*/summary.json"))


def has_all_metrics(root: Path, job: Run) -> None:
    """The store has what `metrics.jsonl` of this job's folder has, and no value more."""
    (folder,) = (
        path.parent
        for path in only_sweep(root).glob("*/summary.json")
        if read(path).get("mlflow_run_id") == job.info.run_id
    )
    logged = sorted((m.key, m.step, m.timestamp, m.value) for m in MetricsReader(folder).read())
    store = client(root)
    stored = sorted(
        (m.key, m.step, m.timestamp, m.value)
        for key in {metric[0] for metric in logged}
        for m in store.get_metric_history(job.info.run_id, key)
    )
    assert stored == logged != []


# --- What a sweep leaves ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a sweep of four jobs was run, with a cache of its own."""
    return swept_in(tmp_path_factory.mktemp("swept"), "seed=0,1", "optimizer.lr=0.01,0.02", "cache_dir=cache")


def test_jobs_are_children_of_the_sweep(swept: Path) -> None:
    """One parent run, and below it each job under the values that it varies; all are found by the sweep's id."""
    parent, jobs = family(swept)
    identifier = only_sweep(swept).name
    tags = parent.data.tags
    assert (parent.info.status, tags["sweep.id"], tags["sweep.varied"]) == (
        "FINISHED",
        identifier,
        "seed, optimizer.lr",
    )
    counts = {name: tags[f"sweep.{name}"] for name in ("jobs", "finished", "failed", "killed")}
    assert counts == {"jobs": "4", "finished": "4", "failed": "0", "killed": "0"}
    assert [job.info.status for job in jobs] == ["FINISHED"] * 4
    varied = [{k: v for k, v in job.data.tags.items() if k.startswith(("varied.", "sweep."))} for job in jobs]
    assert varied == [
        {"sweep.id": identifier, "varied.seed": seed, "varied.optimizer.lr": lr}
        for seed in ("0", "1")
        for lr in ("0.01", "0.02")
    ]
    assert [(job.data.params["seed"], job.data.params["lr"]) for job in jobs] == [
        (seed, lr) for seed in ("0", "1") for lr in ("0.01", "0.02")
    ]
    assert parent.info.start_time <= jobs[0].info.start_time
    assert parent.info.end_time >= jobs[-1].info.end_time


def test_every_job_has_a_folder_and_its_metrics(swept: Path) -> None:
    """Folders 0 to 3, each a whole run that knows what it varies; the store has the metrics of each, and no other."""
    assert attempts(swept) == [(str(number), "FINISHED") for number in range(4)]
    for number, (seed, lr) in enumerate((seed, lr) for seed in ("0", "1") for lr in ("0.01", "0.02")):
        folder = only_sweep(swept) / str(number)
        assert read(folder / "summary.json")["varied"] == {"seed": seed, "optimizer.lr": lr}
        assert read(folder / "ledger.json")["sound"] is True
        assert (folder / "model" / "model.safetensors").exists()
    for job in family(swept)[1]:
        has_all_metrics(swept, job)


def test_the_parents_files_are_the_sweeps(swept: Path) -> None:
    """The parent run holds the sweep's own description and the comparison, and nothing that only running needs."""
    parent, _ = family(swept)
    files = {item.path for item in client(swept).list_artifacts(parent.info.run_id) if not item.is_dir}
    assert "sweep.json" in files
    assert "compare/report.html" in {item.path for item in client(swept).list_artifacts(parent.info.run_id, "compare")}
    assert not [name for name in files if name.startswith(".")]
    described = read(only_sweep(swept) / "sweep.json")
    assert described["id"] == only_sweep(swept).name
    assert (described["total"], described["varied"]) == (4, ["seed", "optimizer.lr"])


def test_imports_and_data_are_paid_for_once(swept: Path) -> None:
    """All jobs' workers come from one forkserver, and the data are tokenised by the first only."""
    assert len(begun(swept)) == 4
    assert len(set(begun(swept))) == 1
    assert len((swept / "tokenised.txt").read_text().split()) == 1
    assert len([path for path in (swept / "cache").iterdir() if path.is_dir()]) == 1


# --- Jobs that fail -----------------------------------------------------------------------------------------


def test_a_job_that_cannot_be(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch that three workers cannot share: FAILED with the sentence in folder and store, exit code 2."""
    sizes = ["batch=fixed_global", "batch.micro_batch=null", "batch.global_batch=8"]
    assert sweep(*sizes, "device.workers=1,3,2") == cli.EXIT_USER_ERROR
    err = capsys.readouterr().err
    assert "2 of 3 jobs finished" in err
    assert "Traceback" not in err
    parent, jobs = family(here)
    assert parent.info.status == "FAILED"
    assert [job.info.status for job in jobs] == ["FINISHED", "FAILED", "FINISHED"]
    failed = jobs[1].data.tags
    assert "batch.global_batch=8" in failed["error"]
    assert failed["error"] in err.replace("\n", " ")
    assert (failed["varied.device.workers"], failed["sweep.id"]) == ("3", only_sweep(here).name)
    summary = read(only_sweep(here) / "1" / "summary.json")
    assert (summary["status"], summary["error"], summary["user_error"]) == ("FAILED", failed["error"], True)


def test_a_job_that_breaks_is_run_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error in a worker: exit code 1, the others run; `resume_sweep` runs this job only, and all is FINISHED."""
    (here / "fail").touch()
    assert sweep("seed=0,1") == cli.EXIT_FAILED
    identifier = only_sweep(here).name
    err = capsys.readouterr().err
    assert "1 of 2 jobs finished" in err
    assert f"resume_sweep={identifier}" in err
    parent, jobs = family(here)
    assert (parent.info.status, parent.data.tags["sweep.failed"]) == ("FAILED", "1")
    assert [job.info.status for job in jobs] == ["FAILED", "FINISHED"]
    assert jobs[0].data.tags["error"] == "RuntimeError: broken on purpose"
    assert sweep("seed=0,1", f"resume_sweep={identifier}") == 0
    assert len(begun(here)) == 3
    assert "2 of 2 jobs done" in capsys.readouterr().out
    assert attempts(here) == [("0", "FAILED"), ("0-2", "FINISHED"), ("1", "FINISHED")]
    again, jobs = family(here)
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")
    assert (again.data.tags["sweep.failed"], again.data.tags["sweep.finished"]) == ("0", "2")
    assert sorted(job.info.status for job in jobs) == ["FAILED", "FINISHED", "FINISHED"]


# --- Sweeps that are interrupted ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["interrupted", "killed"])
def test_an_interrupted_sweep_goes_on(end: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C, or the end of all its processes, in the second of three jobs: going on runs that one and the third."""
    hold(here, 2, job=1)
    process = start(here, "seed=0,1,2")
    comes_to(here, 1, 2, process)
    identifier = only_sweep(here).name
    # Meanwhile a second command is refused.
    assert sweep("seed=0,1,2", f"resume_sweep={identifier}") == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.err.strip() == (
        f"error: the sweep {identifier} is still running: wait for it, or interrupt it first"
    )
    assert captured.out == ""
    os.killpg(process.pid, signal.SIGINT if end == "interrupted" else signal.SIGKILL)
    code = process.wait(timeout=60)
    assert still_alive_in_session(process.pid) == []
    assert not (only_sweep(here) / "2").exists()
    parent, _ = family(here)
    if end == "interrupted":
        assert code == 130
        assert "Traceback" not in said(here)
        assert f"resume_sweep={identifier}" in said(here)
        assert attempts(here) == [("0", "FINISHED"), ("1", "KILLED")]
        assert statuses(here) == ("KILLED", ["FINISHED", "KILLED"])
    else:
        assert attempts(here) == [("0", "FINISHED")]
        assert statuses(here) == ("RUNNING", ["FINISHED", "RUNNING"])
    release(here, 2, job=1)
    assert sweep("seed=0,1,2", f"resume_sweep={identifier}") == 0
    assert len(begun(here)) == 4
    assert attempts(here) == [("0", "FINISHED"), ("1", "KILLED"), ("1-2", "FINISHED"), ("2", "FINISHED")]
    again, jobs = family(here)
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")
    assert sorted((job.data.tags["varied.seed"], job.info.status) for job in jobs) == [
        ("0", "FINISHED"),
        ("1", "FINISHED"),
        ("1", "KILLED"),
        ("2", "FINISHED"),
    ]
    assert "3 of 3 jobs done" in capsys.readouterr().out


def test_more_seeds_than_before(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same sweep with a further seed runs only that one, wherever it stands among the others."""
    assert sweep("seed=0,1") == 0
    assert sweep("seed=2,0,1", f"resume_sweep={only_sweep(here).name}") == 0
    assert "3 of 3 jobs done" in capsys.readouterr().out
    assert len(begun(here)) == 3
    parent, jobs = family(here)
    assert sorted(job.data.params["seed"] for job in jobs) == ["0", "1", "2"]
    assert (parent.info.status, parent.data.tags["sweep.jobs"]) == ("FINISHED", "3")
    assert sorted(read(path)["seed"] for path in only_sweep(here).glob("*/summary.json")) == [0, 1, 2]


def test_a_sweep_is_named_by_id_run_or_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its id, its MLflow run, its folder: each finds it, and a finished sweep has nothing left to run."""
    assert sweep("seed=0") == 0
    parent, _ = family(here)
    folder = only_sweep(here)
    for name in (folder.name, parent.info.run_id, str(folder), os.path.relpath(folder)):
        capsys.readouterr()
        assert sweep("seed=0", f"resume_sweep={name}") == 0
        assert "1 of 1 jobs done" in capsys.readouterr().out
    assert len(begun(here)) == 1
    assert attempts(here) == [("0", "FINISHED")]
    assert statuses(here) == ("FINISHED", ["FINISHED"])


def test_the_same_jobs_typed_in_another_order(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job is what it sets, not how it is typed: nothing is run again, and all of it is counted as done."""
    assert sweep("seed=0,1", "optimizer.lr=0.02") == 0
    capsys.readouterr()
    assert sweep("optimizer.lr=0.02", "seed=1,0", f"resume_sweep={only_sweep(here).name}") == 0
    assert len(begun(here)) == 2
    assert "2 of 2 jobs done" in capsys.readouterr().out
    parent, _ = family(here)
    assert (parent.info.status, parent.data.tags["sweep.finished"]) == ("FINISHED", "2")


def test_other_settings_are_run(here: Path) -> None:
    """Going on with another number of epochs is no job that was done before."""
    assert sweep("seed=0") == 0
    assert sweep("seed=0", "epochs=2", f"resume_sweep={only_sweep(here).name}") == 0
    assert len(begun(here)) == 2


def test_a_sweep_without_a_store(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tracking=none`: no store is made, and the sweep goes on all the same."""
    assert sweep("tracking=none", "seed=0,1") == 0
    assert sweep("tracking=none", "seed=0,1,2", f"resume_sweep={only_sweep(here).name}") == 0
    assert "3 of 3 jobs done" in capsys.readouterr().out
    assert len(begun(here)) == 3
    assert attempts(here) == [("0", "FINISHED"), ("1", "FINISHED"), ("2", "FINISHED")]
    assert [path.name for path in (here / "outputs").iterdir()] == ["sweeps"]


# --- What cannot be gone on with ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of one job, without a store."""
    named = "hydra.sweep.dir=outputs/sweeps/2026-01-02_03-04-05-abcd"
    return swept_in(tmp_path_factory.mktemp("done"), "tracking=none", "seed=0", named)


#: What is typed, and what the sentence must name.
WRONG: list[tuple[list[str], list[str]]] = [
    (["-m", "resume_sweep=nonsense"], ["resume_sweep=nonsense", "outputs/sweeps"]),
    (["-m", "resume_sweep=2026-01-02_03-04-05-abce"], ["'2026-01-02_03-04-05-abcd'"]),
    (["-m", "resume_sweep=2026"], ["resume_sweep=2026 "]),
    (["-m", "resume_sweep=outputs/sweeps"], ["resume_sweep=outputs/sweeps "]),
    (["-m", "resume_sweep=outputs/sweeps/2026-01-02_03-04-05-abcd/0"], ["is not a sweep"]),
    (["-m", "resume_sweep=*"], ["resume_sweep=*"]),
    (["-m", "resume_sweep=.."], ["resume_sweep=.."]),
    (["-m", "resume_sweep="], ["resume_sweep="]),
    (["-m", "resume_sweep"], ["resume_sweep"]),
    (["-m", "resume_sweep=2026-01-02_03-04-05-abcd,other"], ["not one sweep"]),
    (["-m", "resume_sweep=2026-01-02_03-04-05-abcd", "resume_sweep=other"], ["not one sweep"]),
    (["-m", "~resume_sweep"], ["resume_sweep"]),
    (["-m", "resume_sweep=2026-01-02_03-04-05-abcd", "device=gpux"], ["device=gpux"]),
    (["-m", "resume_sweep=2026-01-02_03-04-05-abcd", "hydra.sweep.dir=elsewhere/x"], ["elsewhere", "no sweeps"]),
    (["resume_sweep=2026-01-02_03-04-05-abcd"], ["add -m"]),
    (["resume_sweep=nonsense"], ["add -m"]),
    (["-m", "hydra.sweep.dir=outputs/sweeps/2026-01-02_03-04-05-abcd"], ["holds a sweep already", "resume_sweep="]),
    (["-m", "resum_sweep=2026-01-02_03-04-05-abcd"], ["resum_sweep"]),
]


@pytest.mark.parametrize(("typed", "named"), WRONG, ids=[" ".join(typed) for typed, _ in WRONG])
def test_what_is_no_sweep(
    typed: list[str],
    named: list[str],
    done: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each ends with exit code 2 and one sentence; nothing is run, and nothing made or changed."""
    monkeypatch.chdir(done)
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    assert cli.main([*QUICK, "tracking=none", "seed=0", *typed], time.time()) == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    for part in named:
        assert part in line
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before


def test_a_plan_is_of_no_sweep(done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`runner.plan` trains nothing, and so has nothing to go on with: one sentence, with and without -m."""
    monkeypatch.chdir(done)
    for option in ([], ["-m"]):
        assert cli.plan_main([*QUICK, *option, "resume_sweep=2026-01-02_03-04-05-abcd"]) == cli.EXIT_USER_ERROR
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")


# --- Other launchers and sweepers ---------------------------------------------------------------------------


@pytest.mark.long
def test_two_jobs_at_once(here: Path) -> None:
    """joblib with two processes: jobs that write at the same time mix up neither metrics nor lines; going on works."""
    (here / "meet").touch()  # the first two jobs wait for each other
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "epochs=100"]
    process = start(here, *launcher, "seed=0,1,2,3")
    assert process.wait(timeout=180) == 0, said(here)
    assert "locked" not in said(here)
    assert "Traceback" not in said(here)
    parent, jobs = family(here)
    assert (parent.info.status, parent.data.tags["sweep.finished"]) == ("FINISHED", "4")
    assert sorted(job.data.tags["varied.seed"] for job in jobs) == ["0", "1", "2", "3"]
    for job in jobs:
        assert job.info.status == "FINISHED"
        has_all_metrics(here, job)
    lines = [line for line in (here / "out.txt").read_text().splitlines() if line.startswith("finished")]
    assert sorted(line.split()[1] for line in lines) == [f"seed={seed}" for seed in range(4)]
    assert "4 of 4 jobs done" in lines[-1]
    for path in only_sweep(here).glob("*/summary.json"):
        assert read(path)["jobs_at_once"] == 2
        seed = read(path)["seed"]
        text = (path.parent / "console.log").read_text()
        assert f"finished cpu · s{seed}" in text
        assert set(re.findall(r"seed=(\d)", text)) == set(re.findall(r"cpu · s(\d)", text)) == {str(seed)}
    assert start(here, *launcher, "seed=0,1,2,3,4", f"resume_sweep={only_sweep(here).name}").wait(timeout=180) == 0
    assert len(begun(here)) == 5
    assert statuses(here) == ("FINISHED", ["FINISHED"] * 5)


@pytest.mark.long
def test_jobs_at_once_are_interrupted(here: Path) -> None:
    """Ctrl-C while two jobs train under joblib: both KILLED, nobody left behind; another launcher can go on with it."""
    for job in (0, 1):  # each may find itself to be the first
        hold(here, 2, job)
    process = start(here, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1,2")

    def both_train() -> bool:
        assert process.poll() is None, said(here)
        return len(list(here.glob("outputs/sweeps/*/*/metrics.jsonl"))) == 2

    wait_until(both_train, f"two jobs never trained: {said(here)}")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130, said(here)
    assert still_alive_in_session(process.pid) == []
    assert [status for _, status in attempts(here)] == ["KILLED", "KILLED"]
    assert statuses(here) == ("KILLED", ["KILLED", "KILLED"])
    for job in (0, 1):
        release(here, 2, job)
    assert sweep("seed=0,1,2", f"resume_sweep={only_sweep(here).name}") == 0
    assert statuses(here) == ("FINISHED", ["FINISHED"] * 3 + ["KILLED"] * 2)


@pytest.mark.long
def test_jobs_under_submitit(here: Path) -> None:
    """submitit's local executor, as a stand-in for Slurm: jobs in processes of their own, one of which fails."""
    (here / "fail").touch()
    process = start(here, "hydra/launcher=submitit_local", "seed=0,1")
    assert process.wait(timeout=180) == cli.EXIT_FAILED, said(here)
    assert sorted(status for _, status in attempts(here)) == ["FAILED", "FINISHED"]
    assert statuses(here) == ("FAILED", ["FAILED", "FINISHED"])
    assert "1 of 2 jobs finished" in said(here)
    for job in family(here)[1]:
        assert (job.info.status == "FAILED") == (job.data.tags.get("error") == "RuntimeError: broken on purpose")
        if job.info.status == "FINISHED":
            has_all_metrics(here, job)


def held_under_submitit(here: Path) -> subprocess.Popen[bytes]:
    """A sweep whose two jobs are processes of their own that wait before their second step."""
    for job in (0, 1):
        hold(here, 2, job)
    process = start(here, "hydra/launcher=submitit_local", "seed=0,1")

    def both_train() -> bool:
        assert process.poll() is None, said(here)
        return len(list(here.glob("outputs/sweeps/*/*/metrics.jsonl"))) == 2

    wait_until(both_train, f"two jobs never trained: {said(here)}")
    return process


@pytest.mark.long
def test_jobs_elsewhere_end_with_their_sweep(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt of the command alone ends its jobs in good order; and no file of theirs holds a password."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here / 'outputs' / 'mlflow.db'}?some_token=hunter2")
    process = held_under_submitit(here)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=90) == 130, said(here)
    assert still_alive_in_session(process.pid) == []
    assert [status for _, status in attempts(here)] == ["KILLED", "KILLED"]
    files = [path for path in (here / "outputs").rglob("*") if path.is_file() and path.suffix != ".db"]
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


@pytest.mark.long
def test_jobs_that_outlive_their_sweep(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command is killed, its jobs train on: nobody starts them a second time, and they count when they are done."""
    process = held_under_submitit(here)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = f"resume_sweep={only_sweep(here).name}"
    assert sweep("seed=0,1", resumed) == cli.EXIT_USER_ERROR
    assert "are still running (seed=" in capsys.readouterr().err
    for job in (0, 1):
        release(here, 2, job)
    wait_until(lambda: sorted(s for _, s in attempts(here)) == ["FINISHED"] * 2, "the jobs do not end")
    wait_until(
        lambda: not any(is_locked(path.parent) for path in here.glob("outputs/sweeps/*/*/job.json")), "still held"
    )
    assert sweep("seed=0,1", resumed) == 0
    assert len(attempts(here)) == 2
    assert statuses(here) == ("FINISHED", ["FINISHED"] * 2)


@pytest.mark.long
def test_a_job_process_that_dies_is_one_failed_job(here: Path) -> None:
    """The scheduler or the system kills one of two jobs: the other's result counts, and the sweep says what is left."""
    process = held_under_submitit(here)
    victim = next(path.parent for path in here.glob("outputs/sweeps/*/*/job.json"))
    os.kill(read(victim / ".lock")["pid"], signal.SIGTERM)
    wait_until(lambda: not is_locked(victim), "the job does not end")
    for job in (0, 1):
        (here / f"hold-{job}-2").unlink(missing_ok=True)
    assert process.wait(timeout=90) == cli.EXIT_FAILED, said(here)
    assert sorted(status for _, status in attempts(here)) == ["FINISHED", "KILLED"]
    assert "1 of 2 jobs finished" in said(here)
    assert "resume_sweep=" in said(here)
    assert statuses(here)[0] == "FAILED"


def test_a_failed_trial_is_no_end_of_an_optimizing_sweep(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the trials those that cannot be run fail, and the others are made all the same."""
    drawn = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=1",
    ]
    assert sweep(*drawn, "precision=choice(fp32,tf32)") == cli.EXIT_USER_ERROR
    ended = [status for _, status in attempts(here)]
    assert len(ended) == 4
    assert set(ended) == {"FAILED", "FINISHED"}
    assert "1 of 2 jobs finished" in capsys.readouterr().err  # of four trials two were drawn again


def test_a_value_that_is_given_twice(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is one job, and counts as one."""
    assert sweep("seed=0,0") == 0
    assert "1 of 1 jobs done" in capsys.readouterr().out
    assert len(attempts(here)) == 1


def test_a_sweep_goes_on_in_its_own_store(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With another store, here that of another folder, it is refused: half of it would be missing in each."""
    assert sweep("seed=0") == 0
    folder = only_sweep(here)
    (here / "elsewhere").mkdir()
    os.chdir(here / "elsewhere")
    assert sweep("seed=0,1", f"resume_sweep={folder}") == cli.EXIT_USER_ERROR
    assert "resume it from the same folder" in capsys.readouterr().err
    assert list((here / "elsewhere").iterdir()) == []


def test_jobs_in_deeper_folders(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A subdir of one's own may have slashes: the jobs are counted, compared, and not run twice."""
    deeper = "hydra.sweep.subdir=jobs/${hydra.job.num}"
    assert sweep("seed=0,1", deeper) == 0
    assert "2 of 2 jobs done" in capsys.readouterr().out
    assert len(run_folders(only_sweep(here))) == 2
    assert sweep("seed=0,1", deeper, f"resume_sweep={only_sweep(here).name}") == 0
    assert len(list(only_sweep(here).glob("jobs/*/summary.json"))) == 2


def test_optuna_optimises_the_recipes_metric(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three trials, each a job of the sweep; the best is the one with the lowest loss."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    drawn = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler.seed=1"]
    assert sweep(*drawn, "optimizer.lr=interval(0.001,0.1)") == 0
    assert "3 of 3 jobs done" in capsys.readouterr().out
    summaries = [read(path) for path in only_sweep(here).glob("*/summary.json")]
    best = min(summaries, key=lambda summary: summary["eval"]["loss"])
    result = yaml.safe_load((only_sweep(here) / "optimization_results.yaml").read_text())
    assert result["best_value"] == best["eval"]["loss"]
    assert result["best_params"] == {"optimizer.lr": float(best["varied"]["optimizer.lr"])}
    parent, jobs = family(here)
    assert (parent.info.status, parent.data.tags["sweep.jobs"]) == ("FINISHED", "3")
    assert {job.data.tags["varied.optimizer.lr"] for job in jobs} == {s["varied"]["optimizer.lr"] for s in summaries}


def test_optuna_goes_on_after_a_run_that_diverged(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trial whose loss is no number is a failed one, and the others are drawn all the same."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    drawn = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=3"]
    assert sweep(*drawn, "optimizer.lr=choice(1e300,0.01,0.02)") == 0
    assert "3 of 3 jobs done" in capsys.readouterr().out
    losses = [read(path)["eval"]["loss"] for path in only_sweep(here).glob("*/summary.json")]
    assert sum(map(math.isfinite, losses)) == 2
    result = yaml.safe_load((only_sweep(here) / "optimization_results.yaml").read_text())
    assert result["best_value"] == min(filter(math.isfinite, losses))


def test_a_sweeper_that_gives_up(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not all jobs were drawn: an exit code that says so, and no finished sweep in the store."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    import optuna

    def out_of_ideas(*_: object, **__: object) -> None:
        raise RuntimeError("no more ideas")

    monkeypatch.setattr(optuna.study.Study, "tell", out_of_ideas)
    drawn = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    assert sweep(*drawn, "optimizer.lr=interval(0.001,0.1)") == cli.EXIT_FAILED
    assert "did not run to its end: no more ideas" in capsys.readouterr().err
    assert family(here)[0].info.status == "FAILED"


@pytest.mark.parametrize(("recipe", "direction"), [(TINY, "maximize"), (QUICK, "minimize")], ids=["accuracy", "loss"])
def test_optuna_goes_the_recipes_way(here: Path, recipe: list[str], direction: str) -> None:
    """Optuna minimises unless it is told otherwise: what Hydra is given follows the recipe's goal, and the opposite is
    refused."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    drawn = ["-m", *recipe, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "optimizer.lr=interval(0.001,0.1)"]
    options = HydraOptions(drawn)
    sweep_preflight(options, time.time())
    given = [override for override in options.ordered if not override.startswith(("-", "optimizer.lr"))]
    assert direction in str(compose(given).hydra.sweeper.direction)
    other = {"maximize": "minimize", "minimize": "maximize"}[direction]
    with pytest.raises(UserError, match=f"hydra.sweeper.direction={other}"):
        sweep_preflight(HydraOptions([*drawn, f"hydra.sweeper.direction={other}"]), time.time())
