"""What a run reports when it has ended."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.backends import Compilations
from runner.config.compose import compose, settings
from runner.plan.experiment import Experiment, prepare
from runner.run.summary import SweepContext, objective, report, summary_of
from runner.speed.figures import speed_of
from runner.train.result import RunResult
from tests.replicas import TINY

CUT = {"what": "texts", "setting": "recipe.max_length", "tokens": 16}


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return prepare(settings(compose([*TINY, "device=cpu"])))


def reported(experiment: Experiment, **changes: Any) -> tuple[dict[str, Any], str]:
    """The summary of a run with this result, and its last lines."""
    measured = {"optimizer_steps": 10, "samples_seen": 200, "samples_per_s": 31.4, "first_step_s": 2.5}
    result = RunResult(**{**measured, "eval": {"accuracy": 71.25}, **changes})
    summary = summary_of("FINISHED", experiment, result, 0.0, None, SweepContext())
    summary |= speed_of(experiment, result, 10.0, Path("outputs/x"), 1) | {"prediction": None}
    output = io.StringIO()
    report(summary, experiment, Path("outputs/x"), Console(file=output, width=80, highlight=False))
    return summary, output.getvalue()


@pytest.mark.parametrize(("value", "expected"), [(0.5, 0.5), (math.nan, None), (math.inf, None), (None, None)])
def test_objective_for_an_optimizing_sweeper(value: float | None, expected: float | None) -> None:
    """A run that diverged has no objective: optuna ends a study that reports NaN."""
    assert objective({"metric": "loss", "eval": {} if value is None else {"loss": value}}) == expected


def test_summary_and_last_lines(experiment: Experiment) -> None:
    """The summary has every measurement, null where it is unknown; the terminal shows metrics, speed and folder."""
    summary, text = reported(experiment)
    assert (summary["status"], summary["samples_seen"], summary["eval"]) == ("FINISHED", 200, {"accuracy": 71.25})
    assert (summary["compilations"], summary["warnings"], summary["comm_s"]) == (None, (), None)
    assert "tokens" not in summary
    for part in ("finished", "accuracy 71.25", "10 optimizer steps, 200 samples, 31 samples/s", "outputs/x"):
        assert part in text
    assert "compilations" not in text
    assert "fp16" not in text
    assert "of which fp16 skipped 3" in reported(experiment, applied_steps=7, skipped_steps=3)[1]


def test_compilations_and_warnings_are_shown(experiment: Experiment) -> None:
    """Each warning is one line, however long, and brackets in it are not taken for markup."""
    warning = f"7 compilations for input_ids [4, 12], labels [rows]: {'batches should come in few shapes; ' * 4}end"
    summary, text = reported(experiment, compilations=Compilations(7, 12.34, 2), warnings=(warning,))
    assert summary["compilations"] == {"count": 7, "seconds": 12.34, "from_cache": 2}
    assert "7 compilations in 12.3 s, 2 " in text
    assert f"warning: {warning}\n" in text


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({}, None),
        ({"stopped_early": True, "best": {"step": 4, "accuracy": 71.25}}, ["step 10 of", "accuracy", "step 4"]),
        ({"truncated": {**CUT, "train": [3, 1200], "eval": [0, 30]}}, ["3 of 1,200 ", "recipe.max_length=16"]),
        ({"truncated": {**CUT, "train": [0, 1200], "eval": [2, 30]}}, ["note: 2 of 30 "]),
        ({"truncated": {**CUT, "train": [0, 1200], "eval": [0, 30]}}, None),
    ],
)
def test_what_surprises_is_said(experiment: Experiment, result: dict[str, Any], words: list[str] | None) -> None:
    """On the terminal and under `notes` in `summary.json`."""
    summary, text = reported(experiment, **result)
    assert len(summary["notes"]) == (words is not None)
    for word in words or ():
        assert word in f"note: {summary['notes'][0]}"
    assert ("note:" in text) is (words is not None)
    assert all(note in text for note in summary["notes"])
