"""How documents become the rows that a language model is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.errors import UserError

#: How documents become rows -> what a row then is, in the plural.
PACKINGS = {"blocks": "blocks", "documents": "rows"}

#: Documents tokenised together: enough for all cores, few enough for the memory of long lists.
_TOGETHER = 1000

#: Bytes of English text for each token of GPT-2's and similar vocabularies, on the average.
_BYTES_PER_TOKEN = 4


def token_ids(tokenizer: Any, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """The tokens of each text as its tokenizer cuts it, then the end-of-text token; int32 of shape [tokens].

    A tokenizer that has none (`eos`) ends texts with its separator (`sep`). Raises UserError if it has neither.
    """
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is None:
        raise UserError(
            "recipe.model has a tokenizer with neither an end-of-text token nor a separator, and documents have to end "
            "with one: set eos_token in its tokenizer_config.json"
        )
    for start in range(0, len(texts), _TOGETHER):
        # Not verbose: that a text is longer than the model's positions is no news, since it will be cut.
        together = tokenizer(list(texts[start : start + _TOGETHER]), return_attention_mask=False, verbose=False)
        for ids in together["input_ids"]:
            # Some tokenizers end a text by themselves.
            yield np.asarray(ids if ids and ids[-1] == end else [*ids, end], dtype=np.int32)


def packed(documents: Sequence[np.ndarray], packing: str, block_size: int) -> dict[str, list[Any]]:
    """The columns of a table of these documents' tokens, no row of which is longer than `block_size`.

    `packing`: `blocks` joins the documents and cuts the whole, so that only the last row may be short;
    `documents` cuts each by itself, and a column `group` numbers those that rows were left of, from 0.
    """
    assert packing in PACKINGS, packing
    groups: dict[str, list[int]] = {}
    if packing == "blocks":
        rows = _cut(np.concatenate(documents), block_size)
    else:
        of_document = [pieces for document in documents if (pieces := _cut(document, block_size))]
        rows = [row for pieces in of_document for row in pieces]
        groups["group"] = [number for number, pieces in enumerate(of_document) for _ in pieces]
    lengths = [len(row) for row in rows]
    return {"input_ids": rows, "length": lengths, "label_count": [length - 1 for length in lengths], **groups}


def _cut(tokens: np.ndarray, block_size: int) -> list[np.ndarray]:
    """Pieces of `block_size` tokens, the last of which may be short.

    A last piece of one token is left out: the first token of a row is no target, so it would be a row without any.
    """
    pieces = (tokens[start : start + block_size] for start in range(0, len(tokens), block_size))
    return [piece for piece in pieces if len(piece) > 1]


@dataclass(frozen=True)
class Size:
    """About how much text there is, in documents and in tokens of them all."""

    documents: int
    tokens: int


def size_of(texts: Sequence[str]) -> Size:
    """Estimated, without a tokenizer; the tokens that end documents are counted."""
    return Size(len(texts), sum(len(text.encode()) for text in texts) // _BYTES_PER_TOKEN + len(texts))


def expected_rows(size: Size, packing: str, block_size: int) -> int:
    """About how many rows so much text comes to."""
    full = size.tokens / block_size
    # A document's last row is half full, on the average, where documents are longer than a block.
    rows = full if packing == "blocks" else max(size.documents, full + size.documents / 2)
    return max(math.ceil(rows), 1)
