"""What the ledger knows of a run that it ends itself: the reason why a count was wrong."""

from __future__ import annotations

from unittest import mock

import pytest

from runner.backends import Backend
from runner.config.plain import to_plain
from runner.plan import order
from runner.train.ledger import LedgerError
from tests.pool import WorkerPool
from tests.replicas import make_loop
from tests.sync.reference import SGD


def read_by_everybody(backend: Backend, overrides: list[str], from_step: int) -> tuple[str, int, list[dict[str, int]]]:
    """Train on all the data on every worker from a step on, counted from 0; what was said, when, and the ledger."""
    loop = make_loop(backend, overrides)
    deal = order.deal

    def everything(ids, world_size, rank):  # type: ignore[no-untyped-def]  # as `deal`
        return ids if loop.optimizer_step >= from_step else deal(ids, world_size, rank)

    loop.train(until=from_step)
    with mock.patch.object(order, "deal", everything):
        try:
            loop.train()
            loop.finish()
        except LedgerError as error:
            said = str(error)
        else:
            said = "nothing"
    loop.policy.close()
    return said, loop.optimizer_step, [to_plain(record) for record in loop.ledger.epochs]


@pytest.mark.parametrize(
    ("overrides", "from_step", "expected"),
    [
        ([], 0, [(24, 48, 24)]),  # within the first epoch
        (["batch.global_batch=100"], 0, [(100, 200, 100)]),  # after its last step
        (["batch.global_batch=100", "epochs=3"], 1, [(100, 100, 100), (100, 200, 100)]),  # and after that of the second
    ],
)
def test_the_open_epoch_is_closed(
    pool: WorkerPool, overrides: list[str], from_step: int, expected: list[tuple[int, int, int]]
) -> None:
    """The count of loss terms ends the run before an epoch is over; the ledger has what was read until then."""
    for said, _, epochs in pool.run(2, read_by_everybody, [*SGD, *overrides], from_step):
        assert "loss terms where" in said
        assert [(one["expected"], one["samples_seen"], one["unique"]) for one in epochs] == expected


def test_it_is_closed_once(pool: WorkerPool) -> None:
    """Where losses come late the run goes on for some steps, and what was read in these is in the ledger as well."""
    overlap = ["sync.k=2", "sync.overlap=true", "sync.delay=1"]
    for said, steps, epochs in pool.run(2, read_by_everybody, [*SGD, *overlap], 1):
        assert "loss terms where" in said
        (epoch,) = epochs
        expected = min(24 * steps, 100)  # of which the first 24 were dealt out
        counts = (epoch["expected"], epoch["samples_seen"], epoch["unique"])
        assert counts == (expected, 2 * expected - 24, expected)
