"""The ledger: which samples entered an update, recorded where the update was computed."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runner.backends import Backend
from runner.plan.order import DataOrder


class LedgerError(AssertionError):
    """What was trained on is not what was planned."""


@dataclass(frozen=True)
class EpochRecord:
    """One epoch over all workers, in samples. `expected`: what the plan had up to the last step taken.

    `misplaced`: samples that entered another step than the one they were planned for. `groups_seen`: how many different
    groups the samples belong to (questions, where a sample is a window); None where samples have no groups.
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
        """Whether exactly the planned samples were trained on; steps skipped by the fp16 scaler are no failure."""
        exactly_once = self.duplicated == 0 and self.missing == 0 and self.samples_seen == self.expected
        return exactly_once and self.misplaced == 0


class Ledger:
    """One worker's record of the current epoch, and the merged records of the epochs before.

    `groups`: what each sample of the data belongs to, int64 of shape [samples], or None. `failures`: what did not agree
    with the plan besides the samples, in sentences.
    """

    def __init__(self, groups: np.ndarray | None = None) -> None:
        self._groups = groups
        self.epochs: list[EpochRecord] = []
        self.failures: list[str] = []
        self._entries: list[tuple[int, np.ndarray, bool]] = []

    def record(self, t: int, ids: np.ndarray, skipped: bool) -> None:
        """Note that this worker's step on global batch `t` used these sample ids; `skipped`: by the fp16 scaler."""
        self._entries.append((t, np.asarray(ids, dtype=np.int64), skipped))

    def close_epoch(self, epoch: int, steps_done: int, order: DataOrder, backend: Backend) -> EpochRecord:
        """Merge all workers' records of the epoch, of which `steps_done` global batches were trained. A collective."""
        rows = [
            np.stack([np.full(len(ids), t), ids, np.full(len(ids), int(skipped))], axis=1)
            for t, ids, skipped in self._entries
        ]
        mine = torch.from_numpy(np.concatenate(rows)) if rows else torch.zeros((0, 3), dtype=torch.int64)
        self._entries = []
        merged = torch.cat(backend.all_gather_object(mine)).numpy()
        permutation = order.epoch_permutation(epoch)
        planned = [(np.full(s.samples, s.t), permutation[s.start : s.stop]) for s in order.steps()[:steps_done]]
        record = merge(epoch, merged, permutation, np.concatenate([np.stack(step, axis=1) for step in planned]))
        if self._groups is not None:
            record = dataclasses.replace(record, groups_seen=len(np.unique(self._groups[merged[:, 1]])))
        self.epochs.append(record)
        return record

    def state_dict(self) -> dict[str, Any]:
        return {
            "epochs": [dataclasses.asdict(record) for record in self.epochs],
            "failures": list(self.failures),
            "entries": [(t, torch.from_numpy(ids), skipped) for t, ids, skipped in self._entries],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = [EpochRecord(**record) for record in state["epochs"]]
        self.failures = list(state["failures"])
        self._entries = [(t, ids.numpy(), skipped) for t, ids, skipped in state["entries"]]


def merge(epoch: int, entries: np.ndarray, permutation: np.ndarray, planned: np.ndarray) -> EpochRecord:
    """Count one epoch. `entries`: rows of (t, id, skipped); `planned`: rows of (t, id) of the steps done."""
    ids, expected = entries[:, 1], planned[:, 1]
    unique = np.unique(ids)
    planned_t = np.full(len(permutation), -1)
    planned_t[expected] = planned[:, 0]
    return EpochRecord(
        epoch=epoch,
        expected=len(expected),
        samples_seen=len(ids),
        unique=len(unique),
        duplicated=len(ids) - len(unique),
        missing=len(np.setdiff1d(expected, unique)),
        misplaced=int((planned_t[ids] != entries[:, 0]).sum()),
        skipped=int(entries[:, 2].sum()),
        digest=epoch_digest(epoch, entries, permutation),
    )


def epoch_digest(epoch: int, entries: np.ndarray, permutation: np.ndarray) -> str:
    """A hash over (epoch, t, ids in permutation order): the same for every way of dealing the same global batches."""
    position = np.empty(len(permutation), dtype=np.int64)
    position[permutation] = np.arange(len(permutation))
    order = np.lexsort((position[entries[:, 1]], entries[:, 0]))
    content = np.ascontiguousarray(entries[order, :2], dtype="<i8")
    return hashlib.sha256(np.int64(epoch).astype("<i8").tobytes() + content.tobytes()).hexdigest()


def as_json(ledger: Ledger, unit: str = "samples", groups: str | None = None) -> dict[str, Any]:
    """The content of `ledger.json`. `unit`, `groups`: what samples, and what they belong to, are called."""
    epochs = ledger.epochs
    totals = ("samples_seen", "duplicated", "missing", "misplaced", "skipped")
    digest = hashlib.sha256("".join(record.digest for record in epochs).encode()).hexdigest()
    return {
        # Without a closed epoch nothing is known, and that is not soundness.
        "sound": bool(epochs) and not ledger.failures and all(record.sound for record in epochs),
        "failures": ledger.failures,
        "unit": unit,
        "groups": groups,
        **{name: sum(getattr(record, name) for record in epochs) for name in totals},
        "digest": digest,
        "epochs": [dataclasses.asdict(record) for record in epochs],
    }
