"""What one sees while a run goes on, read off a console that records."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from runner import watch
from runner.compose import compose, settings
from runner.experiment import prepare
from runner.tracking.metrics_log import MetricsLog
from runner.tracking.tracker import NoTracker
from tests.replicas import TINY


def watched(folder: Path, terminal: bool) -> str:
    """The output of a made-up run of ten steps with one evaluation."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    experiment = prepare(settings(compose([*TINY, "device=cpu"])))
    log = MetricsLog(folder)
    with watch.Watch(folder, experiment, NoTracker(), console):
        for step in range(1, 6):
            log.write(step, {"train/loss": 0.5, "train/lr": 0.001, "train/samples_per_s": 1234.0})
        log.write(5, {"eval/accuracy": 87.5})
        time.sleep(0.3)
    return output.getvalue()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LOOK_EVERY", 0.02)
    monkeypatch.setattr(watch, "_LINE_EVERY", 0.05)


def test_a_log_gets_lines(tmp_path: Path) -> None:
    """Without a terminal: a line now and then, and one for each evaluation; no control characters."""
    text = watched(tmp_path, terminal=False)
    assert "step      5 of 10  loss 0.5000  lr 1.00e-03  1,234 samples/s" in text
    assert "step      5  evaluation  accuracy 87.5" in text
    assert "\x1b" not in text


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    """On a terminal: one bar with count, loss, rate and speed, and the evaluation above it."""
    text = watched(tmp_path, terminal=True)
    assert "\x1b" in text
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    for part in ("training", "5/10", "loss 0.5000", "1,234 samples/s", "accuracy 87.5"):
        assert part in text
