"""The ledger: which samples entered which update, added up where the update was computed.

A worker hashes the samples of a step, and the sum of all workers' hashes, which comes with the losses, is compared with
that of the planned samples. Only if they differ are the ids of the step exchanged, to name them. So a worker keeps the
ids of the steps whose losses are not reduced yet, and no list that grows with the data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.backends import Backend
from runner.folder.files import digest_of_bytes
from runner.plan.keyed import hashed
from runner.plan.order import DataOrder
from runner.train.throughput import StepRecord

#: A mistake in the data repeats in every step: the first ones only are listed, and of each the first ids.
_MAX_FAILURES, _MAX_IDS = 10, 5
#: Keys of the two halves of a digest.
_HALVES = np.array([[0x243F6A8885A308D3], [0x13198A2E03707344]], dtype=np.uint64)
_MASK = 2**64 - 1
#: NumPy's overhead per call is most of the time of a single key.
_STEPS_AT_ONCE = 1024


class LedgerError(AssertionError):
    """The samples trained on are not those planned."""


@dataclass(frozen=True)
class EpochRecord:
    """One epoch over all workers, in samples. `expected`: planned up to the last step that was trained.

    `misplaced`: samples in another step than planned. `skipped`: samples of steps that the fp16 scaler skipped.
    `digest`: of the samples in each step, see `digest_of_samples`. `groups_seen`: number of distinct groups of the
    samples (questions, if samples are windows); None without groups.
    """

    epoch: int
    expected: int
    samples_seen: int
    unique: int
    duplicated: int
    missing: int
    misplaced: int
    skipped: int
    digest: str
    groups_seen: int | None = None

    @property
    def sound(self) -> bool:
        """True if exactly the planned samples were trained on. Steps skipped by the fp16 scaler count as trained."""
        exactly_once = self.duplicated == 0 and self.missing == 0 and self.samples_seen == self.expected
        return exactly_once and self.misplaced == 0


@dataclass
class OpenEpoch:
    """The epoch that is being trained, over all workers, as far as losses were reduced.

    `digest`: its halves. `lacking`: planned samples that were not in their step; `foreign`: samples that belong to
    another one. Both are empty unless there was a mistake.
    """

    epoch: int
    expected: int = 0
    samples_seen: int = 0
    skipped: int = 0
    digest: list[int] = field(default_factory=lambda: [0, 0])
    lacking: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)

    def add(self, digest: Sequence[int]) -> None:
        """Add the digest of a step."""
        self.digest = [(one + other) & _MASK for one, other in zip(self.digest, digest, strict=True)]

    @property
    def text(self) -> str:
        """The digest in hexadecimal."""
        return "".join(f"{half:016x}" for half in self.digest)

    def closed(self, order: DataOrder, groups: np.ndarray | None) -> EpochRecord:
        """The record of the epoch. Goes through what was planned only if there was a mistake, or for the groups."""
        unseen, unplanned = set(self.lacking) - set(self.foreign), set(self.foreign)
        seen_groups = set[int]()
        for step in order.first_steps(self.expected) if unplanned or groups is not None else ():
            planned = set(order.ids(self.epoch, step.start, step.stop).tolist())
            unplanned -= planned
            if groups is not None:
                seen_groups.update(groups[list(planned - unseen)].tolist())
        if groups is not None:
            seen_groups.update(groups[list(unplanned)].tolist())
        unique = self.expected - len(unseen) + len(unplanned)
        return EpochRecord(
            epoch=self.epoch,
            expected=self.expected,
            samples_seen=self.samples_seen,
            unique=unique,
            duplicated=self.samples_seen - unique,
            missing=len(unseen),
            misplaced=len(self.foreign),
            skipped=self.skipped,
            digest=self.text,
            groups_seen=None if groups is None else len(seen_groups),
        )


class Ledger:
    """One worker's record of the current epoch, and the records of previous epochs, over all workers.

    `groups`: the group of each sample, int64 of shape [samples], or None. `failures`: one sentence per step that was
    not as planned.
    """

    def __init__(self, groups: np.ndarray | None = None) -> None:
        self._groups = groups
        self.epochs: list[EpochRecord] = []
        self.failures: list[str] = []
        self._open: OpenEpoch | None = None
        #: Epoch, number in it and samples of this worker's steps whose losses are not reduced yet.
        self._pending: deque[tuple[int, int, np.ndarray]] = deque()

    def record(self, epoch: int, t: int, ids: np.ndarray, skipped: bool) -> Tensor:
        """Record the sample ids of this worker's step on global batch `t`; `skipped`: by the fp16 scaler.

        Returns the numbers whose sums over all workers `check` needs, fp64.
        """
        self._pending.append((epoch, t, ids))
        return torch.from_numpy(_numbers(epoch, t, ids, skipped * len(ids)))

    def check(self, records: Sequence[StepRecord], order: DataOrder, backend: Backend) -> bool:
        """Compare steps with their plan, samples and loss terms, and return whether they agree.

        A collective if samples do not: then the ids of all workers are compared.
        """
        as_planned = True
        for record in records:
            problems = list(self._problems(record, order, backend))
            as_planned = as_planned and not problems
            if problems and len(self.failures) < _MAX_FAILURES:
                self.failures.append(f"optimizer step {record.step}: {'; '.join(problems)}")
        return as_planned

    def _problems(self, record: StepRecord, order: DataOrder, backend: Backend) -> Iterator[str]:
        if record.counted != record.planned:
            yield f"the recipe counted {record.counted} loss terms where {record.planned} were planned"
        epoch, t, own = self._pending.popleft()
        planned = self._add(epoch, t, record.also, order)
        if planned is not None:
            yield self._explained(planned, np.concatenate(backend.all_gather_object(own)))

    def _add(self, epoch: int, t: int, sums: Sequence[float], order: DataOrder) -> np.ndarray | None:
        """Add the sums of a step over all workers; returns the planned samples if others were trained on."""
        if self._open is None:
            self._open = OpenEpoch(epoch)
        assert self._open.epoch == epoch, (self._open.epoch, epoch)
        *parts, seen, skipped = map(int, sums)
        planned = order.ids(epoch, self._open.expected, order.step(t).stop)  # with those of a step that was left out
        digest = [(low + (high << 32)) & _MASK for low, high in (parts[:2], parts[2:])]
        self._open.expected += len(planned)
        self._open.samples_seen += seen
        self._open.skipped += skipped
        self._open.add(digest)
        as_planned = seen == len(planned) and digest == digest_of_samples(epoch, t, planned).tolist()
        return None if as_planned else planned

    def _explained(self, planned: np.ndarray, trained: np.ndarray) -> str:
        """Note and name the samples of a step that are not as planned."""
        assert self._open is not None
        expected, found = Counter(planned.tolist()), Counter(trained.tolist())
        more = list((found - expected).elements())
        lacking = list((expected - found).elements())
        repeated, foreign = ([one for one in more if (one in expected) is here] for here in (True, False))
        self._open.lacking += lacking
        self._open.foreign += foreign
        kinds = {"missing": lacking, "duplicated": repeated, "of another step": foreign}
        said = [f"{len(ids)} were {kind} ({_some(ids)})" for kind, ids in kinds.items() if ids]
        return f"of {len(planned)} planned samples {', '.join(said)}"

    def close_epoch(self, order: DataOrder) -> None:
        """Add the record of the open epoch, if a step was checked since the previous one."""
        if self._open is not None:
            self.epochs.append(self._open.closed(order, self._groups))
            self._open = None

    def state_dict(self) -> dict[str, Any]:
        assert not self._pending, "check first: pending steps are not part of the state"
        return {
            "epochs": [dataclasses.asdict(record) for record in self.epochs],
            "failures": list(self.failures),
            "open": None if self._open is None else dataclasses.asdict(self._open),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = [EpochRecord(**record) for record in state["epochs"]]
        self.failures = list(state["failures"])
        self._open = None if state["open"] is None else OpenEpoch(**state["open"])


def _numbers(epoch: int, t: int, ids: np.ndarray, skipped: int) -> np.ndarray:
    """Numbers about samples of a step that add up over workers; fp64, in which sums of 32-bit integers are exact."""
    parts = digest_of_samples(epoch, t, ids).view(np.uint32)
    return np.array([*parts, len(ids), skipped], dtype=np.float64)


def digest_of_samples(epoch: int, t: int, ids: np.ndarray) -> np.ndarray:
    """Hash the samples of global batch `t`, in any order: the sum of two 64-bit hashes of (epoch, t, id); uint64 [2].

    Digests of parts of a batch, and of batches, add up modulo 2⁶⁴. Sums over different samples are equal with a
    probability of 2⁻¹²⁸ if some sample comes once more or less in one than in the other; of 2⁻¹²⁸ × 4ⁿ if the
    difference is a multiple of 2ⁿ for each sample.
    """
    block, number = divmod(t, _STEPS_AT_ONCE)
    return hashed(ids.astype(np.uint64), _keys(epoch, block)[:, number, None]).sum(axis=1)


@functools.lru_cache(maxsize=2)
def _keys(epoch: int, block: int) -> np.ndarray:
    """Keys of an epoch's steps; uint64 [2, steps]."""
    steps = np.arange(block * _STEPS_AT_ONCE, (block + 1) * _STEPS_AT_ONCE, dtype=np.uint64)
    return hashed(steps, hashed(np.array([epoch], dtype=np.uint64), _HALVES))


