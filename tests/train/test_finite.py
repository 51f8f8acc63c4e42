"""A run whose numbers are not finite ends at the same step on all workers, and says where it began."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.backends import Backend
from runner.errors import Diverged
from runner.train.finite import FiniteNumbers
from runner.train.throughput import StepRecord
from tests.configured import configured
from tests.faulty_recipes import faulty
from tests.pool import WorkerPool
from tests.replicas import make_loop

NAN, INF = float("nan"), float("inf")
HUGE = ["optimizer.lr=1e10", "precision=fp32"]


def train_until_it_diverges(backend: Backend, overrides: list[str]) -> tuple[str, int, list[int]]:
    """The error, the step at which this worker stopped, and the steps whose loss was logged."""
    logged: list[Any] = []
    loop = make_loop(backend, overrides, logged)
    message = "it has not diverged"
    try:
        loop.train()
        loop.finish()
    except Diverged as error:
        message = str(error)
    loop.policy.close()
    return message, loop.optimizer_step, [step for step, metrics in logged if "train/loss" in metrics]


@pytest.mark.parametrize(
    ("workers", "overrides"),
    [
        (1, [*HUGE, "log_every=1"]),
        (2, [*HUGE, "log_every=4", "optimizer.clip_norm=null"]),
        (2, [*HUGE, "sync.k=2", "sync.overlap=true"]),
        (2, [*HUGE, "precision=fp16", "sync.k=2"]),
    ],
)
def test_all_workers_stop_at_the_same_step(pool: WorkerPool, workers: int, overrides: list[str]) -> None:
    """The error names the step and what to try; the loss of every step is logged before it."""
    results = pool.run(workers, train_until_it_diverges, overrides)
    message, stopped, logged = results[0]
    assert "optimizer.lr" in message
    assert ("optimizer.clip_norm=1" in message) is ("optimizer.clip_norm=null" in overrides)
    assert ("precision=bf16" in message) is ("precision=fp16" in overrides)
    assert logged == list(range(1, stopped + 1))
    assert [result[:2] for result in results] == [(message, stopped)] * workers
    if "log_every=1" in overrides:
        assert f"optimizer step {stopped} " in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.clip_norm=1"], "the norm of the gradient is nan in optimizer step 5"),
        (["optimizer.clip_norm=null"], "the weights are not finite after optimizer step 5"),
    ],
)
def test_a_gradient_of_the_last_step(pool: WorkerPool, overrides: list[str], words: str) -> None:
    """No later loss shows it."""
    given = [*faulty("LastGradientInfinite"), "epochs=1", *overrides]
    for message, _, _ in pool.run(2, train_until_it_diverges, given):
        assert words in message


def test_fp16_that_skips_every_step(pool: WorkerPool) -> None:
    given = [*faulty("Overflows"), "precision=fp16"]
    for message, stopped, _ in pool.run(2, train_until_it_diverges, given):
        assert "all 10 optimizer steps" in message
        assert "precision=bf16" in message
        assert stopped == 10


# --- The rules, on records ----------------------------------------------------------------------------------


def numbers(overrides: str = "", workers: int = 2) -> FiniteNumbers:
    backend = cast(Backend, SimpleNamespace(rank=0, world_size=workers))
    return FiniteNumbers(configured(overrides), backend)


def record(step: int, loss: float = 1.0, norms: float = 1.0, applied: int = 2) -> StepRecord:
    return StepRecord(step, loss, 0.1, 10 * step, 10, 10, norms, applied)


def test_nonfinite_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """In total, not in a row; the first is reported at once, and again at the end, after a resume, too."""
    before = numbers("nonfinite_steps=3")
    before.check([record(1), record(2, INF), record(3), record(4, NAN)])
    assert "optimizer step 2 " in capsys.readouterr().err
    resumed = numbers("nonfinite_steps=3")
    resumed.load_state_dict(before.state_dict())
    with pytest.raises(Diverged, match="loss is inf in optimizer step 2 "):
        resumed.check([record(5), record(6, norms=INF)])


def test_steps_that_fp16_skips_do_not_count() -> None:
    """By all workers, which is a skipped step, or by one, whose loss is not finite then."""
    own = numbers("precision=fp16")
    own.check([record(1, NAN, NAN, applied=0), record(2, NAN, applied=1), record(3)])
    assert (own.applied_steps, own.skipped_steps) == (2, 1)
    with pytest.raises(Diverged, match="optimizer step 4 "):
        own.check([record(4, NAN)])
    with pytest.raises(Diverged, match="optimizer step 2 "):  # no worker had a labelled sample
        numbers().check([record(1, 0.0, applied=0), record(2, NAN, applied=0)])


def test_fp16_is_given_up_when_it_only_skips() -> None:
    own = numbers("precision=fp16")
    own.check([record(step, applied=0) for step in range(1, 40)])
    own.check([record(40)])
    with pytest.raises(Diverged, match="last 40 optimizer steps"):
        own.check([record(step, applied=0) for step in range(41, 100)])


def test_metrics_of_the_result() -> None:
    """The run's metric and losses; another may be undefined for the data."""
    own = numbers()
    own.require_result({"accuracy": 50.0, "auc": NAN, "loss": 1.0}, ["loss"])
    for bad in ("accuracy", "loss"):
        with pytest.raises(Diverged, match=f"{bad} is nan"):
            own.require_result({"accuracy": 50.0, "loss": 1.0, bad: NAN}, ["loss"])
