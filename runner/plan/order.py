"""Which samples form each global batch, and which of them each worker's micro-batches hold.

Global batches are cut first, from one permutation per seed and epoch, and only then dealt to workers and micro-batches.
So the content of global batch `t` is the same for every world size, accumulation and resume point.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from runner.config.choices import BatchOrder
from runner.plan import Plan
from runner.plan.keyed import KeyedPermutation, hashed
from runner.plan.shards import shards_by_worker, used_shards
from runner.plan.steps import Step, step_of_epoch


def permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of sample ids in `epoch`; int64 of shape [samples].

    NumPy's PCG64 seeded with SeedSequence([seed, epoch]), so that every pair of seed and epoch has its own order. (With
    seed + epoch, as in torch's DistributedSampler, seed 1 would start with the second epoch of seed 0.)
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(samples)


def sample_seeds(seed: int, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that gives each sample id its random number in `epoch`; uint64 of the shape of the ids.

    The key differs from those of `permutation` and of the keyed one: a third word that is 0 would give the same.
    """
    key = np.random.SeedSequence([seed, epoch, 1]).generate_state(1, np.uint64)[0]
    return lambda ids: hashed(ids.astype(np.uint64), key)


def deal(ids: np.ndarray, world_size: int, rank: int) -> np.ndarray:
    """One worker's share of a global batch: every `world_size`-th id, so the sizes of shares differ by at most 1."""
    return ids[rank::world_size]


def cut(share: np.ndarray, accumulation_steps: int) -> list[np.ndarray]:
    """A worker's share as micro-batches, as equal as possible; fewer of them if there are not enough samples."""
    parts = min(accumulation_steps, len(share))
    return np.array_split(share, parts) if parts else []


class PermutationTable:
    """`permutation` in memory, with 8 bytes per sample."""

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        self._ids = permutation(samples, seed, epoch)

    def ids(self, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop`; int64 of shape [stop - start]."""
        return self._ids[start:stop]


_ORDERS: dict[str, type[PermutationTable] | type[KeyedPermutation]] = {
    BatchOrder.permutation.name: PermutationTable,
    BatchOrder.keyed.name: KeyedPermutation,
}


class DataOrder:
    """One worker's view of the order of a whole run; the position in it is the state."""

    def __init__(self, plan: Plan, seed: int, rank: int, lengths: np.ndarray | None) -> None:
        """`lengths`: tokens per sample, to sort each global batch by; None keeps the epoch's order."""
        self._plan = plan
        self._seed = seed
        self._rank = rank
        self._lengths = lengths
        self._of_epoch: tuple[int, PermutationTable | KeyedPermutation] | None = None
        #: Micro-batches of a step: more than planned where memory was too little for so few.
        self.accumulation_steps = plan.accumulation_steps
        self.epoch = 0
        self.t = 0

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop` of an epoch; int64 of shape [stop - start]."""
        if self._of_epoch is None or self._of_epoch[0] != epoch:
            plan = self._plan
            self._of_epoch = (epoch, _ORDERS[plan.order](plan.samples_per_epoch, self._seed, epoch))
        return self._of_epoch[1].ids(start, stop)

    @property
    def steps_per_epoch(self) -> int:
        return self._plan.steps_per_epoch

    def step(self, t: int) -> Step:
        """Step `t` of an epoch."""
        return step_of_epoch(t, self._plan.samples_per_epoch, self._plan.global_batch)

    def first_steps(self, samples: int) -> Iterator[Step]:
        """The first steps of an epoch, as far as they have this many samples together."""
        return itertools.takewhile(lambda step: step.stop <= samples, map(self.step, range(self.steps_per_epoch)))

    def global_batch(self, epoch: int, step: Step) -> np.ndarray:
        """Sample ids of a global batch, in the order in which they are dealt to workers."""
        ids = self.ids(epoch, step.start, step.stop)
        if self._lengths is None:
            return ids
        return ids[np.argsort(self._lengths[ids], kind="stable")]

    def micro_batches(self, epoch: int, step: Step) -> list[np.ndarray]:
        """This worker's micro-batches of a global batch; an empty list if it gets no sample."""
        plan, ids = self._plan, self.global_batch(epoch, step)
        if plan.shards is not None:
            used = used_shards(len(ids), plan.shards)
            return [deal(ids, used, shard) for shard in shards_by_worker(used, plan.world_size)[self._rank]]
        return cut(deal(ids, plan.world_size, self._rank), self.accumulation_steps)

    def most_micro_batches(self, step: Step) -> int:
        """The micro-batches of the worker that gets most of a global batch."""
        return min(self.accumulation_steps, -(-step.samples // self._plan.world_size))

    @property
    def can_cut_smaller(self) -> bool:
        """Whether micro-batches may be smaller than planned; under `equivalence=identical` they are shards."""
        return self._plan.shards is None and self.accumulation_steps < self._plan.replica_batch

    def advance(self) -> None:
        """Move to the next global batch, across epochs."""
        self.t += 1
        if self.t == self.steps_per_epoch:
            self.epoch, self.t = self.epoch + 1, 0

    def _identity(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "seed": self._seed,
            "order": plan.order,
            "samples_per_epoch": plan.samples_per_epoch,
            "global_batch": plan.global_batch,
            "drop_last": plan.drop_last,
            "length_sorted": self._lengths is not None,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "t": self.t, "identity": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["identity"] != self._identity():
            raise ValueError(f"the saved data order belongs to {state['identity']}, this run has {self._identity()}")
        self.epoch, self.t = state["epoch"], state["t"]
