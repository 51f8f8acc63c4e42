"""Sweeps: parent and jobs in folder and store, failures, interruptions, resuming, and other launchers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner import cli
from runner.config.arguments import HydraOptions
from runner.config.compose import compose
from runner.errors import UserError
from runner.tools.sweep.grid import Launcher
from runner.tools.sweep.preflight import prepare_sweep
from tests import processes
from tests.end_to_end.sweeps import (
    QUICK,
    SHORT,
    assert_metrics_complete,
    attempts,
    family,
    only_sweep,
    start,
    statuses,
    sweep,
)
from tests.processes import TIMEOUT_S, left_of_session, output, wait_until
from tests.replicas import TINY
from tests.runs import read, store
from tests.tools.sweep.gated import begun, hold, release

pytestmark = pytest.mark.usefixtures("without_comparison")


def swept_in(root: Path, *overrides: str) -> Path:
    """A folder in which a sweep has finished."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert sweep(*overrides) == 0
    return root


# --- What a sweep leaves ------------------------------------------------------------------------------------

GRID = [(seed, lr) for seed in ("0", "1") for lr in ("0.01", "0.02")]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a sweep of four jobs was run, with a cache of its own."""
    return swept_in(tmp_path_factory.mktemp("swept"), "seed=0,1", "optimizer.lr=0.01,0.02", "cache_dir=cache")


def test_jobs_are_children_of_the_sweep(swept: Path) -> None:
    """A parent run with counts, and as its children the jobs with the values that vary, in the order of the grid."""
    parent, jobs = family(swept)
    identifier, tags = only_sweep(swept).name, parent.data.tags
    assert (parent.info.status, tags["sweep.id"], tags["sweep.varied"]) == (
        "FINISHED",
        identifier,
        "seed, optimizer.lr",
    )
    assert parent.info.run_name == "sweep · linear · seed × optimizer.lr"
    assert [tags[f"sweep.{name}"] for name in ("jobs", "finished", "failed", "killed")] == ["4", "4", "0", "0"]
    assert [job.info.status for job in jobs] == ["FINISHED"] * 4
    varied = [{k: v for k, v in job.data.tags.items() if k.startswith(("varied.", "sweep."))} for job in jobs]
    assert varied == [{"sweep.id": identifier, "varied.seed": seed, "varied.optimizer.lr": lr} for seed, lr in GRID]
    assert [(job.data.params["seed"], job.data.params["lr"]) for job in jobs] == GRID
    names = [job.info.run_name.split(" · linear")[0] for job in jobs]
    assert names == [f"lr={lr} · s{seed} · cpu" for seed, lr in GRID]
    assert parent.info.start_time <= jobs[0].info.start_time
    assert parent.info.end_time >= jobs[-1].info.end_time
    for job in jobs:
        assert_metrics_complete(swept, job)


def test_every_job_has_a_folder(swept: Path) -> None:
    assert attempts(swept) == [(str(number), "FINISHED") for number in range(4)]
    for number, (seed, lr) in enumerate(GRID):
        folder = only_sweep(swept) / str(number)
        assert read(folder, "summary.json")["varied"] == {"seed": seed, "optimizer.lr": lr}
        assert read(folder, "ledger.json")["sound"] is True
        assert (folder / "model" / "model.safetensors").exists()


def test_parent_run_has_the_sweeps_files(swept: Path) -> None:
    """Its description and the comparison, and no hidden files."""
    parent, _ = family(swept)
    files = {item.path for item in store(swept).list_artifacts(parent.info.run_id) if not item.is_dir}
    assert "sweep.json" in files
    compared = {item.path for item in store(swept).list_artifacts(parent.info.run_id, "compare")}
    assert "compare/report.html" in compared
    assert not [name for name in files if name.startswith(".")]
    described = read(only_sweep(swept), "sweep.json")
    assert described["id"] == only_sweep(swept).name
    assert (described["total"], described["varied"]) == (4, ["seed", "optimizer.lr"])


def test_imports_and_tokenisation_happen_once(swept: Path) -> None:
    """All jobs' workers are forked by one process, and the data are tokenised by the first job only."""
    assert len(begun(swept)) == 4
    assert len(set(begun(swept))) == 1
    assert len((swept / "tokenised.txt").read_text().split()) == 1
    assert len([path for path in (swept / "cache").iterdir() if path.is_dir()]) == 1


