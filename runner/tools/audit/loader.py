"""Follow a loader: which samples it yields, and what its samplers say of themselves."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from runner.errors import UserError
from runner.tools.audit.records import Batch, SamplerFacts

#: So often a sample is read to see whether it is random: a few times, as flips are often the same in two.
_READS = 6


class RecordingSampler:
    """Passes on what a batch sampler yields, and remembers it.

    `yielded`: batches that have not been trained on yet; `evaluated`: forward passes in evaluation mode in this epoch.
    """

    def __init__(self, followed: Any) -> None:
        self.followed = followed
        self.yielded: deque[Batch] = deque()
        self.evaluated = 0
        self._epoch, self._taken = -1, 0
        self._epochs_set: list[int] = []
        self._ended: set[int] = set()
        self._left_early: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        if self.yielded and not self._taken and self.evaluated >= len(self.yielded):
            self._epoch -= 1  # the model was evaluated on it
            self._epochs_set.pop()
        elif self.yielded:
            self._left_early.append((self._epoch, len(self.yielded)))
        self.yielded.clear()
        self._epoch, self._taken, self.evaluated = self._epoch + 1, 0, 0
        epoch = self._epoch
        self._epochs_set.append(self._said("epoch", default=0))
        for ids in self.followed:
            self.yielded.append((epoch, tuple(int(one) if hasattr(one, "__index__") else one for one in ids)))
            yield ids
        self._ended.add(epoch)

    def take(self) -> Batch:
        """The batch of the next forward pass."""
        self._taken += 1
        return self.yielded.popleft()

    def _said(self, name: str, default: Any = None) -> Any:
        """An attribute of the first sampler that has it: of batches, then of samples."""
        sampler = self.followed
        while sampler is not None and not hasattr(sampler, name):
            sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
        return default if sampler is None else getattr(sampler, name)

    def facts(self) -> SamplerFacts:
        generator, samples = self._said("generator"), self.followed
        while hasattr(samples, "batch_sampler") or hasattr(samples, "sampler"):
            samples = getattr(samples, "batch_sampler", getattr(samples, "sampler", None))
        unfinished = {self._epoch} if self.yielded else set()
        return SamplerFacts(
            length=len(samples) if hasattr(samples, "__len__") else 0,
            seed=self._said("seed", None if generator is None else generator.initial_seed()),
            rank=self._said("rank"),
            replicas=self._said("num_replicas"),
            shards=self._said("num_replicas") or self._said("num_processes", 1),  # the latter is Accelerate's
            drop_last=bool(self._said("drop_last")) or bool(getattr(samples, "drop_last", False)),
            replacement=bool(self._said("replacement")),
            epochs_set=tuple(self._epochs_set) if self._said("set_epoch") else None,
            whole=frozenset(self._ended - unfinished - {epoch for epoch, _ in self._left_early}),
            left_early=tuple(self._left_early),
        )

    def __len__(self) -> int:
        return len(self.followed)

    def __getattr__(self, name: str) -> Any:
        if name == "followed":  # while it is copied
            raise AttributeError(name)
        return getattr(self.followed, name)


def fingerprint(data: Any) -> str | None:
    """Equal for equal data sets, by their first and last samples; None if these are random, as with augmentation."""
    with torch.random.fork_rng(devices=[]):  # around all, so that each goes on in the random stream
        seen = {_content((data[0], data[len(data) - 1])) for _ in range(_READS)}
    return hashlib.sha256(seen.pop().encode()).hexdigest() if len(seen) == 1 else None


def _content(value: Any) -> str:
    """Equal in all processes for equal samples: without addresses, devices, and the order of sets."""
    if isinstance(value, Mapping):
        return _content(list(value.items()))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_content, value))}]"
    if isinstance(value, (set, frozenset)):
        return _content(sorted(map(_content, value)))
    if isinstance(value, Tensor) and value.layout == torch.strided:
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if hasattr(value, "tobytes") and str(getattr(value, "dtype", "")) != "object":  # arrays and PIL's images
        return hashlib.sha256(value.tobytes()).hexdigest()
    return re.sub(r"0x[0-9a-fA-F]+|, device='[^']*'", "", repr(value))


def data_loader(loader: Any) -> DataLoader[Any]:
    """The DataLoader that batches come from; Accelerate's has one inside."""
    inner = getattr(loader, "base_dataloader", loader)
    kind = type(loader).__name__
    if not isinstance(inner, DataLoader):
        raise UserError(f"Audit needs a torch DataLoader, and {kind} is none")
    if kind == "DataLoaderDispatcher" or isinstance(inner.dataset, IterableDataset):
        raise UserError(f"Audit cannot follow {kind}: its process does not know which samples it gets")
    if not isinstance(inner.batch_sampler, BatchSampler) and not hasattr(inner.batch_sampler, "__iter__"):
        raise UserError("Audit needs a DataLoader that makes batches (batch_size or batch_sampler)")
    return inner
