"""The best answer among all spans of a window, and the best window of a question."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def best_spans(start: Tensor, end: Tensor, context: Tensor, max_answer_length: int) -> Tensor:
    """The span of the highest start score plus end score in each row; [rows, 3]: score, first and last token.

    `start`, `end`: scores, [rows, tokens]. `context`: first and last token of a row that an answer may hold, [rows, 2].
    A span has at least one and at most `max_answer_length` tokens. All spans are looked at, not those of the likeliest
    starts and ends only. Of equal ones the first is taken.
    """
    tokens = start.shape[1]
    longest = min(max_answer_length, tokens)
    place = torch.arange(tokens, device=start.device)
    inside = (context[:, :1] <= place) & (place <= context[:, 1:])
    lowest = torch.finfo(start.dtype).min
    # Half of the lowest: two of them can still be added.
    start, end = (scores.masked_fill(~inside, lowest / 2) for scores in (start, end))
    beyond = end.new_full((len(end), longest - 1), lowest / 2)
    # sums[r, s, w]: the span from token s to token s + w.
    sums = start[:, :, None] + torch.cat([end, beyond], dim=1).unfold(1, longest, 1)
    score, at = sums.flatten(1).max(dim=1)
    first = torch.div(at, longest, rounding_mode="floor")
    return torch.stack([score, first.to(score.dtype), (first + at % longest).to(score.dtype)], dim=1)


def best_rows(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each group, from 0 on, the row with the highest score, the first of equal ones; int64 of shape [groups].

    `scores`, `groups`: [rows]; every group has a row.
    """
    order = np.lexsort((np.arange(len(scores)), -scores, groups))
    found = order[np.unique(groups[order], return_index=True)[1]]
    assert np.array_equal(groups[found], np.arange(len(found)))
    return found
