"""Questions with their paragraphs as token windows that a model can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.squad_files import Paragraphs, Question

#: Questions tokenised together: enough for both cores, few enough for the memory of long lists.
_TOGETHER = 512


@dataclass(frozen=True)
class WindowSizes:
    """All in tokens. `doc_stride`: of the paragraph that neighbouring windows share."""

    max_length: int
    doc_stride: int
    max_query_length: int


@dataclass(frozen=True)
class Window:
    """One row of a table.

    `group`, `paragraph`: numbers of the question and of its paragraph in their part. `types`: None for a model without
    token types. `context`: first and last token that belong to the paragraph. `offsets`: [tokens, 2], characters of the
    paragraph that a token stands for, of use inside `context` only. `answer`: first and last token of the first answer,
    or twice the token that stands for none.
    """

    group: int
    paragraph: int
    ids: list[int]
    types: list[int] | None
    context: tuple[int, int]
    offsets: np.ndarray
    answer: tuple[int, int]


def windows(part: Paragraphs, tokenizer: Any, sizes: WindowSizes) -> Iterator[Window]:
    """All windows of a part, question by question. A question that is longer than `max_query_length` is cut."""
    for start in range(0, len(part), _TOGETHER):
        questions = part.questions[start : start + _TOGETHER]
        encoded = tokenizer(
            _cut([question.text for question in questions], tokenizer, sizes.max_query_length),
            [part.contexts[question.context] for question in questions],
            truncation="only_second",
            max_length=sizes.max_length,
            stride=sizes.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        types = encoded.get("token_type_ids")
        for row, place in enumerate(encoded["overflow_to_sample_mapping"]):
            ids = encoded["input_ids"][row]
            context = _context(encoded.sequence_ids(row))
            offsets = np.asarray(encoded["offset_mapping"][row], dtype=np.int32)
            none = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
            question = questions[place]
            answer = answer_tokens(question, context, offsets) or (none, none)
            yield Window(start + place, question.context, ids, types[row] if types else None, context, offsets, answer)


def _cut(texts: list[str], tokenizer: Any, longest: int) -> list[str]:
    encoded = tokenizer(
        texts, truncation=True, max_length=longest, add_special_tokens=False, return_offsets_mapping=True
    )
    ends = [offsets[-1][1] if len(offsets) == longest else None for offsets in encoded["offset_mapping"]]
    return [text[:end] for text, end in zip(texts, ends, strict=True)]


def _context(sequences: list[int | None]) -> tuple[int, int]:
    """First and last token of the second text; a window always has some of it."""
    first = sequences.index(1)
    return first, len(sequences) - 1 - sequences[::-1].index(1)


def answer_tokens(question: Question, context: tuple[int, int], offsets: np.ndarray) -> tuple[int, int] | None:
    """First and last token of the question's first answer, or None if the window does not hold it whole."""
    first, last = context
    text, start = question.answers[0]
    end = start + len(text)
    inside = offsets[first : last + 1]
    if start < inside[0, 0] or end > inside[-1, 1]:
        return None
    begins = int(np.searchsorted(inside[:, 0], start, side="right")) - 1
    ends = int(np.searchsorted(inside[:, 1], end, side="left"))
    return first + begins, first + max(begins, ends)