def planned_digest(order: DataOrder, epoch: int, samples: int) -> str:
    """The digest of an epoch whose first steps, with this many samples, were trained as planned."""
    record = OpenEpoch(epoch, samples)
    for step in order.first_steps(samples):
        record.add(digest_of_samples(epoch, step.t, order.ids(epoch, step.start, step.stop)).tolist())
    return record.text


def _some(ids: Sequence[int]) -> str:
    return ", ".join([*map(str, sorted(ids)[:_MAX_IDS]), *(["…"] if len(ids) > _MAX_IDS else [])])


def digest_of_epochs(digests: Iterable[str]) -> str:
    """The digest of a ledger, given those of its epochs."""
    return digest_of_bytes("".join(digests).encode())


def as_json(ledger: Ledger, unit: str = "samples", groups: str | None = None) -> dict[str, Any]:
    """The content of `ledger.json`. `unit`, `groups`: names of a sample and of a group, in the plural."""
    epochs = ledger.epochs
    totals = ("samples_seen", "duplicated", "missing", "misplaced", "skipped")
    digest = digest_of_epochs(record.digest for record in epochs)
    return {
        # Without a closed epoch nothing is known.
        "sound": bool(epochs) and not ledger.failures and all(record.sound for record in epochs),
        "failures": ledger.failures,
        "unit": unit,
        "groups": groups,
        **{name: sum(getattr(record, name) for record in epochs) for name in totals},
        "digest": digest,
        "epochs": [dataclasses.asdict(record) for record in epochs],
    }
