"""`python -m runner.verify`: two setups in lockstep, each with its own workers, one verdict."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from runner.cli import run_tool
from tests.processes import TIMEOUT_S, left_of_session, output, start, wait_for
from tests.replicas import TINY

EXACT = [*TINY, "equivalence=exact", "recipe.model.dropout=0.1"]


@pytest.fixture(autouse=True)
def _own_temporary_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(here))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("COLUMNS", "200")


def test_same_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One worker that accumulates and two workers: exit code 0, the differences in a table and a file."""
    setups = ["--a", "device=cpu accumulation.steps=3", "--b", "device=cpu2"]
    assert run_tool("verify", [*EXACT, *setups, "--json", "report.json"]) == 0
    captured = capsys.readouterr()
    assert "Certificate: equivalent" in captured.out
    assert captured.err == ""
    report = json.loads((here / "report.json").read_text())
    assert report["finding"] is None
    assert report["steps"] == 10  # both runs end there
    assert report["certificate"]["level"] == "equivalent"
    assert [one["what"] for one in report["largest"]] == ["loss", "gradient", "weight"]
    assert all(0 <= one["share"] <= one["tolerance"] for one in report["largest"])
    assert report["largest"][2]["step"] > 0  # the weights were compared after they had moved
    assert not [*here.glob("runner-*"), *here.glob(".runner-*")]


@pytest.mark.parametrize(
    ("b", "what", "step"),
    [
        ("sync.k=4 device=cpu2", "loss", 3),
        ("optimizer.lr=2e-3 schedule.warmup_share=0", "learning rate", 1),
        ("recipe.model.hidden_size=32", "weight", 0),
    ],
)
def test_different_training(b: str, what: str, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code, and the first step and thing that differ."""
    code = run_tool("verify", [*EXACT, "device=cpu", "--a", "", "--b", b, "--steps", "4"])
    assert code == 3
    printed = capsys.readouterr().out
    assert f"different: {what}" in printed
    assert ("before the first step" if step == 0 else f"step {step}") in printed


IDENTICAL = [*TINY, "precision=fp32", "equivalence=identical", "recipe.model.dropout=0.1", "device=cpu", "--steps", "6"]


def test_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("verify", [*IDENTICAL, "--a", "", "--b", "device.workers=3"]) == 0
    printed = capsys.readouterr().out
    assert "Certificate: identical to a" in printed
    assert "the same bits in 6 optimizer steps" in printed


def test_other_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding is enough to be different: the same shards, added in another tree. The step and the tensor are named."""
    assert run_tool("verify", [*IDENTICAL, "--a", "", "--b", "equivalence.shards=7"]) == 3
    printed = capsys.readouterr().out
    assert "Certificate: equivalent to a" in printed
    assert "at optimizer step 1" in printed
    assert "other bits" in printed


@pytest.mark.long
def test_interrupted(here: Path) -> None:
    """Ctrl-C ends all workers, with exit code 130 and no folder left."""
    setups = ["device=cpu2", "epochs=1000", "--a", "", "--b", "", "--steps", "8000"]
    process = start(here, "-m", "runner.verify", *EXACT, *setups)
    wait_for(here, "runner-verify-*/progress", process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=TIMEOUT_S) == 130, output(here)
    assert "Traceback" not in output(here)
    assert not list(here.glob("runner-verify-*"))
    assert left_of_session(process.pid) == []
