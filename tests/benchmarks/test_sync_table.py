"""What `benchmarks/sync_table` runs, in which order, and how it resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.sync_table import parts, train
from benchmarks.sync_table.experiment import Experiment, majority, write_subset
from benchmarks.sync_table.parts import missing, run_part, seconds_of
from benchmarks.sync_table.rows import COLUMNS, append_row, read_rows
from benchmarks.sync_table.setups import Job, all_setups, chosen, jobs_in_order

SETUPS = {setup.name: setup for setup in all_setups()}


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    train, dev = tmp_path / "train.tsv", tmp_path / "dev.tsv"
    train.write_text("".join(f"gj04\t{i % 2}\t\tSentence {i}.\n" for i in range(10)))
    dev.write_text("gj04\t1\t\tYes.\ngj04\t1\t\tAs well.\ngj04\t0\t*\tNo it.\ngj04\t1\t\tFine.\n")
    return Experiment(train, dev, tmp_path / "model", "tiny")


def row(experiment: Experiment, job: Job, **more: object) -> dict[str, object]:
    found = {"status": "FINISHED", "accuracy": 70.0, "matthews": 5.0, "wall_s": 30.0}
    return {**train.facts(experiment, job, 69.0), **found, **more}


def test_each_cell_is_one_setup() -> None:
    names = [setup.name for setup in all_setups()]
    assert len(set(names)) == len(names) == 1 + 2 * (1 + 4 + 4 + 4)
    settings = [(s.policy, s.workers, s.accumulation, s.k, s.scaling) for s in all_setups()]
    assert len(set(settings)) == len(settings)
    assert SETUPS["k16-linear"].overrides == ("device=cpu4", "scaling=linear", "sync.k=16")


def test_order_of_jobs() -> None:
    jobs = jobs_in_order(all_setups(), ["k16-none"])
    assert [(job.setup.name, job.seed) for job in jobs[:6]] == [
        (name, seed) for seed in range(3) for name in ("one", "k16-none")
    ]
    assert {job.seed for job in jobs[6:31]} == {0}
    assert {(job.setup.name, job.seed) for job in jobs[-14:]} == {
        (name, seed) for seed in range(3, 10) for name in ("one", "k16-none")
    }
    assert len(set(jobs)) == len(jobs) == 27 * 3 + 2 * 7
    assert {job.setup.name for job in chosen(jobs, "accumulation1*")} == {
        "accumulation16-none",
        "accumulation16-linear",
    }


def test_subset_is_always_the_same(tmp_path: Path) -> None:
    lines = [f"a\t{i % 2}\t\tOdd\x85ities {i}" for i in range(50)]  # U+0085 does not end a line of a TSV file
    (tmp_path / "all.tsv").write_text("\n".join(lines), encoding="utf-8")
    for name in ("one.tsv", "two.tsv"):
        write_subset(tmp_path / "all.tsv", tmp_path / "work" / name, 20)
    picked = (tmp_path / "work" / "one.tsv").read_text(encoding="utf-8")
    assert picked == (tmp_path / "work" / "two.tsv").read_text(encoding="utf-8")
    kept = picked.rstrip("\n").split("\n")
    assert len(kept) == 20
    assert [line for line in lines if line in kept] == kept
    with pytest.raises(SystemExit, match="50 lines"):
        write_subset(tmp_path / "all.tsv", tmp_path / "more.tsv", 51)


def test_majority_class(experiment: Experiment) -> None:
    assert majority(experiment.dev) == 75.0


def test_digest_of_settings_and_data_not_paths(experiment: Experiment, tmp_path: Path) -> None:
    setup = SETUPS["k2-none"]
    moved = tmp_path / "elsewhere.tsv"
    moved.write_bytes(experiment.train.read_bytes())
    there = dataclasses.replace(experiment, train=moved, model=tmp_path / "models")
    assert there.digest(setup) == experiment.digest(setup)
    digests = {experiment.digest(one) for one in all_setups()}
    assert len(digests) == len(all_setups())
    moved.write_text("other\n")
    for other in (there, dataclasses.replace(experiment, base_lr=1e-4), dataclasses.replace(experiment, epochs=1)):
        assert other.digest(setup) not in digests


def test_incomplete_row_is_ignored(experiment: Experiment, tmp_path: Path) -> None:
    path = tmp_path / "results" / "runs.csv"
    first, second = Job(SETUPS["one"], 0), Job(SETUPS["one"], 1)
    append_row(path, row(experiment, first))
    whole = path.read_bytes()
    path.write_bytes(whole + b"one,periodic,1,1")
    assert [one["seed"] for one in read_rows(path)] == ["0"]
    append_row(path, row(experiment, second, drift_last=None))
    rows = read_rows(path)
    assert [one["seed"] for one in rows] == ["0", "1"]
    assert tuple(rows[0]) == COLUMNS
    assert rows[1]["drift_last"] == ""
    assert path.read_bytes().startswith(whole)


def test_rows_with_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("setup,seed\none,0\n")
    with pytest.raises(SystemExit, match="other columns"):
        append_row(path, {"setup": "one"})
    assert path.read_text() == "setup,seed\none,0\n"


def test_missing_jobs(experiment: Experiment, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    jobs = [Job(SETUPS["one"], seed) for seed in range(4)]
    append_row(path, row(experiment, jobs[0]))
    append_row(path, row(experiment, jobs[1], status="FAILED"))
    append_row(path, row(dataclasses.replace(experiment, base_lr=1.0), jobs[2]))
    append_row(path, row(experiment, jobs[3], status="FAILED"))
    append_row(path, row(experiment, jobs[3], status="FAILED"))
    assert [job.seed for job in missing(jobs, read_rows(path), experiment)] == [1, 2]


def test_estimated_time(experiment: Experiment, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    epochs = experiment.epochs
    assert seconds_of(SETUPS["one"], read_rows(path), epochs) == epochs * parts.GUESS_S
    append_row(path, row(experiment, Job(SETUPS["one"], 0), wall_s=40.0))
    append_row(path, row(experiment, Job(SETUPS["k2-none"], 0), wall_s=60.0))
    append_row(path, row(experiment, Job(SETUPS["accumulation8-none"], 0), wall_s=10.0))
    rows = read_rows(path)
    expected = {"one": 40.0, "k2-linear": 60.0, "k2-none": 60.0, "accumulation8-linear": 10.0, "outer-none": 60.0}
    assert {name: seconds_of(SETUPS[name], rows, epochs) for name in expected} == pytest.approx(expected)
    assert seconds_of(SETUPS["one"], rows, 2 * epochs) == pytest.approx(80.0)


def test_interrupted_part_is_resumed(experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, work = tmp_path / "runs.csv", tmp_path / "work"
    jobs = [Job(SETUPS["one"], seed) for seed in range(4)]
    trained: list[int] = []

    def run_job(experiment: Experiment, job: Job, work: Path, lock: int) -> tuple[dict[str, object], str]:
        trained.append(job.seed)
        if trained == [0, 1]:
            raise KeyboardInterrupt
        if job.seed == 2:
            return {"status": "FAILED"}, "exit code 1: out of memory"
        return {"status": "FINISHED", "accuracy": 70.0, "matthews": 3.0, "wall_s": 5.0}, ""

    monkeypatch.setattr(parts, "run_job", run_job)
    with pytest.raises(KeyboardInterrupt):
        run_part(experiment, jobs, results, work, None, 69.0)
    assert run_part(experiment, jobs, results, work, 0.0, 69.0) == 0  # no time: nothing is started
    assert run_part(experiment, jobs, results, work, None, 69.0) == 1
    assert trained == [0, 1, 1, 2, 3]
    assert [(one["seed"], one["status"]) for one in read_rows(results)] == [
        ("0", "FINISHED"),
        ("1", "FINISHED"),
        ("2", "FAILED"),
        ("3", "FINISHED"),
    ]
