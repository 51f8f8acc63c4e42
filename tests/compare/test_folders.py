"""Runs from folders that the runner left, whole, old, broken and unfinished."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.compare.comparison import compare_runs
from runner.compare.from_folders import read_folders, run_folders
from runner.compare.runs import Found, Run
from runner.errors import UserError

NEW_KEYS = ("seed", "setup_digest", "machine", "jobs_at_once", "metric", "goal", "varied")


def read(*folders: Path, metric: str | None = None) -> Found:
    return read_folders([(folder.name, folder) for folder in folders], metric)


def change(folder: Path, name: str, **values: Any) -> None:
    """Set keys of a JSON file; None takes a key away."""
    path = folder / name
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture
def jobs(sweep_folder: Path, tmp_path: Path) -> list[Path]:
    """A copy of the sweep's runs that a test may spoil."""
    copy = tmp_path / "copy"
    shutil.copytree(sweep_folder, copy, ignore=shutil.ignore_patterns("model"))
    return run_folders(copy)


def test_a_sweeps_folder_holds_its_runs_in_order(sweep_folder: Path) -> None:
    """All four jobs, by number; a run's own folder stands for itself."""
    assert [folder.name for folder in run_folders(sweep_folder)] == ["0", "1", "2", "3"]
    assert run_folders(sweep_folder / "2") == [sweep_folder / "2"]


def test_jobs_are_sorted_as_numbers(tmp_path: Path) -> None:
    """Job 10 after job 9."""
    for number in (10, 9, 1):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.yaml").touch()
    assert [folder.name for folder in run_folders(tmp_path)] == ["1", "9", "10"]


def test_a_run_is_what_its_files_say(sweep_folder: Path) -> None:
    """Every field against the file that it comes from."""
    folders = run_folders(sweep_folder)
    found = read(*folders)
    assert found.refused == []
    assert len(found.runs) == 4
    for folder, run in zip(folders, found.runs, strict=True):
        summary, plan = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "plan"))
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert run.seed == config["seed"]
        assert f"{run.setup} · s{run.seed}" == summary["setup"]
        assert (run.workers, run.accumulation, run.k) == (plan["world_size"], plan["accumulation_steps"], plan["k"])
        assert run.metric == summary["eval"]["loss"]
        assert (run.block.metric, run.block.goal) == ("loss", "min")
        assert run.block.samples * run.block.epochs == plan["total_samples"]
        if summary["samples_per_s"]:
            assert run.seconds == pytest.approx(summary["samples_seen"] / summary["samples_per_s"])
        assert run.certificate is not None
        assert run.certificate["global_batch"].value == plan["global_batch"]
        assert run.curve[-1][0] == summary["samples_seen"]
        assert run.curve[-1][1] > 0
        assert run.values["optimizer.lr"] == str(config["optimizer"]["lr"])
        assert run.mlflow_run_id == summary["mlflow_run_id"]


def test_seeds_make_one_setup(sweep_folder: Path) -> None:
    """Two setups of two seeds; two workers at the same micro-batch have twice the global batch: comparable."""
    (block,) = compare_runs(read(*run_folders(sweep_folder)), None, 1.0).blocks
    assert [(row.setup.name, row.setup.seeds) for row in block.rows] == [("cpu", (0, 1)), ("cpu2", (0, 1))]
    relation = block.rows[1].comparability
    assert relation is not None
    assert relation.level == "comparable"
    assert "global_batch × 2" in relation.differs


def test_older_runs_are_read_the_same(jobs: list[Path]) -> None:
    """Without the newer keys of summary.json: the same setups, seeds and objective, from config.yaml."""
    new = read(*jobs)
    for folder in jobs:
        change(folder, "summary.json", **dict.fromkeys(NEW_KEYS))
    old = read(*jobs)

    def seen(found: Found) -> list[tuple[Any, ...]]:
        return [(run.setup, run.seed, run.block, run.metric) for run in found.runs]

    assert seen(old) == seen(new)
    (block,) = compare_runs(old, None, 1.0).blocks
    assert [row.setup.seeds for row in block.rows] == [(0, 1), (0, 1)]
    assert {run.machine for run in old.runs} == {None}


def test_old_and_new_runs_of_one_setup_meet(jobs: list[Path]) -> None:
    """One run without a digest of its own: all are grouped by one made here."""
    change(jobs[0], "summary.json", setup_digest=None)
    (block,) = compare_runs(read(*jobs), None, 1.0).blocks
    assert [row.setup.seeds for row in block.rows] == [(0, 1), (0, 1)]


