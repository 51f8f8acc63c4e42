"""`equivalence=identical` by commands: what is recorded of it, and that workers pin what bits depend on."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import cli
from runner.folder.evaluation_rows import FILE_NAME as EVALUATION_ROWS
from tests.runs import TRACKED, read, stored_runs, summary_of

IDENTICAL = ["equivalence=identical", "device=cpu", "recipe.model.dropout=0.1"]
PINNED = ["recipe._target_=tests.odd_recipe.Pinned", "trusted_packages=[recipes,tests]", "equivalence.threads=2"]


def test_any_workers_have_one_digest(here: Path) -> None:
    """In the summary and in MLflow, beside the same loss and metrics, also by evaluation row."""
    one = summary_of(*IDENTICAL, base=TRACKED)
    three = summary_of(*IDENTICAL, "device.workers=3", base=TRACKED)
    assert one["weights_digest"] == three["weights_digest"]
    for name in ("train_loss", "eval"):
        assert one[name] == three[name]
    assert (one["certificate"], three["certificate"]) == ("identical", "identical")
    rows = {(here / "outputs" / folder / EVALUATION_ROWS).read_bytes() for folder in ("run-0", "run-1")}
    assert len(rows) == 1
    assert {run.data.tags["weights.digest"] for run in stored_runs(here)} == {one["weights_digest"]}
    assert read(here / "outputs" / "run-1", "plan.json")["shards"] == 8


def test_without_it_there_is_no_digest() -> None:
    assert summary_of("device=cpu", "max_steps=2")["weights_digest"] is None


@pytest.mark.parametrize("command", ["runner", "runner.verify"])
def test_workers_pin_threads_and_algorithms(command: str, here: Path) -> None:
    if command == "runner":
        assert summary_of(*IDENTICAL, *PINNED, "max_steps=2")["status"] == "FINISHED"
    else:
        setups = ["--a", "", "--b", "device=cpu2", "--steps", "2"]
        assert cli.run_tool("verify", [*TRACKED, *IDENTICAL, *PINNED, *setups]) == 0


def test_the_digest_is_of_the_best_weights() -> None:
    """Which only worker 0 keeps: the others have those of the last step."""
    best = ["evaluation.keep_best=true", "evaluation.every_steps=2", "evaluation.min_delta=100"]  # so the first counts
    one, two = (summary_of(*IDENTICAL, *best, f"device.workers={workers}") for workers in (1, 2))
    assert one["best"]["step"] == 2
    assert one["weights_digest"] == two["weights_digest"] != summary_of(*IDENTICAL)["weights_digest"]