def test_kbatch(here: Path) -> None:
    """`sweep=kbatch` with own lists: one worker, and two workers that synchronise every other step."""
    recipe = [override for override in TINY if not override.startswith("batch")]
    lists = ["sweep=kbatch", "device=cpu2", "setup=one,k2", "seed=0", "batch.micro_batch=8", "max_steps=4"]
    assert sweep(*lists, base=recipe) == 0
    assert [status for _, status in attempts(here)] == ["FINISHED", "FINISHED"]
    plans = [read(only_sweep(here) / job, "plan.json") for job in ("0", "1")]
    assert [(plan["world_size"], plan["k"], plan["global_batch"]) for plan in plans] == [(1, 1, 8), (2, 2, 16)]


# --- Jobs that fail -----------------------------------------------------------------------------------------


def test_job_with_invalid_settings(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found on the machine of the job: FAILED with the reason in folder and store, the others run, exit 2."""
    elsewhere = Launcher(1, here=False, in_process=True)
    monkeypatch.setattr("runner.tools.sweep.preflight.launcher_of", lambda hydra, jobs, configs: elsewhere)
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
    assert (failed["varied.device.workers"], failed["sweep.id"]) == ("3", only_sweep(here).name)
    summary = read(only_sweep(here) / "1", "summary.json")
    assert (summary["status"], summary["error"], summary["user_error"]) == ("FAILED", failed["error"], True)


def test_a_job_for_which_nothing_fits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accumulation=fit` on the job's machine: it does not train as if nothing had been said."""
    elsewhere = Launcher(1, here=False, in_process=True)
    monkeypatch.setattr("runner.tools.sweep.preflight.launcher_of", lambda hydra, jobs, configs: elsewhere)
    monkeypatch.setattr("runner.measure.fitting.available_memory", lambda device, workers: None)
    assert sweep("seed=0,1", "accumulation=fit") == cli.EXIT_USER_ERROR
    assert [status for _, status in attempts(here)] == ["FAILED", "FAILED"]


def test_failed_job_is_run_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error in a worker: exit code 1, the others run; `resume_sweep` runs this job only, and all is FINISHED."""
    (here / "fail").touch()
    assert sweep("seed=0,1") == cli.EXIT_FAILED
    identifier = only_sweep(here).name
    assert f"resume_sweep={identifier}" in capsys.readouterr().err
    parent, jobs = family(here)
    assert (parent.info.status, parent.data.tags["sweep.failed"]) == ("FAILED", "1")
    assert [job.info.status for job in jobs] == ["FAILED", "FINISHED"]
    assert jobs[0].data.tags["error"] == "RuntimeError: broken on purpose"
    assert sweep("seed=0,1", f"resume_sweep={identifier}") == 0
    assert attempts(here) == [("0", "FAILED"), ("0-2", "FINISHED"), ("1", "FINISHED")]
    again, jobs = family(here)
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")
    assert (again.data.tags["sweep.failed"], again.data.tags["sweep.finished"]) == ("0", "2")
    assert sorted(job.info.status for job in jobs) == ["FAILED", "FINISHED", "FINISHED"]


# --- Resuming -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("end", ["interrupted", "killed"])
def test_interrupted_sweep_is_resumed(end: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C, or SIGKILL for all its processes, in the second of three jobs: resuming runs that one and the third."""
    hold(here, 2, job=1)
    process = start(here, "seed=0,1,2")
    processes.wait_for_gate(here, 2, process, job=1)
    resume = ["seed=0,1,2", f"resume_sweep={only_sweep(here).name}"]
    assert sweep(*resume) == cli.EXIT_USER_ERROR
    assert "still running" in capsys.readouterr().err
    os.killpg(process.pid, signal.SIGINT if end == "interrupted" else signal.SIGKILL)
    code = process.wait(timeout=TIMEOUT_S)
    assert left_of_session(process.pid) == []
    assert not (only_sweep(here) / "2").exists()
    parent, _ = family(here)
    if end == "interrupted":
        assert code == 130
        assert "Traceback" not in output(here)
        assert resume[1] in output(here)
        assert attempts(here) == [("0", "FINISHED"), ("1", "KILLED")]
        assert statuses(here) == ("KILLED", ["FINISHED", "KILLED"])
    else:
        assert attempts(here) == [("0", "FINISHED")]
        assert statuses(here) == ("RUNNING", ["FINISHED", "RUNNING"])
    release(here, 2, job=1)
    assert sweep(*resume) == 0
    assert attempts(here) == [("0", "FINISHED"), ("1", "KILLED"), ("1-2", "FINISHED"), ("2", "FINISHED")]
    again, jobs = family(here)
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")
    ended = sorted((job.data.tags["varied.seed"], job.info.status) for job in jobs)
    assert ended == [("0", "FINISHED"), ("1", "FINISHED"), ("1", "KILLED"), ("2", "FINISHED")]


@pytest.mark.long
def test_an_interrupted_job_continues_from_its_checkpoint(here: Path) -> None:
    """In its own folder and its own MLflow run."""
    jobs = ["seed=0,1", "epochs=8", "checkpoint.every_steps=2"]
    hold(here, 6, job=1)
    process = start(here, *jobs)
    processes.wait_for_gate(here, 6, process, job=1)
    wait_until(lambda: list(only_sweep(here).glob("1/checkpoints/step-00000004")), "not saved")
    processes.kill(process)
    assert sweep(*jobs, f"resume_sweep={only_sweep(here).name}") == 0
    assert attempts(here) == [("0", "FINISHED"), ("1", "FINISHED")]
    assert read(only_sweep(here) / "1", "summary.json")["resumed_after"] == [4]
    assert statuses(here) == ("FINISHED", ["FINISHED", "FINISHED"])


def test_resuming_runs_only_what_is_missing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep is named by id, MLflow run, folder or relative folder; a job is what it sets, in any order."""
    assert sweep("seed=0,1", "optimizer.lr=0.02") == 0
    folder, parent = only_sweep(here), family(here)[0].info.run_id
    resumed = [
        (["optimizer.lr=0.02", "seed=1,0"], folder.name, 2),  # nothing is missing
        (["optimizer.lr=0.02", "seed=2,0,1"], parent, 3),
        (["seed=0", "optimizer.lr=0.02", "epochs=2"], folder, 4),  # another job
        (["seed=0,0", "optimizer.lr=0.02"], os.path.relpath(folder), 4),  # one job
    ]
    for overrides, name, jobs in resumed:
        capsys.readouterr()
        assert sweep(*overrides, f"resume_sweep={name}") == 0
        assert len(begun(here)) == jobs
    assert "1 of 1 jobs done" in capsys.readouterr().out
    assert statuses(here) == ("FINISHED", ["FINISHED"] * 4)
    assert sorted(job.data.params["seed"] for job in family(here)[1]) == ["0", "0", "1", "2"]


def test_resuming_without_a_store(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tracking=none` makes no store, `hydra.sweep.subdir` deeper folders; resuming works all the same."""
    deeper = "hydra.sweep.subdir=jobs/${hydra.job.num}"
    assert sweep("seed=0,0", deeper, base=SHORT) == 0
    assert "1 of 1 jobs done" in capsys.readouterr().out
    assert sweep("seed=0,1", deeper, f"resume_sweep={only_sweep(here).name}", base=SHORT) == 0
    assert "2 of 2 jobs done" in capsys.readouterr().out
    assert len(list(only_sweep(here).glob("jobs/*/summary.json"))) == 2
    assert [path.name for path in (here / "outputs").iterdir()] == ["sweeps"]


def test_resuming_with_another_store(swept: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused, here because of another current folder: half of the sweep would be missing in each store."""
    resumed = f"resume_sweep={only_sweep(swept)}"
    assert sweep("seed=0,1", "optimizer.lr=0.01,0.02", resumed) == cli.EXIT_USER_ERROR
    assert "tracking" in capsys.readouterr().err
    assert list(here.iterdir()) == []


# --- Optuna -------------------------------------------------------------------------------------------------


GRID_SEARCH = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_jobs=1"]


def test_optuna_minimises_the_recipes_metric(here: Path) -> None:
    """The best trial has the lowest loss; one value diverges and fails, which does not stop the others."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    # Not Optuna's grid sampler: it raises an error if the last point of its grid is the trial that diverges.
    sampler = ("hydra/sweeper=optuna", "hydra.sweeper.sampler.seed=1", "hydra.sweeper.n_jobs=1")
    assert sweep(*sampler, "hydra.sweeper.n_trials=8", "optimizer.lr=choice(1e300,0.01,0.02)") == 1
    summaries = [read(path.parent, "summary.json") for path in only_sweep(here).glob("*/summary.json")]
    diverged = {float(one["varied"]["optimizer.lr"]) for one in summaries if one.get("diverged")}
    losses = {float(one["varied"]["optimizer.lr"]): one["eval"]["loss"] for one in summaries if one["eval"]}
    best = min(losses, key=losses.__getitem__)
    assert (diverged, set(losses)) == ({1e300}, {0.01, 0.02})
    result = yaml.safe_load((only_sweep(here) / "optimization_results.yaml").read_text())
    assert result == {"name": "optuna", "best_params": {"optimizer.lr": best}, "best_value": losses[best]}
    parent, jobs = family(here)
    assert parent.info.status == "FAILED"
    found = {(float(job.data.tags["varied.optimizer.lr"]), job.info.status) for job in jobs}
    assert found == {(1e300, "FAILED"), (0.01, "FINISHED"), (0.02, "FINISHED")}


def test_optuna_continues_after_a_failed_trial(here: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    trials = ["hydra.sweeper.n_trials=2", "precision=choice(tf32,fp32)"]
    assert sweep(*GRID_SEARCH, *trials, base=SHORT) == cli.EXIT_USER_ERROR
    assert sorted(status for _, status in attempts(here)) == ["FAILED", "FINISHED"]


def test_optuna_that_gives_up(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An exit code that says so, and no finished sweep in the store, although every job that was drawn finished."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    import optuna

    def out_of_ideas(*_: object, **__: object) -> None:
        raise RuntimeError("no more ideas")

    monkeypatch.setattr(optuna.study.Study, "tell", out_of_ideas)
    drawn = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    assert sweep(*drawn, "optimizer.lr=interval(0.001,0.1)") == cli.EXIT_FAILED
    assert "no more ideas" in capsys.readouterr().err
    assert family(here)[0].info.status == "FAILED"


@pytest.mark.parametrize(("recipe", "direction"), [(TINY, "maximize"), (QUICK, "minimize")], ids=["accuracy", "loss"])
def test_optuna_follows_the_recipes_goal(here: Path, recipe: list[str], direction: str) -> None:
    """Optuna minimises by default: Hydra gets the recipe's goal as direction, and the opposite is refused."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    drawn = ["-m", *recipe, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "optimizer.lr=interval(0.001,0.1)"]
    options = HydraOptions(drawn)
    prepare_sweep(options, time.time())
    given = [override for override in options.overrides if not override.startswith("optimizer.lr")]
    assert direction in str(compose(given).hydra.sweeper.direction)
    other = {"maximize": "minimize", "minimize": "maximize"}[direction]
    with pytest.raises(UserError, match=f"hydra.sweeper.direction={other}"):
        prepare_sweep(HydraOptions([*drawn, f"hydra.sweeper.direction={other}"]), time.time())
