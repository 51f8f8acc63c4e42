"""The progress of an evaluation: what the loop reports, and what the parent process can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.backends import Backend
from runner.folder import phase_progress
from runner.folder.phase_progress import PhaseProgress, phase_under_way
from runner.train.build import build_loop
from runner.train.hooks import Hooks
from tests.pool import WorkerPool
from tests.replicas import tiny_job


def reported(backend: Backend, overrides: list[str]) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    hooks = Hooks(evaluation_progress=lambda done, total: calls.append((done, total)))
    build_loop(tiny_job(overrides, backend.world_size), backend, hooks).finish()
    return calls


def test_an_evaluation_reports_every_micro_batch(pool: WorkerPool) -> None:
    """30 samples in micro-batches of 4 on two workers: each counts its own."""
    assert pool.run(2, reported, ["evaluation.micro_batch=4"]) == [[(done, 4) for done in range(5)]] * 2


def test_a_long_evaluation_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one second, with at most one update per second; at the end the file is removed."""
    now = 0.0
    monkeypatch.setattr(phase_progress.time, "monotonic", lambda: now)
    progress = PhaseProgress(tmp_path, "evaluating", "batches")
    for _ in range(2):  # a second evaluation is like the first
        progress(0, 10)
        seen = []
        for done in range(1, 10):
            now += 0.4
            progress(done, 10)
            seen.append(phase_under_way(tmp_path))
        assert [phase and phase.done for phase in seen] == [None, None, 3, 3, 3, 6, 6, 6, 9]
        progress(10, 10)
        assert phase_under_way(tmp_path) is None
        assert list(tmp_path.iterdir()) == []
