"""What the terminal shows during a run."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from runner.config.compose import compose, settings
from runner.folder import phase_progress
from runner.folder.metrics_log import MetricsLog
from runner.folder.phase_progress import PhaseProgress
from runner.plan.experiment import prepare
from runner.run import progress as progress_module
from tests.replicas import TINY


def shown(
    folder: Path,
    terminal: bool,
    sweep: Callable[[], str] | None = None,
    between: Callable[[], None] = lambda: None,
) -> str:
    """The output of a made-up run of ten steps with one evaluation; `sweep`: of the sweep it is a job of.

    `between`: done after the steps, and before the evaluation is logged.
    """
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    experiment = prepare(settings(compose([*TINY, "device=cpu"])))
    log = MetricsLog(folder)
    with progress_module.progress_shown(folder, experiment, console, sweep):
        for step in range(1, 6):
            log.write(step, {"train/loss": 0.5, "train/lr": 0.001, "train/samples_per_s": 1234.0})
        between()
        log.write(5, {"eval/accuracy": 87.5})
        time.sleep(0.3)
    return output.getvalue()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_READ_EVERY", 0.02)
    monkeypatch.setattr(progress_module, "_LINE_EVERY", 0.05)


def test_a_log_gets_lines(tmp_path: Path) -> None:
    """Without a terminal: a line now and then, and one for each evaluation; no control characters."""
    text = shown(tmp_path, terminal=False)
    assert "step      5 of 10  loss 0.5000  lr 1.00e-03  1,234 samples/s" in text
    assert "step      5  evaluation  accuracy 87.5" in text
    assert "\x1b" not in text


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    """On a terminal: one bar with count, loss, rate and speed, and the evaluation above it."""
    text = shown(tmp_path, terminal=True)
    assert "\x1b" in text
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    for part in ("training", "5/10", "loss 0.5000", "1,234 samples/s", "accuracy 87.5"):
        assert part in text


def test_tokenising_is_shown_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_progress, "_NOTE_EVERY", 0.0)
    progress = PhaseProgress(tmp_path, "tokenising", "texts")
    progress(0, 9000)
    progress(2000, 9000)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(tmp_path, True, between=lambda: time.sleep(0.4)))
    assert "tokenising" in text
    assert "2,000/9,000 texts" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_evaluation_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """While an evaluation goes on it is said how far it is, and nothing of it before or after."""
    monkeypatch.setattr(phase_progress, "_NOTE_EVERY", 0.0)
    progress = PhaseProgress(tmp_path, "evaluating", "batches")

    def evaluating() -> None:
        progress(0, 1200)
        progress(1037, 1200)
        time.sleep(0.4)
        progress(1200, 1200)

    during, before = shown(tmp_path, terminal, between=evaluating), shown(tmp_path, terminal)
    during, before = (re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in (during, before))
    assert "evaluating" in during
    assert ("1,037/1,200 batches (step 5)" if terminal else "1,037 of 1,200 batches") in during
    assert "evaluating" not in before
    last = during.rpartition("batches")[2]
    assert "evaluating" not in last
    assert ("5/10" if terminal else "evaluation  accuracy 87.5") in last


def test_a_job_of_a_sweep_shows_the_sweep(tmp_path: Path) -> None:
    """Below the bar of a job stands a line about all jobs; a run by itself, and a log, have none."""
    seen = {}
    for terminal in (True, False):
        folder = tmp_path / str(terminal)
        folder.mkdir()
        seen[terminal] = shown(folder, terminal, lambda: "3 of 18 jobs done; about 12 min left")
    assert "sweep  3 of 18 jobs done; about 12 min left" in seen[True]
    assert "jobs done" not in seen[False]
    assert "sweep" not in shown(tmp_path, terminal=True)


def test_the_sweep_is_not_asked_at_every_look(tmp_path: Path) -> None:
    """Counting a sweep's jobs reads many files: while a job runs it is done every few seconds."""
    asked: list[int] = []

    def line() -> str:
        asked.append(1)
        return "0 of 2 jobs done"

    shown(tmp_path, True, line)
    assert len(asked) == 1
