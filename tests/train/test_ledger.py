"""The ledger's arithmetic, its file, and what it knows about a run that it ends itself."""

from __future__ import annotations

import hashlib
import json
import struct
from unittest import mock

import numpy as np
import pytest

from runner.backends import Backend
from runner.config.plain import to_plain
from runner.plan import order
from runner.train.ledger import EpochRecord, Ledger, LedgerError, as_json, epoch_digest, merge
from tests.pool import WorkerPool
from tests.replicas import make_loop

PERMUTATION = np.array([3, 1, 4, 0, 2, 5])
WHOLE = [(0, 3), (0, 1), (1, 4), (1, 0), (2, 2), (2, 5)]


def entries(rows: list[tuple[int, int]]) -> np.ndarray:
    """Rows of (t, id), none skipped."""
    return np.array([[t, sample, 0] for t, sample in rows], dtype=np.int64).reshape(-1, 3)


@pytest.mark.parametrize(
    ("rows", "duplicated", "missing", "misplaced"),
    [
        (WHOLE, 0, 0, 0),
        ([*WHOLE, (2, 5)], 1, 0, 0),  # a duplicated tail
        (WHOLE[:-1], 0, 1, 0),  # a dropped tail
        ([*WHOLE[:-1], (2, 3)], 1, 1, 1),  # a tail filled up with the first sample
        (WHOLE * 4, 18, 0, 0),  # four ranks that each read all the data
        ([], 0, 6, 0),
        ([(1 - t if t < 2 else t, sample) for t, sample in WHOLE], 0, 0, 4),  # two batches swapped
        ([(0, 4), (0, 1), (1, 3), *WHOLE[3:]], 0, 0, 2),  # two samples swapped
    ],
)
def test_every_deviation_is_counted(rows: list[tuple[int, int]], duplicated: int, missing: int, misplaced: int) -> None:
    record = merge(0, entries(rows), PERMUTATION, np.array(WHOLE))
    assert (record.duplicated, record.missing, record.misplaced) == (duplicated, missing, misplaced)
    assert record.sound is (rows == WHOLE)


def test_an_unfinished_epoch_expects_its_finished_steps() -> None:
    assert merge(0, entries(WHOLE[:4]), PERMUTATION, np.array(WHOLE[:4])).sound


def test_skipped_steps_are_counted_and_sound() -> None:
    table = entries(WHOLE)
    table[2:4, 2] = 1
    record = merge(0, table, PERMUTATION, np.array(WHOLE))
    assert record.skipped == 2
    assert record.sound


def test_digest() -> None:
    """SHA-256 over epoch, then (t, id) in permutation order, as 64-bit integers, in whatever order workers report."""
    content = struct.pack("<q", 7) + b"".join(struct.pack("<qq", t, sample) for t, sample in WHOLE)
    assert epoch_digest(7, entries(WHOLE[::-1]), PERMUTATION) == hashlib.sha256(content).hexdigest()
    swapped = [(1, 3), (0, 1), (0, 4), *WHOLE[3:]]
    digests = {epoch_digest(0, entries(rows), PERMUTATION) for rows in (WHOLE, swapped, WHOLE[:-1])}
    assert len(digests) == 3


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
    data, ledger = loop.order, Ledger(np.arange(100) // 3)
    for step in map(data.step, range(steps)):
        ledger.record(step.t, np.concatenate(data.micro_batches(0, step)), skipped=False)
    record = ledger.close_epoch(0, steps, data, backend)
    loop.policy.close()
    return record.groups_seen, data.ids(0, 0, 24 * steps).tolist()


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
