"""Shards of a global batch: who has them, and the tree in which their sums are added."""

from __future__ import annotations

import pytest

from runner.errors import UserError
from runner.plan.batch import BatchSizes, sharded_sizes
from runner.plan.shards import Subtree, TreeSum, shards_by_worker, subtrees_of


def tree_of(shards: range | list[int], start: list[Subtree[str]] | None = None) -> TreeSum[str]:
    tree: TreeSum[str] = TreeSum(lambda left, right: f"({left} {right})")
    for subtree in start or [Subtree(shard, 1, str(shard)) for shard in shards]:
        tree.append(subtree)
    return tree


@pytest.mark.parametrize(
    ("shards", "tree"),
    [(1, "0"), (2, "(0 1)"), (3, "((0 1) 2)"), (5, "(((0 1) (2 3)) 4)"), (7, "(((0 1) (2 3)) ((4 5) 6))")],
)
def test_the_tree_by_hand(shards: int, tree: str) -> None:
    assert tree_of(range(shards)).total() == tree


def test_any_number_of_workers_adds_in_the_same_tree() -> None:
    for used in range(1, 20):
        whole = tree_of(range(used)).total()
        for workers in range(1, used + 4):
            own = shards_by_worker(used, workers)
            assert [shard for of_worker in own for shard in of_worker] == list(range(used))
            assert max(map(len, own)) - min(map(len, own)) <= 1
            parts = [subtree for shards in own for subtree in tree_of(shards).subtrees]
            assert tree_of([], parts).total() == whole
            sizes = [(one.first, one.size) for shards in own for one in subtrees_of(shards)]
            assert sizes == [(one.first, one.size) for one in parts]


@pytest.mark.parametrize(
    ("workers", "sizes"),
    [(1, (12, 8, 96, 96)), (3, (12, 3, 36, 96)), (8, (12, 1, 12, 96))],
)
def test_sizes(workers: int, sizes: tuple[int, int, int, int]) -> None:
    """(micro-batch, micro-batches and samples of the worker with most, global batch)."""
    assert sharded_sizes(workers, 96, 8) == BatchSizes(workers, *sizes)


def test_shards_of_unequal_sizes() -> None:
    """10 samples in 4 shards: 3, 3, 2 and 2. Two workers have 6 and 4 of them."""
    assert sharded_sizes(2, 10, 4) == BatchSizes(2, 3, 2, 6, 10)


def test_every_worker_needs_a_shard() -> None:
    with pytest.raises(UserError, match=r"equivalence\.shards=4 .*5 workers"):
        sharded_sizes(5, 96, 4)
    with pytest.raises(UserError, match=r"batch\.global_batch=4 .*5 workers"):
        sharded_sizes(5, 4, 8)
