"""How far an evaluation is: what workers tell, and what of it is left for who watches the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.backends import Backend
from runner.folder import eval_progress
from runner.folder.eval_progress import EvalProgress, evaluation_under_way
from tests.pool import WorkerPool
from tests.replicas import make_loop


def told(backend: Backend, overrides: list[str]) -> list[tuple[int, int]]:
    """What a worker's loop told while it evaluated once."""
    heard: list[tuple[int, int]] = []
    loop = make_loop(backend, overrides)
    loop.eval_progress = lambda done, total: heard.append((done, total))
    loop.finish()
    return heard


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (1, [[(done, 8) for done in range(9)]]),
        (2, [[(done, 4) for done in range(5)]] * 2),
        (8, [[(0, 1), (1, 1)]] * 8),
    ],
)
def test_an_evaluation_tells_every_micro_batch(
    pool: WorkerPool, workers: int, expected: list[list[tuple[int, int]]]
) -> None:
    """30 samples in micro-batches of 4: from none of a worker's own to all of them, one after the other."""
    assert pool.run(workers, told, ["evaluation.micro_batch=4"]) == expected


def test_a_long_evaluation_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second it is seen how far it is, at most once a second; when it is over, nothing is left."""
    now = 0.0
    monkeypatch.setattr(eval_progress.time, "monotonic", lambda: now)
    progress = EvalProgress(tmp_path)
    for _ in range(2):  # a second evaluation is as the first
        progress(0, 10)
        seen = []
        for done in range(1, 10):
            now += 0.4
            progress(done, 10)
            seen.append(evaluation_under_way(tmp_path))
        assert seen == [None, None, (3, 10), (3, 10), (3, 10), (6, 10), (6, 10), (6, 10), (9, 10)]
        progress(10, 10)
        assert evaluation_under_way(tmp_path) is None
        assert list(tmp_path.iterdir()) == []


def test_a_short_evaluation_leaves_none(tmp_path: Path) -> None:
    """One that is over within a second never touches the disk: there would be no folder to write to."""
    progress = EvalProgress(tmp_path / "no_such_folder")
    for done in range(5 + 1):
        progress(done, 5)
    assert list(tmp_path.iterdir()) == []
