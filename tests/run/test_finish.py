"""What a run reports when it has ended."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.config.compose import compose, settings
from runner.folder.files import write_json
from runner.folder.record import Compilations, RunRecord, RunResult
from runner.plan.experiment import Experiment, prepare
from runner.run.context import RunContext
from runner.run.finish import RunCloser
from runner.run.report import report
from runner.speed.run_numbers import Restarts
from runner.track.card import card_of
from runner.track.tracker import build_tracker
from tests.replicas import TINY
from tests.runs import read

Reported = Callable[..., tuple[dict[str, Any], str]]

CUT = {"what": "texts", "setting": "recipe.max_length", "tokens": 16}


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return prepare(settings(compose([*TINY, "device=cpu"])))


@pytest.fixture
def reported(experiment: Experiment, tmp_path: Path) -> Reported:
    """Close a run with a result that has these changes: `summary.json`, and what the terminal shows."""

    def close(**changes: Any) -> tuple[dict[str, Any], str]:
        measured = {"optimizer_steps": 10, "samples_seen": 200, "samples_per_s": 31.4, "first_step_s": 2.5}
        result = RunResult(**{**measured, "eval": {"accuracy": 71.25}, **changes})
        console = Console(file=(output := io.StringIO()), width=80, highlight=False)
        tracker = build_tracker(experiment.config.tracking, card_of(experiment, {}), tmp_path)
        context = RunContext(time.time() - 10, console)
        write_json(tmp_path / "certificate.json", experiment.certificate.as_json())
        record = RunCloser(experiment, tmp_path, context, tracker, Restarts()).close("FINISHED", result, None)
        report(record, experiment, tmp_path, console)
        assert RunRecord.read(tmp_path) == record
        return read(tmp_path, "summary.json"), output.getvalue()

    return close


def test_summary_and_last_lines(reported: Reported) -> None:
    """The summary has every measurement, null where it is unknown; the terminal shows metrics, speed and folder."""
    summary, text = reported()
    assert (summary["status"], summary["samples_seen"], summary["eval"]) == ("FINISHED", 200, {"accuracy": 71.25})
    assert (summary["compilations"], summary["warnings"], summary["comm_s"]) == (None, [], None)
    assert "tokens" not in summary
    for part in ("finished", "accuracy 71.25", "10 optimizer steps, 200 samples, 31 samples/s", "saved to"):
        assert part in text
    assert "compilations" not in text
    assert "fp16" not in text
    assert "of which fp16 skipped 3" in reported(applied_steps=7, skipped_steps=3)[1]


def test_a_card_that_cannot_be_made(reported: Reported, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Here for lack of config.yaml. The run is finished all the same."""
    (tmp_path / "model").mkdir()
    assert reported()[0]["status"] == "FINISHED"
    assert "has no model card (" in caplog.text


def test_compilations_and_warnings_are_shown(reported: Reported) -> None:
    """Each warning is one line, however long, and brackets in it are not taken for markup."""
    warning = f"7 compilations for input_ids [4, 12], labels [rows]: {'batches should come in few shapes; ' * 4}end"
    summary, text = reported(compilations=Compilations(7, 12.34, 2), warnings=(warning,))
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
def test_what_surprises_is_said(reported: Reported, result: dict[str, Any], words: list[str] | None) -> None:
    """On the terminal and under `notes` in `summary.json`."""
    summary, text = reported(**result)
    assert len(summary["notes"]) == (words is not None)
    for word in words or ():
        assert word in f"note: {summary['notes'][0]}"
    assert ("note:" in text) is (words is not None)
    assert all(note in text for note in summary["notes"])
