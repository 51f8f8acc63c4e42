"""Questions with their paragraphs as token windows that a model can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.sources.squad_files import Paragraphs, Question
from runner.errors import UserError

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
        places = encoded["overflow_to_sample_mapping"]
        for row, place in enumerate(places):
            ids = encoded["input_ids"][row]
            question = questions[place]
            context = _context(encoded.sequence_ids(row), question)
            offsets = np.asarray(encoded["offset_mapping"][row], dtype=np.int32)
            none = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
            is_first, is_last = places[row - 1 : row] != [place], places[row + 1 : row + 2] != [place]
            answer = answer_tokens(question, context, offsets, is_first, is_last) or (none, none)
            yield Window(start + place, question.context, ids, types[row] if types else None, context, offsets, answer)


def _cut(texts: list[str], tokenizer: Any, longest: int) -> list[str]:
    """The beginnings of texts that have at most so many tokens."""
    offsets = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [_beginning(text, own, tokenizer, longest) for text, own in zip(texts, offsets, strict=True)]


def _beginning(text: str, offsets: list[tuple[int, int]], tokenizer: Any, longest: int) -> str:
    # Part of a text can have more tokens than they were within the whole: go on until it fits.
    keep = longest
    while len(offsets) > longest:
        text = text[: offsets[keep - 1][1]] if keep else ""
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        keep -= 1
    return text


def _context(sequences: list[int | None], question: Question) -> tuple[int, int]:
    """First and last token of the second text. Raises UserError for one of which the tokenizer leaves nothing."""
    if 1 not in sequences:
        raise UserError(
            f"question '{question.id}' has a paragraph of which the tokenizer leaves nothing: leave it out of the data"
        )
    first = sequences.index(1)
    return first, len(sequences) - 1 - sequences[::-1].index(1)


def answer_tokens(
    question: Question, context: tuple[int, int], offsets: np.ndarray, is_first: bool, is_last: bool
) -> tuple[int, int] | None:
    """First and last token of the question's first answer, or None if the window does not hold it whole.

    `is_first`, `is_last`: whether the paragraph begins or ends in this window.
    """
    first, last = context
    text, start = question.answers[0]
    end = start + len(text.rstrip())
    start += len(text) - len(text.lstrip())
    inside = offsets[first : last + 1]
    # What a tokenizer drops, an accent or a mark of no width, belongs to no token: the edges of answer and of tokens
    # need not meet. It is the first token that ends after the answer's beginning, and the last to begin before its end.
    begins = int(np.searchsorted(inside[:, 1], start, side="right"))
    ends = int(np.searchsorted(inside[:, 0], end, side="left")) - 1
    whole = (is_first or start >= inside[0, 0]) and (is_last or end <= inside[-1, 1])
    if not whole or begins > ends:
        return None
    return first + begins, first + ends
