"""Count the padding that is computed in training."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from runner.backends import Backend
from runner.data.loader import FILLER
from runner.data.recipe import Batch
from runner.folder.record import Tokens


def token_width(batch: Batch) -> int | None:
    """Tokens per row: the columns of `input_ids`, or else of the widest 2-D integer tensor; None without one.

    Reads shapes only.
    """
    tensors = [batch["input_ids"]] if "input_ids" in batch else batch.values()
    numbers = (tensor for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point())
    return max((tensor.shape[1] for tensor in numbers), default=None)


def tokens_of(batch: Batch, rows: np.ndarray, lengths: np.ndarray, padded: bool = True) -> Tokens:
    """Count what a model computes for a collated batch.

    `rows`: table row of each batch row, or FILLER; `lengths`: tokens of each table row; `padded`: with its padding.
    """
    width = token_width(batch)
    if width is None:
        return Tokens()
    own = np.minimum(lengths[rows[rows != FILLER]], width)  # a recipe may truncate rows
    longest, total = int(own.max(initial=0)), int(own.sum())
    if not padded:
        fillers = len(rows) - len(own)  # copies of the shortest row
        return Tokens(of_samples=total, fillers=fillers and fillers * min(int(lengths.min()), width))
    return Tokens(
        of_samples=total,
        uneven=len(own) * longest - total,
        beyond=len(own) * (width - longest),
        fillers=(len(rows) - len(own)) * width,
    )


def over_all_workers(tokens: Tokens, backend: Backend) -> Tokens | None:
    """The sum over all workers; None for models without tokens. A collective."""
    counts = backend.all_gather_object(torch.tensor([dataclasses.astuple(tokens)], dtype=torch.int64))
    total = sum((Tokens(*map(int, rows[0])) for rows in counts), Tokens())
    return total if total != Tokens() else None