Spoil = Callable[[Path], object]
SPOILT: dict[str, tuple[Spoil, str]] = {
    "failed": (lambda f: (f / "summary.json").write_text('{"status": "FAILED", "error": "x"}'), "FAILED"),
    "killed": (lambda f: change(f, "summary.json", status="KILLED"), "KILLED"),
    "still running": (lambda f: (f / "summary.json").unlink(), "no summary.json"),
    "of another tool": (lambda f: (f / "summary.json").write_text('{"score": 1}'), "no status"),
    "half written": (lambda f: (f / "summary.json").write_text('{"status": "FIN'), "summary.json is no JSON"),
    "a list": (lambda f: (f / "plan.json").write_text("[]"), "plan.json holds no table"),
    "no plan": (lambda f: (f / "plan.json").unlink(), "no plan.json"),
    "no yaml": (lambda f: (f / "config.yaml").write_text("a: [1"), "config.yaml is no YAML"),
    "binary": (lambda f: (f / "config.yaml").write_bytes(b"\xff\xfe\x00"), "config.yaml cannot be read"),
    "no metric": (lambda f: change(f, "summary.json", eval={"f1": 1}), "has no metric loss"),
    "no workers": (lambda f: change(f, "plan.json", world_size=None), "KeyError: 'world_size'"),
    "varied nothing": (lambda f: change(f, "summary.json", varied=["seed"]), "not those of a run of this runner"),
    "words": (lambda f: change(f, "summary.json", samples_per_s="fast"), "not those of a run of this runner"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_no_finished_run_is_named(jobs: list[Path], case: str) -> None:
    """The others are compared; this one is counted, with a reason."""
    spoil, reason = SPOILT[case]
    spoil(jobs[3])
    found = read(*jobs)
    assert len(found.runs) == 3
    ((source, why),) = [(one.source, one.reason) for one in found.refused]
    assert source == "3"
    assert reason in why


def test_missing_extras_are_unknown(jobs: list[Path]) -> None:
    """No certificate, no metrics, a last line half written, too short to time: still a run."""
    (jobs[0] / "certificate.json").unlink()
    (jobs[1] / "metrics.jsonl").unlink()
    with (jobs[2] / "metrics.jsonl").open("a") as file:
        file.write('{"key": "train/lo')
    change(jobs[3], "summary.json", samples_per_s=None)
    a, b, c, d = read(*jobs).runs
    assert (a.certificate, b.curve, d.seconds, d.phases) == (None, (), None, None)
    assert len(c.curve) > 1


def test_a_withdrawn_certificate(jobs: list[Path]) -> None:
    """The reason that stands in the file."""
    change(jobs[0], "certificate.json", withdrawn="the ledger is not sound")
    assert [run.withdrawn for run in read(*jobs).runs][:2] == ["the ledger is not sound", None]


def test_another_metric(jobs: list[Path]) -> None:
    """Chosen by name, with its direction; runs without it are named; a name that none has is an error."""
    for folder in jobs[:3]:
        change(folder, "summary.json", eval={"loss": 1.0, "f1": 70.0})
    found = read(*jobs, metric="f1")
    assert [(run.metric, run.block.metric, run.block.goal) for run in found.runs] == [(70.0, "f1", "max")] * 3
    assert found.refused[0].reason == "has no metric f1"
    assert read(*jobs, metric="loss").runs[0].block.goal == "min"
    change(jobs[3], "summary.json", eval={"perplexity": 3.0})
    assert [run.block.goal for run in read(*jobs, metric="perplexity").runs] == ["min"]
    with pytest.raises(UserError, match="--metric=f2 was measured in none of the runs; did you mean 'f1'"):
        read(*jobs, metric="f2")


def test_a_diverged_run_is_a_run(jobs: list[Path]) -> None:
    """NaN in summary.json is a finished run whose metric is no number."""
    change(jobs[0], "summary.json", eval={"loss": float("nan")})
    runs: list[Run] = list(read(*jobs).runs)
    assert len(runs) == 4
    assert runs[0].metric != runs[0].metric


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    """A folder of something else, and a file."""
    with pytest.raises(UserError, match="holds no run"):
        run_folders(tmp_path)
    (tmp_path / "x.csv").touch()
    with pytest.raises(UserError, match="--csv="):
        run_folders(tmp_path / "x.csv")


def test_a_run_that_was_cut_short_is_another_experiment(jobs: list[Path]) -> None:
    """By `max_steps`, or without its tails: it saw fewer samples, and its block says how many."""
    plan = json.loads((jobs[3] / "plan.json").read_text())
    change(jobs[3], "plan.json", total_samples=plan["total_samples"] - 7)
    found = read(*jobs)
    assert [block.samples * block.epochs for block in (run.block for run in found.runs)][2:] == [
        plan["total_samples"],
        plan["total_samples"] - 7,
    ]
    blocks = compare_runs(found, None, 1.0).blocks
    assert sorted(len(block.rows) for block in blocks) == [1, 2]
    assert f"{plan['total_samples'] - 7:,} samples" in " ".join(block.title for block in blocks)


def test_nothing_trained_has_no_time(jobs: list[Path]) -> None:
    """No samples in no time are no speed."""
    change(jobs[0], "summary.json", samples_seen=0)
    assert read(*jobs).runs[0].seconds is None


def test_the_newer_run_is_the_one_that_began_later(jobs: list[Path]) -> None:
    """Whatever the age of its files, which a copy and a late delivery change."""
    again = jobs[0].with_name("again")
    shutil.copytree(jobs[0], again)
    change(again, "tracking.json", started=json.loads((jobs[0] / "tracking.json").read_text())["started"] - 60_000)
    first, second = (read(folder).runs[0].order for folder in (jobs[0], again))
    assert second < first
    (jobs[0] / "tracking.json").unlink()  # of another version: the summary's age is all there is
    assert int(read(jobs[0]).runs[0].order) == (jobs[0] / "summary.json").stat().st_mtime_ns // 1_000_000


def test_a_certificate_of_another_version(jobs: list[Path]) -> None:
    """A property that allows what this version has no word for is at worst a reason not to compare."""
    path = jobs[3] / "certificate.json"
    content = json.loads(path.read_text())
    for row in [*content["equal"], *content["different"]]:
        row["allows"] = "nearly anything"
    path.write_text(json.dumps(content))
    (block,) = compare_runs(read(*jobs), None, 1.0).blocks
    assert block.rows[1].comparability is not None
