"""The causal language model: packing, batches, loss and perplexity by hand, and training on several workers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.models.pretrained import Pretrained
from recipes.tasks.language_model import (
    CausalLanguageModel,
    Documents,
    packed,
    sees_ahead,
    token_ids,
)
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Prepared
from runner.errors import UserError
from tests.recipes.letters import (
    END,
    LETTERS,
    PAD,
    UNKNOWN,
    A,
    Given,
    bracketing,
    gpt2,
    letters,
    perplexity_by_hand,
    prepared,
    save_gpt2,
    word_tokenizer,
)
from tests.recipes.writers import pair_tokenizer

B, C, D, E, F = (A + number for number in range(1, 6))
N = IGNORED_LABEL
TRAIN = ["a b c", "d e", "f", "a c e g i b d f h j a b", "j"]

# --- packing --------------------------------------------------------------------------------------------------

#: "a b c", "d e" and "f", each with its end-of-text token.
DOCUMENTS = [[A, B, C, END], [D, E, END], [F, END]]


def cut(documents: Sequence[Sequence[int]], packing: str, block_size: int) -> dict[str, list[Any]]:
    found = packed([np.asarray(document, dtype=np.int32) for document in documents], packing, block_size)
    return {**found, "input_ids": [row.tolist() for row in found["input_ids"]]}


@pytest.mark.parametrize(
    ("block_size", "rows"),
    [
        (4, [[A, B, C, END], [D, E, END, F]]),  # the last END alone would have no target
        (5, [[A, B, C, END, D], [E, END, F, END]]),
        (99, [[A, B, C, END, D, E, END, F, END]]),
    ],
)
def test_blocks(block_size: int, rows: list[list[int]]) -> None:
    lengths = [len(row) for row in rows]
    expected = {"input_ids": rows, "length": lengths, "label_count": [length - 1 for length in lengths]}
    assert cut(DOCUMENTS, "blocks", block_size) == expected


def test_rows_of_documents() -> None:
    """No row has tokens of two documents; documents without a row are not numbered."""
    found = cut([*DOCUMENTS, [END], [B, END]], "documents", 2)
    assert found["input_ids"] == [[A, B], [C, END], [D, E], [F, END], [B, END]]
    assert found["group"] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("packing", ["blocks", "documents"])
@pytest.mark.parametrize("block_size", [2, 7, 16])
def test_no_token_is_lost(packing: str, block_size: int) -> None:
    """Every token occurs once and in order, except last pieces of one token."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 99, size) for size in draw.integers(1, 40, 1000)]
    found = cut(documents, packing, block_size)
    wholes = [np.concatenate(documents)] if packing == "blocks" else documents
    kept = [whole[:-1] if len(whole) % block_size == 1 else whole for whole in wholes]
    assert [token for row in found["input_ids"] for token in row] == np.concatenate(kept).tolist()
    assert max(found["length"]) == block_size


def test_documents_end_with_the_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """`eos`, or `sep` without one, and not twice; texts beyond the model's positions cause no warning."""

    def ids(tokenizer: Any, *texts: str) -> list[list[int]]:
        return [one.tolist() for one in token_ids(tokenizer, texts)]

    eos = {"eos_token": "<|endoftext|>"}
    assert ids(word_tokenizer(LETTERS, **eos), "a b", "z") == [[A, B, END], [UNKNOWN, END]]
    assert ids(word_tokenizer(LETTERS, sep_token="<pad>"), "a b") == [[A, B, PAD]]
    assert ids(bracketing(word_tokenizer(LETTERS, **eos)), "a b") == [[PAD, A, B, END]]
    with pytest.raises(UserError, match="set eos_token"):
        ids(word_tokenizer(LETTERS), "a")
    warnings: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", warnings.append)
    texts = [f"a {' '.join('b' * (number % 9))}" for number in range(2500)]
    expected = [[A, *[B] * (number % 9), END] for number in range(2500)]
    assert ids(word_tokenizer(LETTERS, **eos, model_max_length=4), *texts) == expected
    assert warnings == []


# --- data -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["blocks", "documents"])
def recipe(request: pytest.FixtureRequest) -> CausalLanguageModel:
    return letters(TRAIN, ["b c d", "e"], block_size=8, packing=request.param)


@pytest.fixture
def data(recipe: CausalLanguageModel, tmp_path: Path) -> Prepared:
    return prepared(recipe, tmp_path / "cache")


