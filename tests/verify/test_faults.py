"""Every known mistake of distributed training is named: by the ledger, or by what `runner.verify` compares."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from runner.config.choices import PrecisionName
from runner.verify.compare import Comparison, Finding
from runner.verify.lockstep import Frame, judge
from runner.verify.snapshot import Snapshot
from tests.pool import WorkerPool
from tests.verify.faults import FAULTS, replay

#: Dropout on, no clipping (it would hide a gradient of the wrong length), and tails that workers share unevenly.
EXACT = [
    "equivalence=exact",
    "recipe.model.dropout=0.1",
    "recipe.model.attention_dropout=0.1",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "optimizer.clip_norm=null",
    "schedule.warmup_share=0",
]
STEPS = 6  # the fifth is the tail of 4 samples, the sixth begins another epoch


def first_finding(a: Sequence[Frame], b: Sequence[Frame], precision: str) -> Finding | None:
    comparison = Comparison.of(PrecisionName[precision])
    findings = (judge(of_a, of_b, comparison) for of_a, of_b in zip(a, b, strict=False))
    return next((finding for finding in findings if finding is not None), None)


@pytest.fixture(scope="module", params=["fp64", "fp32"])
def one_worker(pool: WorkerPool, request: pytest.FixtureRequest) -> tuple[str, list[Frame]]:
    return request.param, pool.run(1, replay, [*EXACT, f"precision={request.param}"], STEPS)[0]


#: fault, workers, accumulation, k: what names it, at which step (0: before the first), and words of the sentence.
NAMED = [
    ("every rank reads all the data", 2, 1, 1, "ledger", 1, "counted 48 loss terms where 24 were planned"),
    ("a duplicated tail", 3, 1, 1, "ledger", 5, "counted 6 loss terms where 4 were planned"),
    ("a dropped tail", 2, 1, 1, "ledger", 5, "counted 0 loss terms where 4 were planned"),
    ("gradients halved", 2, 1, 1, "gradient", 1, "differ by 0.5 of their norm"),
    ("mean of means", 3, 1, 1, "gradient", 5, "differ by"),
    ("learning rate scaled twice", 2, 1, 1, "learning rate", 1, "0.5 times as much"),
    ("scheduler stepped per process", 2, 1, 1, "learning rate", 2, "times as much"),
    ("another data seed on one rank", 2, 1, 1, "samples", 1, "only in a"),
    ("other new weights on one rank", 2, 1, 1, "replicas", 0, "worker 1 has other bits"),
    ("other new weights on one rank", 2, 1, 4, "replicas", 0, "worker 1 has other bits"),
    ("another dropout seed on one rank", 2, 1, 1, "loss", 1, "of it, tolerance"),
    ("dropout keyed by rank", 2, 1, 1, "loss", 1, "of it, tolerance"),
    ("dropout keyed by flat index", 1, 2, 1, "loss", 1, "of it, tolerance"),
    ("dropout keyed by flat index", 2, 1, 1, "loss", 1, "of it, tolerance"),
    ("one micro-batch skipped", 2, 2, 1, "ledger", 1, "counted 18 loss terms where 24 were planned"),
    ("a filler row that counts", 8, 1, 1, "ledger", 5, "counted 8 loss terms where 4 were planned"),
]


@pytest.mark.parametrize(("fault", "workers", "accumulation", "k", "what", "step", "words"), NAMED)
def test_a_fault_is_named(
    pool: WorkerPool,
    one_worker: tuple[str, list[Frame]],
    fault: str,
    workers: int,
    accumulation: int,
    k: int,
    what: str,
    step: int,
    words: str,
) -> None:
    """Against one worker, the first thing that is found is what the fault does, at the step where it does it."""
    precision, a = one_worker
    overrides = [*EXACT, f"precision={precision}", f"accumulation.steps={accumulation}", f"sync.k={k}"]
    finding = first_finding(a, pool.run(workers, replay, overrides, STEPS, fault)[0], precision)
    assert finding is not None
    assert (finding.what, finding.step) == (what, step)
    assert words in finding.sentence


def test_no_fault_is_left_out() -> None:
    assert {row[0] for row in NAMED} == set(FAULTS)


@pytest.mark.parametrize(("workers", "accumulation"), [(1, 2), (2, 1), (2, 2), (3, 1), (8, 1)])
def test_nothing_is_found_without_a_fault(
    pool: WorkerPool, one_worker: tuple[str, list[Frame]], workers: int, accumulation: int
) -> None:
    """The same setups without their faults have nothing to be found, to the last frame."""
    precision, a = one_worker
    overrides = [*EXACT, f"precision={precision}", f"accumulation.steps={accumulation}"]
    b = pool.run(workers, replay, overrides, STEPS)[0]
    assert first_finding(a, b, precision) is None
    assert len(a) == len(b) == STEPS + 3  # the start, the steps, the weights at the end, and nothing more
    assert a[-1] is b[-1] is None
    last = b[-3]
    assert isinstance(last, Snapshot)
    assert last.step == STEPS
    assert last.gradients.keys() <= last.weights.keys()
    final = b[-2]
    assert isinstance(final, Snapshot)
    assert all(torch.equal(final.weights[name], tensor) for name, tensor in last.weights.items())
    assert len(last.gradients) > 10
