"""What `benchmarks/sync_frontier` runs, in which order, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.sync_frontier import __main__ as command
from benchmarks.sync_frontier.plan import SETUPS, TASKS, TUNING_SEEDS, Job, chosen_rate, next_jobs
from benchmarks.sync_frontier.report import write_report
from benchmarks.sync_frontier.rows import append_row, read_rows
from benchmarks.sync_frontier.train import Material
from tests.configured import configured

COLA = TASKS["cola"]
#: Which rate is best for each setup.
BEST = {"one": 6e-5, "k16": 1.2e-4}


def row(job: Job, metric: float = 0.0, **more: Any) -> dict[str, Any]:
    known = {"task": job.task.name, "setup": job.setup, "lr": job.lr, "seed": job.seed, "data": "d"}
    return {**known, "digest": job.digest("d"), "status": "FINISHED", "metric": metric, "samples_seen": 100, **more}


def metric_of(job: Job) -> float:
    """Three points less with two workers; a wrong learning rate costs five."""
    return 30.0 + job.seed % 3 - 3 * (job.setup != "one") - 5 * (job.lr != BEST[job.setup])


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("task", TASKS)
def test_every_job_is_a_valid_command(task: str, setup: str) -> None:
    job = Job(TASKS[task], setup, 0.1, 3)
    config = configured(job.overrides)
    assert (config.sync.k, config.seed) == (SETUPS[setup].k, 3)


def test_learning_rates_are_chosen_before_seeds_are_compared(tmp_path: Path) -> None:
    """A run that fails twice is left out; nothing that has finished is run again; runs of another plan do not count."""
    path, ran = tmp_path / "runs.csv", list[Job]()
    append_row(path, {**row(Job(COLA, "one", 3e-5, 100), 99.0), "digest": "of another plan"})
    while jobs := next_jobs(COLA, ["one", "k16"], read_rows(path), "d"):
        job = jobs[0]
        ran.append(job)
        failed = (job.setup, job.seed) == ("k16", 4)
        append_row(path, {**row(job, metric_of(job)), **({"status": "FAILED", "metric": None} if failed else {})})
    tuning = [job for job in ran if job.seed in TUNING_SEEDS]
    assert ran[: len(tuning)] == tuning
    assert {(job.setup, job.lr) for job in tuning} == {(setup, lr) for setup in ("one", "k16") for lr in COLA.rates}
    compared = ran[len(tuning) :]
    assert [(job.setup, job.seed) for job in compared[:4]] == [("one", 0), ("k16", 0), ("one", 1), ("k16", 1)]
    assert all(job.lr == BEST[job.setup] for job in compared)
    assert len(compared) == 2 * len(COLA.seeds) + 1  # the failure, twice
    assert chosen_rate(COLA, "k16", read_rows(path)) == 1.2e-4


def test_report_compares_with_one_worker(tmp_path: Path) -> None:
    rows = tmp_path / "runs.csv"
    for setup in ("one", "k16"):
        for job in (Job(COLA, setup, BEST[setup], seed) for seed in range(10)):
            append_row(rows, row(job, metric_of(job) + 0.01 * job.seed * (setup == "k16")))
    write_report(read_rows(rows), tmp_path)
    (line,) = [
        line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| `k16` | 0.00012 |")
    ]
    assert "27.9 ± " in line
    assert "different: worse" in line
    assert (tmp_path / "cola.png").stat().st_size > 10_000


def test_an_interrupted_benchmark_continues_with_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, dev = tmp_path / "train.tsv", tmp_path / "dev.tsv"
    train.write_text("a\nb\nc\nd\ne\n")
    dev.write_text("f\n")
    ran: list[tuple[str, float, int]] = []

    def run_job(job: Job, material: Material) -> tuple[dict[str, Any], str]:
        ran.append((job.setup, job.lr, job.seed))
        assert (material.train.read_text(), material.dev.read_text()) == ("b\nc\nd\n", "a\ne\nf\n")
        if len(ran) == 3:
            raise KeyboardInterrupt
        return {"status": "FINISHED", "metric": 30.0, "wall_s": 1.0, "samples_seen": 9}, ""

    monkeypatch.setattr(command, "run_job", run_job)
    arguments = ["--out", str(tmp_path), "run", "cola", str(train), str(dev), "--setups", "one"]
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    command.main(arguments)
    assert ran[2] == ran[3]
    assert len(set(ran)) == len(ran) - 1 == len(COLA.rates) * len(TUNING_SEEDS) + len(COLA.seeds)