def test_facts(tmp_path: Path) -> None:
    """Rows, and for `documents` their documents; workers find what the facts have tokenised, without the data."""
    facts = letters(TRAIN[:3], ["b c d", "e"]).facts(Cache(tmp_path / "blocks"))
    assert (facts.train_samples, facts.eval_samples, facts.unit, facts.groups) == (2, 2, "blocks", None)
    assert facts.digest == Documents(TRAIN[:3], ["b c d", "e"], "elsewhere").digest
    made, cache = letters(TRAIN, ["b c d", "e"], packing="documents"), Cache(tmp_path / "documents")
    facts = made.facts(cache)
    assert (facts.train_samples, facts.eval_samples, facts.unit) == (4 + 3, 2, "rows")
    assert (facts.groups, facts.train_groups, facts.eval_groups) == ("documents", 5, 2)
    entry = dataclasses.replace(made, data=Given([])).prepare(cache, facts)
    assert [entry] == list((tmp_path / "documents").iterdir())


def test_collate(tmp_path: Path) -> None:
    """Rows are padded on the right; every token but the first is a target, the end of text included."""
    made = letters(TRAIN, block_size=8, packing="documents")
    found = prepared(made, tmp_path)
    for length, more in ((None, 0), (6, 2)):
        batch = made.collate(found.train[[2, 0]], found, length)
        assert batch["input_ids"].tolist() == [[F, END, PAD, PAD, *[PAD] * more], [A, B, C, END, *[PAD] * more]]
        assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, *[0] * more], [1, 1, 1, 1, *[0] * more]]
        assert batch["labels"].tolist() == [[N, END, N, N, *[N] * more], [N, B, C, END, *[N] * more]]


def test_a_pad_token_in_the_text_is_text(tmp_path: Path) -> None:
    """GPT-2 pads with its end of text; the one that ends a document is seen and predicted."""
    made = CausalLanguageModel(Given(["a b", "c d e"]), Pretrained(str(save_gpt2(tmp_path / "m"))), 8, "documents")
    found = prepared(made, tmp_path / "cache")
    batch = made.collate(found.train[[0, 1]], found)
    assert batch["input_ids"].tolist() == [[A, B, END, END], [C, D, E, END]]
    assert batch["labels"].tolist()[0] == [N, B, END, N]
    assert batch["attention_mask"].tolist()[0] == [1, 1, 1, 0]


# --- perplexity ---------------------------------------------------------------------------------------------


# Logits (0, ln 3) give the two tokens the probabilities 1/4 and 3/4.
LN4, LN4_3 = math.log(4), math.log(4 / 3)


def test_perplexity_by_hand(recipe: CausalLanguageModel, data: Prepared) -> None:
    """Over all targets and not over rows, however rows are batched and padded: token by token in fp64."""
    predictions = torch.tensor([[1.0, 1], [3 * math.log(6) - 1, 2], [0, 0]], dtype=torch.float64)
    assert recipe.metrics(predictions, data.eval) == pytest.approx({"perplexity": 6.0, "loss": math.log(6)}, rel=1e-12)
    torch.manual_seed(0)
    model = recipe.build_model(data).eval().double()
    expected = perplexity_by_hand(model, data.train)
    rows = list(range(len(data.train)))
    for size, length in ((1, None), (2, 11), (len(rows), None)):
        batches = [recipe.collate(data.train[rows[i : i + size]], data, length) for i in range(0, len(rows), size)]
        with torch.no_grad():
            found = torch.cat([recipe.predict(model, batch) for batch in batches])
        assert recipe.metrics(found, data.train)["perplexity"] == pytest.approx(expected, rel=1e-10)
        by_row = recipe.row_metrics(found, data.train)
        assert float(by_row["perplexity"].mean()) == pytest.approx(expected, rel=1e-10)
        groups = data.train.groups()
        assert len(by_row["loss"]) == (len(rows) if groups is None else len(set(groups)))
    assert expected > 5


# --- models and settings --------------------------------------------------------------------------------------


def test_bidirectional_models(tmp_path: Path) -> None:
    """They are refused: before tokenising if the configuration says so, otherwise when they are built."""
    made = letters(TRAIN, causal=False)
    with pytest.raises(UserError, match=r"recipe\.model is a BertLMHeadModel"):
        made.build_model(prepared(made, tmp_path))
    model = gpt2(13).train()
    assert not sees_ahead(model)
    assert model.training
    (tmp_path / "bert").mkdir()
    config = {"model_type": "bert", "is_decoder": False, "max_position_embeddings": 8}
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))
    pair_tokenizer().save_pretrained(str(tmp_path / "bert"))
    bert = CausalLanguageModel(Given(TRAIN), Pretrained(str(tmp_path / "bert"), "random"), 16)
    with pytest.raises(UserError, match="use a causal model"):  # not that it has too few positions
        bert.check_model()


def test_texts_without_a_target(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.data\.eval has no row of two tokens"):
        letters(TRAIN, [""]).facts(Cache(tmp_path))
