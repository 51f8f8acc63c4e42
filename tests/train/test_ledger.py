"""The ledger's arithmetic, its file, and what it knows about a run that it ends itself."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from runner.backends import Backend
from runner.config.plain import to_plain
from runner.plan import order
from runner.plan.order import DataOrder
from runner.train.ledger import (
    EpochRecord,
    Ledger,
    LedgerError,
    as_json,
    digest_of_epochs,
    digest_of_samples,
    planned_digest,
)
from runner.train.throughput import StepRecord
from tests.plan.test_order import plan
from tests.pool import WorkerPool
from tests.replicas import make_loop

Rows = list[tuple[int, int]]

WHOLE: Rows = [(0, 3), (0, 1), (1, 4), (1, 0), (2, 2), (2, 5)]


class Planned(DataOrder):
    """Six samples in the steps of `WHOLE`."""

    def __init__(self) -> None:
        super().__init__(plan(6, global_batch=2), 0, 0, None)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        return np.array([sample for _, sample in WHOLE])[start:stop]


def step_record(step: int, also: Any, counted: int = 2) -> StepRecord:
    return StepRecord(step, 0.5, 0.1, 2 * step, counted, 2, 1.0, 1, also=also.tolist())


def trained(
    rows: Rows, steps: int = 3, workers: int = 2, skipped: int | None = None, epoch: int = 0, closes: bool = True
) -> Ledger:
    """The ledger of the last worker after steps on these rows of (t, id), dealt to `workers`; step `skipped` was."""
    ledgers = [Ledger() for _ in range(workers)]
    for t in range(steps):
        ids = np.array([sample for at, sample in rows if at == t], dtype=np.int64)
        shares = [ids[rank::workers] for rank in range(workers)]
        also = sum(ledger.record(epoch, t, own, t == skipped) for ledger, own in zip(ledgers, shares, strict=True))
        backend: Any = SimpleNamespace(all_gather_object=lambda _, all_ids=shares: all_ids)
        for ledger in ledgers:
            ledger.check([step_record(t + 1, also)], Planned(), backend)
    if closes:
        ledgers[-1].close_epoch(Planned())
    return ledgers[-1]


@pytest.mark.parametrize(
    ("rows", "duplicated", "missing", "misplaced", "named"),
    [
        (WHOLE, 0, 0, 0, None),
        ([*WHOLE, (2, 5)], 1, 0, 0, "step 3: of 2 planned samples 1 were duplicated (5)"),  # a duplicated tail
        (WHOLE[:-1], 0, 1, 0, "step 3: of 2 planned samples 1 were missing (5)"),  # a dropped tail
        # a tail filled up with the first sample
        ([*WHOLE[:-1], (2, 3)], 1, 1, 1, "step 3: of 2 planned samples 1 were missing (5), 1 were of another step (3)"),
        # four ranks that each read all the data
        (WHOLE * 4, 18, 0, 0, "step 1: of 2 planned samples 6 were duplicated (1, 1, 1, 3, 3, …)"),
        ([], 0, 6, 0, "step 1: of 2 planned samples 2 were missing (1, 3)"),
        # two batches swapped
        ([(1 - t if t < 2 else t, sample) for t, sample in WHOLE], 0, 0, 4, "step 1: of 2 planned samples 2 were miss"),
        # two samples swapped
        (
            [(0, 4), (0, 1), (1, 3), *WHOLE[3:]],
            0,
            0,
            2,
            "step 1: of 2 planned samples 1 were missing (3), 1 were of an",
        ),
        (WHOLE[2:], 0, 2, 0, "step 1: of 2 planned samples 2 were missing (1, 3)"),
        # a sample that is in no step
        ([*WHOLE[:-1], (2, 9)], 0, 1, 1, "step 3: of 2 planned samples 1 were missing (5), 1 were of another step (9)"),
    ],
)
def test_every_deviation_is_counted(
    rows: Rows, duplicated: int, missing: int, misplaced: int, named: str | None
) -> None:
    """And the first step with one is named, with its samples."""
    ledger = trained(rows)
    (record,) = ledger.epochs
    assert (record.duplicated, record.missing, record.misplaced) == (duplicated, missing, misplaced)
    assert (record.samples_seen, record.unique) == (len(rows), len({sample for _, sample in rows}))
    assert record.sound is (not ledger.failures) is (rows == WHOLE)
    assert named is None or ledger.failures[0].startswith(f"optimizer {named}")


def test_an_unfinished_epoch_expects_its_finished_steps() -> None:
    (record,) = trained(WHOLE[:4], steps=2).epochs
    assert record.sound
    assert record.expected == 4


def test_a_step_left_out_is_found() -> None:
    """Its samples are missing from the next one."""
    ledger, backend = Ledger(), SimpleNamespace(all_gather_object=lambda ids: [ids])
    for t in (0, 2):
        also = ledger.record(0, t, np.array([sample for at, sample in WHOLE if at == t]), False)
        ledger.check([step_record(t + 1, also)], Planned(), backend)  # type: ignore[arg-type]
    ledger.close_epoch(Planned())
    assert ledger.failures == ["optimizer step 3: of 4 planned samples 2 were missing (0, 4)"]
    assert (ledger.epochs[0].expected, ledger.epochs[0].missing) == (6, 2)


def test_skipped_steps_are_counted_and_sound() -> None:
    (record,) = trained(WHOLE, skipped=1).epochs
    assert record.skipped == 2
    assert record.sound


def test_digest() -> None:
    """Of the samples in each step, in whatever order and by however many workers they were trained on."""
    expected = planned_digest(Planned(), 7, 6)
    assert {trained(rows, workers=n, epoch=7).epochs[0].digest for rows in (WHOLE, WHOLE[::-1]) for n in (1, 2, 3)} == {
        expected
    }
    swapped = [(1, 3), (0, 1), (0, 4), *WHOLE[3:]]
    digests = {trained(rows).epochs[0].digest for rows in (WHOLE, swapped, WHOLE[:-1], [*WHOLE, (2, 5)])}
    assert len({expected, *digests}) == 5
    assert digest_of_epochs(["aa", "bb"]) == hashlib.sha256(b"aabb").hexdigest()


def test_recorded_digest() -> None:
    """It never changes unnoticed: runs of different versions are compared by it."""
    assert digest_of_samples(1, 2, np.array([3, 4])).tolist() == [16286211675544045432, 13308410637382316547]


def test_digests_of_other_samples_differ() -> None:
    """No two of 10,000 triples (epoch, step, sample) that are small numbers have a half in common."""
    halves = [digest_of_samples(epoch, t, np.array([i])) for epoch in range(4) for t in range(50) for i in range(50)]
    assert len({int(half) for one in halves for half in one}) == 2 * len(halves)


@pytest.mark.parametrize("rows", [[(t, sample) for t, sample in WHOLE if t < 2], WHOLE[:3]])
def test_state_within_an_epoch(rows: Rows) -> None:
    """A ledger that continues ends like one that was not interrupted, with a mistake before it and without."""
    whole = trained([*rows, *WHOLE[4:]])
    ledger = Ledger()
    ledger.load_state_dict(json.loads(json.dumps(trained(rows, steps=2, closes=False).state_dict())))
    also = ledger.record(0, 2, np.array([2, 5]), False)
    backend: Any = SimpleNamespace(all_gather_object=lambda ids: [ids])
    ledger.check([step_record(3, also)], Planned(), backend)
    ledger.close_epoch(Planned())
    assert (ledger.epochs, ledger.failures) == (whole.epochs, whole.failures)


def test_file() -> None:
    """Unsound if any epoch is, if anything failed, or if there is no epoch."""
    good = EpochRecord(0, 6, 6, 6, 0, 0, 0, 0, "aa")
    bad = EpochRecord(1, 6, 7, 6, 1, 0, 0, 0, "bb")

    def content(*epochs: EpochRecord, failures: tuple[str, ...] = ()) -> dict[str, object]:
        ledger = Ledger()
        ledger.epochs += epochs
        ledger.failures += failures
        found: dict[str, object] = json.loads(json.dumps(as_json(ledger)))
        return found

    both = content(good, bad)
    assert (both["sound"], both["samples_seen"], both["duplicated"]) == (False, 13, 1)
    assert content(good)["sound"] is True
    assert content(good)["digest"] != both["digest"]
    assert content(good, failures=("step 3",))["sound"] is False
    assert content()["sound"] is False


def groups_of_an_unfinished_epoch(backend: Backend, steps: int) -> tuple[int | None, list[int]]:
    """Three samples per group; the ledger's count of groups, and the samples of the first `steps` global batches."""
    loop = make_loop(backend, [])
    loop.ledger = Ledger(np.arange(100) // 3)
    loop.train(until=steps)
    loop.close_ledger()
    loop.policy.close()
    return loop.ledger.epochs[0].groups_seen, loop.order.ids(0, 0, 24 * steps).tolist()


def test_groups_are_counted_over_all_workers(pool: WorkerPool) -> None:
    for seen, samples in pool.run(2, groups_of_an_unfinished_epoch, 2):
        assert seen == len({sample // 3 for sample in samples})


def train_unsharded(backend: Backend, overrides: list[str], from_step: int) -> tuple[str, int, list[dict[str, int]]]:
    """Read all data on every worker from a step (counted from 0) on; the error, the last step and the ledger."""
    loop = make_loop(backend, ["optimizer=sgd", *overrides])
    deal = order.deal

    def everything(ids, world_size, rank):  # type: ignore[no-untyped-def]  # as `deal`
        return ids if loop.optimizer_step >= from_step else deal(ids, world_size, rank)

    loop.train(until=from_step)
    with mock.patch.object(order, "deal", everything):
        try:
            loop.train()
            loop.finish()
            said = "nothing"
        except LedgerError as error:
            said = str(error)
    loop.policy.close()
    return said, loop.optimizer_step, [to_plain(record) for record in loop.ledger.epochs]


@pytest.mark.parametrize(
    ("overrides", "from_step", "expected"),
    [
        (["log_every=1"], 0, [(24, 48, 24)]),  # within the first epoch
        (["batch.global_batch=100", "epochs=3"], 1, [(100, 100, 100), (100, 200, 100)]),  # after the second one's end
    ],
)
def test_the_open_epoch_is_closed_on_failure(
    pool: WorkerPool, overrides: list[str], from_step: int, expected: list[tuple[int, int, int]]
) -> None:
    """A wrong count of loss terms ends the run before the epoch is over; the ledger has what was read until then."""
    for error, _, epochs in pool.run(2, train_unsharded, overrides, from_step):
        assert "loss terms where" in error
        assert [(one["expected"], one["samples_seen"], one["unique"]) for one in epochs] == expected


def test_the_open_epoch_is_closed_once_if_losses_arrive_late(pool: WorkerPool) -> None:
    """With overlap the run continues for some steps, and their samples are in the ledger as well."""
    overlap = ["sync.k=2", "sync.overlap=true", "sync.delay=1", "log_every=1"]
    for error, steps, (epoch,) in pool.run(2, train_unsharded, overlap, 1):
        assert "loss terms where" in error
        expected = min(24 * steps, 100)  # the first 24 were sharded
        counts = (epoch["expected"], epoch["samples_seen"], epoch["unique"])
        assert counts == (expected, 2 * expected - 24, expected)
