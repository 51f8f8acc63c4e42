"""What a run says when it is done."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.config.compose import compose, settings
from runner.plan.experiment import Experiment, prepare
from runner.run.summary import Role, objective, report, summary_of
from runner.speed.figures import speed_of
from tests.replicas import TINY

RESULT: dict[str, Any] = {
    "optimizer_steps": 10,
    "samples_seen": 200,
    "samples_per_s": 31.4,
    "first_step_s": 2.5,
    "synchronisations": 10,
    "comm_bytes": 80,
    "comm_s": None,
    "compilations": None,
    "warnings": [],
    "train_loss": 0.5,
    "eval": {"accuracy": 71.25},
    "best": {"step": 5, "accuracy": 71.25},
    "stopped_early": False,
}


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return prepare(settings(compose([*TINY, "device=cpu"])))


def told(experiment: Experiment, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """The summary of a run with this outcome, and the lines with which it ends."""
    result = {**RESULT, **changes}
    summary = summary_of("FINISHED", experiment, result, 0.0, None, Role())
    summary |= speed_of(experiment, result, 10.0, Path("outputs/x"), 1)
    output = io.StringIO()
    report(summary, experiment, Path("outputs/x"), Console(file=output, width=80, highlight=False))
    return summary, output.getvalue().strip().splitlines()


@pytest.mark.parametrize(("value", "given"), [(0.5, 0.5), (math.nan, None), (math.inf, None), (None, None)])
def test_what_an_optimizing_sweeper_is_given(value: float | None, given: float | None) -> None:
    """A run that diverged has no objective: optuna ends a study that is told what is not a number."""
    evaluated = {} if value is None else {"loss": value}
    assert objective({"metric": "loss", "eval": evaluated}) == given


def test_a_run_that_compiled_nothing(experiment: Experiment) -> None:
    """Without compilations and warnings there are four lines, and the summary has null and an empty list."""
    summary, lines = told(experiment)
    assert (summary["compilations"], summary["warnings"], summary["comm_s"]) == (None, [], None)
    assert lines[0].split() == ["finished", "cpu", "·", "fp64", "·", "s0", "accuracy", "71.25"]
    assert lines[1].strip().startswith("10 optimizer steps, 200 samples, 31 samples/s, ")
    nothing = "a step is one program here, whose parts have no times; nothing stands out"
    assert lines[2:] == [f"  diagnosis: {nothing}", "  in outputs/x"]


def test_compilations_are_told(experiment: Experiment) -> None:
    """How many programs were compiled, for how long, and how many came out of the cache; all of it in the summary."""
    compiled = {"count": 7, "seconds": 12.34, "from_cache": 2}
    summary, lines = told(experiment, compilations=compiled)
    assert summary["compilations"] == compiled
    assert lines[3] == "  7 compilations in 12.3 s, 2 more found in the cache"


def test_warnings_are_told_whole(experiment: Experiment) -> None:
    """A warning is one line, however long, with the brackets that it names shapes by, and it is in the summary."""
    warning = f"7 compilations, for input_ids [4, 12], labels [rows]: {'batches should come in few shapes; ' * 4}end"
    summary, lines = told(experiment, warnings=[warning])
    assert summary["warnings"] == [warning]
    assert lines[3] == f"  warning: {warning}"
