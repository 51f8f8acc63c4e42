"""The record of a run in `summary.json`: what is written is read again, and what is something else is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from runner.errors import UserError
from runner.folder.record import (
    VERSION,
    Compilations,
    DataSize,
    Diagnosis,
    NoiseScale,
    PredictionScores,
    RunRecord,
    RunResult,
    Score,
    SmallerMicroBatches,
    SpeedFigures,
    Tokens,
    amend,
    status_of,
)

RECORD = RunRecord(
    "FINISHED",
    setup="cpu2 · k=4 · s0",
    seed=0,
    varied={"sync.k": "4"},
    metric="accuracy",
    data=DataSize(100, 30, "windows", groups="questions", eval_groups=20, constant={"accuracy": 50.0}),
    wall_s=12.5,
    result=RunResult(
        optimizer_steps=10,
        samples_per_s=31.5,
        sync={"drift": {"mean": 0.5}},
        step_s={"forward": 0.25},
        tokens=Tokens(90, uneven=10),
        peak_memory_bytes=(3, 4),
        compilations=Compilations(7, 12.5, 2),
        noise=NoiseScale(None, None, 1.0, None, 3),
        train_loss=math.inf,
        eval={"accuracy": 71.25},
        batch_statistics=True,
        smaller_micro_batches=(SmallerMicroBatches(4, 2),),
    ),
    jobs_at_once=1,
    resumed_after=(4,),
    notes=("a note",),
    speed=SpeedFigures(baseline="one", step_share={"forward": 1.0}),
    diagnoses=(Diagnosis("padding", "padding was 30% of the tokens", 0.25, 0.3, ("recipe.padding=none",)),),
    prediction=PredictionScores(1e9, Score(11.0, 10.0, (9.0, 12.0)), Score(14.0, 12.5), Score(1.0, 2.0), None),
)


def write(folder: Path, content: Any) -> None:
    (folder / "summary.json").write_text(json.dumps(content))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """In strict JSON, with the entries where readers of the file have always found them."""
    RECORD.write(tmp_path)
    assert RunRecord.read(tmp_path) == RECORD
    content = json.loads((tmp_path / "summary.json").read_text())
    assert (content["version"], content["optimizer_steps"], content["train_loss"]) == (VERSION, 10, "Infinity")
    assert content["diagnosis"] == content["diagnoses"][0]["sentence"]
    assert (content["speed"]["tokens"]["uneven"], content["speed"]["peak_memory_bytes"]) == (10, [3, 4])
    assert content["speed"]["samples_per_s"] == content["samples_per_s"] == 31.5
    assert content["prediction"]["training_s"]["error"] == pytest.approx(0.1)
    assert not {"result", "tokens"} & content.keys()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"status": "KILLED", "eval": {}}, RunRecord("KILLED")),
        ({"status": "FAILED", "error": "x", "diverged": True}, RunRecord("FAILED", error="x", diverged=True)),
        ({"status": "FINISHED", "speed": None, "eval": None, "later": 1}, RunRecord("FINISHED")),
        (
            {"status": "FINISHED", "diagnoses": [{"kind": "busy", "sentence": "b", "lost_share": 0.5}]},
            RunRecord("FINISHED", diagnoses=(Diagnosis("busy", "b", 0.5),)),
        ),
    ],
)
def test_a_file_from_before_there_was_a_version(tmp_path: Path, content: dict[str, Any], expected: RunRecord) -> None:
    """It may lack all that was added since, and have what is no longer used."""
    write(tmp_path, content)
    assert RunRecord.read(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"score": 1}, "it has no status"),
        ({"status": 1}, "status is 1"),
        ({"status": "FINISHED", "samples_seen": "many"}, "samples_seen is 'many'"),
        ({"status": "FINISHED", "eval": {"loss": [1]}}, r"eval\.loss is \[1\]"),
        ({"status": "FINISHED", "speed": 5}, "speed"),
        ({"status": "FINISHED", "notes": "one"}, "notes is 'one'"),
        ({"status": "FINISHED", "prediction": {"wall_s": 1}}, "measured_at"),
        ({"status": "FINISHED", "version": VERSION + 1}, f"version {VERSION + 1}"),
        ({"status": "FINISHED", "evaluated": {"model": "m"}}, "evaluation"),
        ([], "not what the runner writes"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_sentence(tmp_path: Path, content: Any, why: str) -> None:
    write(tmp_path, content)
    with pytest.raises(UserError, match=why) as error:
        RunRecord.read(tmp_path)
    assert "\n" not in str(error.value)
    assert RunRecord.read_if_valid(tmp_path) is None


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    assert (RunRecord.read(tmp_path), status_of(tmp_path)) == (None, None)


def test_amending_keeps_what_it_does_not_know(tmp_path: Path) -> None:
    write(tmp_path, {"evaluated": {}, "later": [1]})
    amend(tmp_path, error="x")
    assert json.loads((tmp_path / "summary.json").read_text()) == {"evaluated": {}, "later": [1], "error": "x"}


@pytest.mark.parametrize(("value", "expected"), [(0.5, 0.5), (math.nan, None), (math.inf, None), (None, None)])
def test_objective_for_an_optimizing_sweeper(value: float | None, expected: float | None) -> None:
    """A run that diverged has no objective: optuna ends a study that reports NaN."""
    result = RunResult(eval={} if value is None else {"loss": value})
    assert dataclasses.replace(RECORD, metric="loss", result=result).objective == expected
