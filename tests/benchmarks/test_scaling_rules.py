"""The experiment on scaling rules: which runs are planned, and what its report says about runs that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling_rules.names_data import write_names
from benchmarks.scaling_rules.plan import BASELINE, TASKS, Job, chosen_rate, next_jobs
from benchmarks.scaling_rules.report import write_report
from tests.configured import configured

DATA = "0123456789ab"


def row(job: Job, metric: float, status: str = "FINISHED") -> dict[str, Any]:
    known = {"task": job.task.name, "ratio": str(job.ratio), "rule": job.rule, "lr": str(job.lr), "seed": str(job.seed)}
    numbers = {"status": status, "metric": str(metric), "samples_seen": "100", "machine": "x"}
    return {**known, **numbers, "data": DATA, "digest": job.digest(DATA)}


def test_each_job_composes() -> None:
    """With the batch, by accumulation on one worker, and the rule."""
    for task in TASKS.values():
        config = configured([*Job(task, 8, "sde", 1e-4, 3).overrides, "recipe.model.name=x"])
        assert (config.batch.global_batch, config.scaling.rule.name) == (8 * task.reference_batch, "sde")
        assert config.scaling.reference_batch == task.reference_batch


def test_the_rate_is_tuned_before_rules_are_compared() -> None:
    task, rows = TASKS["names"], []
    while chosen_rate(task, rows) is None:
        job = next_jobs(task, rows, DATA)[0]
        assert (job.rule, job.ratio) == (BASELINE, 1)
        rows.append(row(job, 80 + (job.lr == 2e-4)))
    assert {job.lr for job in next_jobs(task, rows, DATA)} == {2e-4}
    other_data = [{**one, "data": "other"} for one in rows]
    assert next_jobs(task, other_data, DATA)[0].lr == task.rates[0]


def test_every_run_is_made_once_and_failures_twice() -> None:
    task, rows = TASKS["cola"], []
    first, second = next_jobs(task, rows, DATA)[:2]
    rows = [row(first, 27.0), row(second, 0.0, "FAILED"), row(second, 0.0, "FAILED")]
    left = next_jobs(task, rows, DATA)
    assert first not in left
    assert second not in left
    assert not [job for job in left if (job.rule, job.ratio) == ("sde", 16)]  # no β₁ above 0


def test_the_report_shows_what_failed(tmp_path: Path) -> None:
    """A rule some of whose runs failed is not judged by the others."""
    task = TASKS["cola"]
    rows = [row(Job(task, 1, BASELINE, 6e-5, seed), 27 + seed / 10) for seed in range(3)]
    rows += [row(Job(task, 8, "sde", 6e-5, seed), 27.1 + seed / 10) for seed in range(3)]
    rows += [row(Job(task, 8, "linear", 6e-5, seed), 27.1, "FINISHED" if seed else "FAILED") for seed in range(3)]
    write_report(rows, tmp_path)
    table = (tmp_path / "table.md").read_text()
    (sde,) = [line for line in table.splitlines() if "`sde`" in line]
    (linear,) = [line for line in table.splitlines() if "`linear`" in line]
    assert "equivalent" in sde
    assert "1 run failed" in linear
    assert "equivalent" not in linear
    assert (tmp_path / "plot.png").exists()


def test_names_are_words_with_a_capital_inside_a_sentence(tmp_path: Path) -> None:
    text = "The dome of Notre Dame is golden. It is."
    squad = {"data": [{"paragraphs": [{"context": text}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    write_names(tmp_path / "squad.json", tmp_path / "names.jsonl")
    (line,) = (tmp_path / "names.jsonl").read_text().splitlines()  # the second sentence is too short
    found = json.loads(line)
    assert found["tokens"] == ["the", "dome", "of", "notre", "dame", "is", "golden", "."]
    assert [tag == "B-NAME" for tag in found["tags"]] == [False] * 3 + [True] * 2 + [False] * 3


@pytest.mark.parametrize("name", TASKS)
def test_margins_are_within_the_metric(name: str) -> None:
    assert 0 < TASKS[name].margin < 5
