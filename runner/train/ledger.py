"""The ledger: which samples entered which update, recorded where the update was computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runner.backends import Backend
from runner.config.choices import LedgerMode
from runner.folder.files import digest_of_bytes
from runner.plan.order import DataOrder
from runner.train.throughput import StepRecord

#: A mistake in the data repeats in every step: the first ones only are listed.
_MAX_FAILURES = 10


class LedgerError(AssertionError):
    """The samples trained on are not those planned."""


@dataclass(frozen=True)
class EpochRecord:
    """One epoch over all workers, in samples. `expected`: planned up to the last step that was trained.

    `misplaced`: samples in another step than planned. `skipped`: samples of steps that the fp16 scaler skipped.
    `groups_seen`: number of distinct groups of the samples (questions, if samples are windows); None without groups.
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


class Ledger:
    """One worker's record of the current epoch, and the merged records of previous epochs.

    `groups`: the group of each sample, int64 of shape [samples], or None. `mode`: whether a mismatch with the plan ends
    the run. `failures`: one sentence per mismatch.
    """

    def __init__(self, groups: np.ndarray | None = None, mode: LedgerMode = LedgerMode.fail) -> None:
        self._groups, self._mode = groups, mode
        self.epochs: list[EpochRecord] = []
        self.failures: list[str] = []
        #: The current epoch's rows of (t, id, skipped), int64.
        self._entries: list[np.ndarray] = []

    def record(self, t: int, ids: np.ndarray, skipped: bool) -> None:
        """Record the sample ids of this worker's step on global batch `t`; `skipped`: by the fp16 scaler."""
        rows = np.stack([np.full(len(ids), t), ids, np.full(len(ids), int(skipped))], axis=1)
        self._entries.append(rows.astype(np.int64, copy=False))

    def close_epoch(self, epoch: int, steps_done: int, order: DataOrder, backend: Backend) -> EpochRecord:
        """Merge all workers' records of an epoch after `steps_done` global batches. A collective."""
        merged = torch.cat(backend.all_gather_object(self._rows())).numpy()
        self._entries = []
        permutation = order.ids(epoch, 0, order.samples_per_epoch)
        steps = map(order.step, range(steps_done))
        planned = [(np.full(s.samples, s.t), permutation[s.start : s.stop]) for s in steps]
        record = merge(epoch, merged, permutation, np.concatenate([np.stack(step, axis=1) for step in planned]))
        if self._groups is not None:
            record = dataclasses.replace(record, groups_seen=len(np.unique(self._groups[merged[:, 1]])))
        self.epochs.append(record)
        return record

    def require_counts(self, records: Sequence[StepRecord], order: DataOrder, backend: Backend) -> None:
        """Compare the loss terms of steps with their plan; what happens to a mismatch, see `_fail`."""
        for record in records:
            if record.counted != record.planned:
                counts = f"counted {record.counted} loss terms where {record.planned} were planned"
                self._fail(f"optimizer step {record.step}: the recipe {counts}", order, backend)

    def require_sound(self, record: EpochRecord, order: DataOrder, backend: Backend) -> None:
        """Compare the samples of an epoch with its plan; what happens to a mismatch, see `_fail`."""
        if not record.sound:
            sentence = (
                f"epoch {record.epoch}: of {record.expected} planned samples {record.missing} were missing, "
                f"{record.duplicated} were duplicated and {record.misplaced} were in another step"
            )
            self._fail(sentence, order, backend)

    def _fail(self, sentence: str, order: DataOrder, backend: Backend) -> None:
        """Note a mismatch with the plan, on all workers. With ledger=fail it is a collective and raises LedgerError."""
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(sentence)
        if self._mode is LedgerMode.fail:
            epoch, done = (order.epoch, order.t) if order.t else (order.epoch - 1, order.steps_per_epoch)
            if len(self.epochs) == epoch:  # still open: its samples explain why a count is wrong
                self.close_epoch(epoch, done, order, backend)
            raise LedgerError(f"{sentence} (set ledger=warn to continue nevertheless)")

    def _rows(self) -> torch.Tensor:
        rows = [np.zeros((0, 3), dtype=np.int64), *self._entries]
        return torch.from_numpy(np.concatenate(rows))

    def state_dict(self) -> dict[str, Any]:
        return {
            "epochs": [dataclasses.asdict(record) for record in self.epochs],
            "failures": list(self.failures),
            "entries": self._rows(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = [EpochRecord(**record) for record in state["epochs"]]
        self.failures = list(state["failures"])
        self._entries = [state["entries"].numpy()]


def merge(epoch: int, entries: np.ndarray, permutation: np.ndarray, planned: np.ndarray) -> EpochRecord:
    """Compare one epoch with its plan. `entries`: rows of (t, id, skipped); `planned`: rows of (t, id)."""
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
    """SHA-256 over epoch and (t, id) in permutation order as 64-bit integers: the same for every split of a batch."""
    position = np.empty(len(permutation), dtype=np.int64)
    position[permutation] = np.arange(len(permutation))
    order = np.lexsort((position[entries[:, 1]], entries[:, 0]))
    content = np.ascontiguousarray(entries[order, :2], dtype="<i8")
    return digest_of_bytes(np.int64(epoch).astype("<i8").tobytes(), content.tobytes())


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
