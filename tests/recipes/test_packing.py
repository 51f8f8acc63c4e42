"""How documents become rows: every token by hand, tails kept, and as many targets as there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from recipes.tasks.packing import Size, expected_rows, packed, size_of, token_ids

from runner.errors import UserError
from tests.recipes.letters import END, LETTERS, PAD, UNKNOWN, A, bracketing, word_tokenizer

B, C, D, E, F = (A + number for number in range(1, 6))


def plain(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {**columns, "input_ids": [row.tolist() for row in columns["input_ids"]]}


def cut(documents: Sequence[Sequence[int]], packing: str, block_size: int) -> dict[str, list[Any]]:
    return plain(packed([np.asarray(document, dtype=np.int32) for document in documents], packing, block_size))


#: "a b c", "d e" and "f", each with its end.
DOCUMENTS = [[A, B, C, END], [D, E, END], [F, END]]


@pytest.mark.parametrize(
    ("block_size", "rows"),
    [
        (4, [[A, B, C, END], [D, E, END, F]]),  # the last END alone would have no target
        (5, [[A, B, C, END, D], [E, END, F, END]]),  # the tail is kept
        (7, [[A, B, C, END, D, E, END], [F, END]]),
        (3, [[A, B, C], [END, D, E], [END, F, END]]),
        (9, [[A, B, C, END, D, E, END, F, END]]),
        (99, [[A, B, C, END, D, E, END, F, END]]),
        (2, [[A, B], [C, END], [D, E], [END, F]]),
    ],
)
def test_blocks(block_size: int, rows: list[list[int]]) -> None:
    """Documents joined and cut: full blocks, then the tail, unless it is a single token."""
    lengths = [len(row) for row in rows]
    targets = [length - 1 for length in lengths]
    assert cut(DOCUMENTS, "blocks", block_size) == {"input_ids": rows, "length": lengths, "label_count": targets}


@pytest.mark.parametrize(
    ("block_size", "rows", "groups"),
    [
        (4, [[A, B, C, END], [D, E, END], [F, END]], [0, 1, 2]),
        (3, [[A, B, C], [D, E, END], [F, END]], [0, 1, 2]),  # the first one's END alone would have no target
        (2, [[A, B], [C, END], [D, E], [F, END]], [0, 0, 1, 2]),
        (99, [[A, B, C, END], [D, E, END], [F, END]], [0, 1, 2]),
    ],
)
def test_rows_of_documents(block_size: int, rows: list[list[int]], groups: list[int]) -> None:
    """No row has tokens of two documents; those of one document carry its number."""
    lengths = [len(row) for row in rows]
    targets = [length - 1 for length in lengths]
    expected = {"input_ids": rows, "length": lengths, "label_count": targets, "group": groups}
    assert cut(DOCUMENTS, "documents", block_size) == expected


def test_a_document_that_leaves_no_row() -> None:
    """A document of which nothing is left is not numbered either, so that numbers have no gaps."""
    found = cut([[A, END], [END], [B, END]], "documents", 4)
    assert (found["input_ids"], found["group"]) == ([[A, END], [B, END]], [0, 1])
    assert cut([[END]], "documents", 4)["input_ids"] == cut([[END]], "blocks", 4)["input_ids"] == []


@pytest.mark.parametrize("packing", ["blocks", "documents"])
@pytest.mark.parametrize("block_size", [2, 3, 7, 16])
def test_nothing_else_is_lost(packing: str, block_size: int) -> None:
    """Of a thousand documents every token is there once and in order, but for last pieces of one token."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 99, size) for size in draw.integers(1, 40, 1000)]
    found = cut(documents, packing, block_size)
    wholes = [np.concatenate(documents)] if packing == "blocks" else documents
    kept = [whole[:-1] if len(whole) % block_size == 1 else whole for whole in wholes]
    assert [token for row in found["input_ids"] for token in row] == np.concatenate(kept).tolist()
    assert max(found["length"]) == block_size
    assert min(found["label_count"]) >= 1


# --- tokens -------------------------------------------------------------------------------------------------


def ids(tokenizer: Any, *texts: str) -> list[list[int]]:
    return [one.tolist() for one in token_ids(tokenizer, texts)]


def test_documents_end_with_the_end_of_text() -> None:
    """The end-of-text token follows every document, and the separator where a tokenizer has no such token."""
    assert ids(word_tokenizer(LETTERS, eos_token="<|endoftext|>"), "a b", "z", "c") == [
        [A, B, END],
        [UNKNOWN, END],
        [C, END],
    ]
    assert ids(word_tokenizer(LETTERS, sep_token="<pad>"), "a b") == [[A, B, PAD]]
    assert ids(word_tokenizer(LETTERS, sep_token="<pad>", eos_token="<|endoftext|>"), "a") == [[A, END]]


def test_a_tokenizer_with_special_tokens_of_its_own() -> None:
    """What a tokenizer puts before and after a text by itself stays, and is not put there twice."""
    own = bracketing(word_tokenizer(LETTERS, eos_token="<|endoftext|>"))
    assert ids(own, "a b", "c") == [[PAD, A, B, END], [PAD, C, END]]


def test_a_tokenizer_without_an_end() -> None:
    """Documents that cannot be told apart are refused, with the mend."""
    with pytest.raises(UserError, match=r"^recipe\.model has a tokenizer with neither an end-of-text") as caught:
        ids(word_tokenizer(LETTERS), "a")
    assert "set eos_token" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_long_texts_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts beyond the model's positions are no reason for a warning, and 2,500 of them come out one by one."""
    said: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", said.append)
    tokenizer = word_tokenizer(LETTERS, eos_token="<|endoftext|>", model_max_length=4)
    texts = [f"a {' '.join('b' * (number % 9))}" for number in range(2500)]
    found = ids(tokenizer, *texts)
    assert found == [[A, *[B] * (number % 9), END] for number in range(2500)]
    assert said == []
    tokenizer(texts[-1])  # by itself it would say so
    assert len(said) == 1


# --- estimates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "packing", "block_size", "rows"),
    [
        (Size(10, 1000), "blocks", 128, 8),
        (Size(10, 1024), "blocks", 128, 8),
        (Size(10, 1), "blocks", 128, 1),
        (Size(10, 1000), "documents", 50, 25),  # twenty full rows, and ten that are half full
        (Size(10, 1000), "documents", 500, 10),
        (Size(10, 20), "documents", 128, 10),
    ],
)
def test_expected_rows(size: Size, packing: str, block_size: int, rows: int) -> None:
    """A plan without the text: as many blocks as its tokens fill, or a row for each document at least."""
    assert expected_rows(size, packing, block_size) == rows


def test_size_of_texts() -> None:
    """Without a tokenizer four bytes count as a token, and so does each document's end."""
    assert size_of(["a" * 40, "é" * 10]) == Size(2, 15 + 2)
