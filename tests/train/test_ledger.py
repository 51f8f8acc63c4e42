"""The ledger's arithmetic; that the loop feeds it is tested with the loop."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from runner.backends import Backend
from runner.plan import make_plan
from runner.plan.order import DataOrder
from runner.train.ledger import EpochRecord, Ledger, as_json, epoch_digest, merge
from tests.pool import WorkerPool

PERMUTATION = np.array([3, 1, 4, 0, 2, 5])


def entries(*rows: tuple[int, int]) -> np.ndarray:
    """Rows of (t, id), none skipped."""
    return np.array([[t, sample, 0] for t, sample in rows], dtype=np.int64)


def planned(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


WHOLE = [(0, 3), (0, 1), (1, 4), (1, 0), (2, 2), (2, 5)]


def test_a_whole_epoch_is_sound() -> None:
    """Each planned sample once: nothing duplicated, missing or skipped."""
    record = merge(0, entries(*WHOLE), PERMUTATION, planned(*WHOLE))
    assert (record.samples_seen, record.unique, record.duplicated, record.missing, record.skipped) == (6, 6, 0, 0, 0)
    assert record.sound


@pytest.mark.parametrize(
    ("rows", "duplicated", "missing"),
    [
        ([*WHOLE, (2, 5)], 1, 0),  # a duplicated tail
        (WHOLE[:-1], 0, 1),  # a dropped tail
        ([*WHOLE[:-1], (2, 3)], 1, 1),  # a tail filled up with the first sample
        (WHOLE * 4, 18, 0),  # four ranks that each read all the data
        ([], 0, 6),
    ],
)
def test_what_is_wrong_is_counted(rows: list[tuple[int, int]], duplicated: int, missing: int) -> None:
    """Every way of training on other samples than planned is unsound, and counted as what it is."""
    table = entries(*rows) if rows else np.zeros((0, 3), dtype=np.int64)
    record = merge(0, table, PERMUTATION, planned(*WHOLE))
    assert (record.duplicated, record.missing) == (duplicated, missing)
    assert not record.sound


def test_a_partial_epoch_expects_only_its_steps() -> None:
    """A run that stopped after two global batches misses nothing of the third."""
    assert merge(0, entries(*WHOLE[:4]), PERMUTATION, planned(*WHOLE[:4])).sound


def test_skipped_steps_are_no_failure() -> None:
    """Samples of steps that the fp16 scaler skipped are counted apart."""
    table = entries(*WHOLE)
    table[2:4, 2] = 1
    record = merge(0, table, PERMUTATION, planned(*WHOLE))
    assert record.skipped == 2
    assert record.sound


def test_digest_does_not_depend_on_who_computed_what() -> None:
    """The order in which workers' records are merged does not enter; global batch, sample and epoch do."""
    digest = epoch_digest(0, entries(*WHOLE), PERMUTATION)
    assert epoch_digest(0, entries(*reversed(WHOLE)), PERMUTATION) == digest
    swapped = [(1, 3), *WHOLE[1:2], (0, 4), *WHOLE[3:]]
    assert epoch_digest(0, entries(*swapped), PERMUTATION) != digest
    assert epoch_digest(1, entries(*WHOLE), PERMUTATION) != digest
    assert epoch_digest(0, entries(*WHOLE[:-1]), PERMUTATION) != digest


def test_digest_is_of_the_documented_bytes() -> None:
    """Anybody can compute it: SHA-256 over epoch, then (t, id) in permutation order, as 64-bit integers."""
    import hashlib
    import struct

    content = struct.pack("<q", 7) + b"".join(struct.pack("<qq", t, sample) for t, sample in WHOLE)
    assert epoch_digest(7, entries(*reversed(WHOLE)), PERMUTATION) == hashlib.sha256(content).hexdigest()


def test_a_sample_in_another_step_is_misplaced() -> None:
    """The right samples in the wrong global batches are another training: two batches swapped, or two samples."""
    swapped = [(1 - t if t < 2 else t, sample) for t, sample in WHOLE]
    record = merge(0, entries(*swapped), PERMUTATION, planned(*WHOLE))
    assert (record.duplicated, record.missing, record.misplaced) == (0, 0, 4)
    assert not record.sound
    two = [(0, 4), *WHOLE[1:2], (1, 3), *WHOLE[3:]]
    assert merge(0, entries(*two), PERMUTATION, planned(*WHOLE)).misplaced == 2


def ledger_of(*epochs: EpochRecord, failures: tuple[str, ...] = ()) -> Ledger:
    ledger = Ledger()
    ledger.epochs += epochs
    ledger.failures += failures
    return ledger


def test_file_sums_up_epochs() -> None:
    """`ledger.json` has the totals, each epoch, and is unsound if one epoch is, if anything failed, or if empty."""
    good = EpochRecord(0, 6, 6, 6, 0, 0, 0, 0, "aa")
    bad = EpochRecord(1, 6, 7, 6, 1, 0, 0, 0, "bb")
    content = json.loads(json.dumps(as_json(ledger_of(good, bad))))
    assert content["sound"] is False
    assert (content["samples_seen"], content["duplicated"]) == (13, 1)
    assert [epoch["digest"] for epoch in content["epochs"]] == ["aa", "bb"]
    assert as_json(ledger_of(good))["sound"] is True
    assert as_json(ledger_of(good))["digest"] != content["digest"]
    failed = as_json(ledger_of(good, failures=("step 3: …",)))
    assert (failed["sound"], failed["failures"]) == (False, ["step 3: …"])
    assert as_json(ledger_of())["sound"] is False


def groups_of_a_begun_epoch(backend: Backend, groups: list[int], steps: int) -> tuple[int | None, list[int]]:
    """What the ledger says after `steps` global batches of two, and the samples these held."""
    sizes: dict[str, Any] = {"global_batch": 2, "micro_batch": None, "accumulation_steps": 1, "max_micro_batch": None}
    rates: dict[str, Any] = {"base_lr": 1.0, "scaling_rule": "none", "scaling_batch": "global_batch"}
    plan = make_plan(
        samples_per_epoch=len(groups),
        world_size=backend.world_size,
        drop_last=False,
        k=1,
        reference_batch=2,
        epochs=1,
        max_steps=None,
        warmup_share=0.0,
        **sizes,
        **rates,
    )
    order, ledger = DataOrder(plan, 0, backend.rank, None), Ledger(np.array(groups))
    for step in order.steps()[:steps]:
        ledger.record(step.t, np.concatenate(order.micro_batches(0, step)), skipped=False)
    record = ledger.close_epoch(0, steps, order, backend)
    return record.groups_seen, order.epoch_permutation(0)[: 2 * steps].tolist()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_groups_are_counted_as_far_as_they_were_trained(pool: WorkerPool, steps: int) -> None:
    """Of six windows of three questions: the questions of the windows trained on so far, over both workers, once."""
    groups = [0, 0, 1, 1, 2, 2]
    for seen, samples in pool.run(2, groups_of_a_begun_epoch, groups, steps):
        assert seen == len({groups[sample] for sample in samples})
