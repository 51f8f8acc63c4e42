"""`equivalence=identical`: the shards of a global batch that a worker has, and the order in which sums are added.

A global batch is dealt to a number of shards that does not depend on the workers. The sum over them is taken in one
binary tree over their numbers: neighbours in pairs, then these pairs in pairs, and what is left over from right to
left. A worker has neighbouring shards, adds up the whole subtrees among them, and what is added across workers is the
rest of the same tree. So the same pairs of numbers are added on any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


def used_shards(samples: int, shards: int) -> int:
    """The shards that a global batch of this many samples has: each has at least one of them."""
    return min(samples, shards)


def shards_by_worker(used: int, world_size: int) -> list[range]:
    """The numbers of each worker's shards, which are neighbours; `used`: the shards of the global batch."""
    return [range(used * rank // world_size, used * (rank + 1) // world_size) for rank in range(world_size)]


@dataclass(frozen=True)
class Subtree(Generic[Value]):
    """The sum over the shards `first` to `first + size - 1`."""

    first: int
    size: int
    value: Value


class TreeSum(Generic[Value]):
    """Adds up values of shards, or of subtrees of them, that come from left to right.

    `add(left, right)` may reuse the memory of `left`. Only the subtrees that still lack a neighbour are kept, which are
    at most as many as the tree is high.
    """

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self._add = add
        self.subtrees: list[Subtree[Value]] = []

    def append(self, subtree: Subtree[Value]) -> None:
        self.subtrees.append(subtree)
        while len(self.subtrees) > 1 and _are_halves(*self.subtrees[-2:]):
            self._join()

    def total(self) -> Value:
        """The sum over all shards, of which there has to be one."""
        while len(self.subtrees) > 1:
            self._join()
        return self.subtrees[0].value

    def _join(self) -> None:
        right, left = self.subtrees.pop(), self.subtrees.pop()
        value = self._add(left.value, right.value)
        self.subtrees.append(Subtree(left.first, left.size + right.size, value))


def _are_halves(left: Subtree[Value], right: Subtree[Value]) -> bool:
    """Whether they are the two halves of a subtree. Sizes are powers of two until the end."""
    return left.size == right.size and left.first % (2 * left.size) == 0


def subtrees_of(shards: Iterable[int]) -> list[Subtree[None]]:
    """The whole subtrees that neighbouring shards add up to, as a worker has them at the end of a step."""
    tree: TreeSum[None] = TreeSum(lambda left, right: None)
    for shard in shards:
        tree.append(Subtree(shard, 1, None))
    return tree.subtrees
