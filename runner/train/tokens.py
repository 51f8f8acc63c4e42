"""How many of the tokens that a model is fed are padding."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from runner.backends import Backend
from runner.data.loader import FILLER
from runner.data.recipe import Batch


@dataclass(frozen=True)
class Tokens:
    """Tokens of training batches by what they are there for.

    `of_samples`: the samples' own. All others are padding: `uneven` up to the longest sample of a batch, `beyond` from
    there to the batch's width, `fillers` in rows that are there for the shape's sake.
    """

    of_samples: int = 0
    uneven: int = 0
    beyond: int = 0
    fillers: int = 0

    @property
    def padding_share(self) -> float:
        """Of all tokens, of which there has to be one."""
        padding = self.uneven + self.beyond + self.fillers
        return padding / (self.of_samples + padding)

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def token_width(batch: Batch) -> int | None:
    """Tokens of a row: the most columns of a tensor [rows, columns] of whole numbers; None if there is no such tensor.

    It looks at shapes only, so the host waits for nothing.
    """
    numbers = (tensor for tensor in batch.values() if tensor.dim() == 2 and not tensor.is_floating_point())
    return max((tensor.shape[1] for tensor in numbers), default=None)


def tokens_of(batch: Batch, rows: np.ndarray, lengths: np.ndarray) -> Tokens:
    """Count a collated batch. `rows`: the table's row behind each of its rows, or FILLER; `lengths`: of the table's."""
    width = token_width(batch)
    if width is None:
        return Tokens()
    own = np.minimum(lengths[rows[rows != FILLER]], width)  # a recipe may cut rows off
    longest, total = int(own.max(initial=0)), int(own.sum())
    return Tokens(
        of_samples=total,
        uneven=len(own) * longest - total,
        beyond=len(own) * (width - longest),
        fillers=(len(rows) - len(own)) * width,
    )


def over_all_workers(tokens: Tokens, backend: Backend) -> Tokens | None:
    """The sum of all workers' tokens; None if nothing was fed that has any. A collective."""
    counts = backend.all_gather_object(torch.tensor([dataclasses.astuple(tokens)], dtype=torch.int64))
    total = sum((Tokens(*map(int, rows[0])) for rows in counts), Tokens())
    return total if total != Tokens() else None
