"""The best span of a window, against a search through all of them, and the best window of a question."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recipes.tasks.spans import best_rows, best_spans


def by_search(start: list[float], end: list[float], first: int, last: int, longest: int) -> tuple[float, int, int]:
    """The first span of the highest sum, one by one."""
    spans = [(i, j) for i in range(first, last + 1) for j in range(i, min(i + longest, last + 1))]
    best = max(spans, key=lambda span: (start[span[0]] + end[span[1]], -span[0], -span[1]))
    return start[best[0]] + end[best[1]], *best


@pytest.mark.parametrize("longest", [1, 2, 5, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_span_is_looked_at(longest: int, dtype: torch.dtype) -> None:
    """On random scores with padding of minus infinity, the result is that of looking at all spans, ties included."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-6, 6, (2, 200, 12), generator=generator).to(dtype)  # whole numbers: many ties
    context = torch.tensor([[3 + i % 4, 6 + i % 5] for i in range(200)])
    context[:, 1] = context.max(dim=1).values
    scores[:, :, 11:] = -torch.inf
    found = best_spans(scores[0], scores[1], context, longest)
    wanted = [
        by_search(start, end, first, last, longest)
        for start, end, (first, last) in zip(scores[0].tolist(), scores[1].tolist(), context.tolist(), strict=True)
    ]
    assert found.tolist() == [list(map(float, row)) for row in wanted]
    assert found.dtype == dtype


def test_an_end_before_its_start_is_no_span() -> None:
    """The likeliest start after the likeliest end: neither is combined with the other."""
    start = torch.tensor([[0.0, 1.0, 5.0, 0.0]])
    end = torch.tensor([[0.0, 5.0, 0.0, 1.0]])
    assert best_spans(start, end, torch.tensor([[0, 3]]), 30).tolist() == [[6.0, 1.0, 1.0]]


def test_best_window_of_each_question() -> None:
    """The highest score decides, the first of equal ones, wherever the windows of a question stand."""
    scores = np.array([1.0, 3.0, 2.0, 2.0, 7.0, 3.0])
    groups = np.array([0, 0, 1, 1, 2, 0])
    assert best_rows(scores, groups).tolist() == [1, 2, 4]


def test_a_question_without_a_window_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        best_rows(np.array([1.0, 2.0]), np.array([0, 2]))
