"""What a source of data gives a task: a training and an evaluation set."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Part = TypeVar("Part")
SplitsOf = TypeVar("SplitsOf", covariant=True)


@dataclass(frozen=True)
class Splits(ABC, Generic[Part]):
    """Training and evaluation set. `source`: where they came from, for people; `notes`: on them, in sentences."""

    train: Part
    eval: Part
    source: str
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def digest(self) -> str:
        """A hash over every sample and label of both sets, in order."""
        digest = hashlib.sha256()
        for piece in self.content():
            digest.update(piece)
        return digest.hexdigest()

    @abstractmethod
    def content(self) -> Iterable[bytes]:
        """All samples and labels of both sets, in order."""

    def train_texts(self) -> Sequence[str]:
        """All texts of the training set, for a tokenizer that is trained on them; none if samples have no texts."""
        return ()


class DataSource(Protocol[SplitsOf]):
    """Where the data of a task come from."""

    def read(self) -> SplitsOf:
        """Read and check the data. Raises UserError, and Unavailable for data that are not on this machine."""
        ...

    def read_evaluation(self, file: str | None = None) -> SplitsOf:
        """The same without the training set. `file`: with its samples, which need no targets, to evaluate."""
        ...
