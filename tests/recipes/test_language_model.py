"""The causal language model: what a batch, a loss and perplexity are, checked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.models.pretrained import Pretrained
from recipes.tasks.language_model import CausalLanguageModel, sees_ahead
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Prepared, label_counts, without_targets
from runner.errors import UserError
from tests.recipes.letters import END, PAD, A, Given, gpt2, letters, perplexity_by_hand, prepared, save_gpt2

B, C, D, E, F = (A + number for number in range(1, 6))
TRAIN = ["a b c", "d e", "f", "a c e g i b d f h j a b", "j"]


@pytest.fixture(params=["blocks", "documents"])
def recipe(request: pytest.FixtureRequest) -> CausalLanguageModel:
    return letters(TRAIN, ["b c d", "e"], block_size=8, packing=request.param)


@pytest.fixture
def data(recipe: CausalLanguageModel, tmp_path: Path) -> Prepared:
    return prepared(recipe, tmp_path / "cache")


class Fixed(nn.Module):
    """A model that answers with these logits, [rows, length, vocabulary]."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.logits)


# --- batches ------------------------------------------------------------------------------------------------


def test_collate(tmp_path: Path) -> None:
    """Rows are padded on the right; every token but the first is a target, its own end of text among them."""
    recipe = letters(TRAIN, block_size=8, packing="documents")
    data = prepared(recipe, tmp_path)
    for length in (None, 4, 6):
        batch = recipe.collate(data.train[[2, 0]], data, length)
        more = (length or 4) - 4
        assert batch["input_ids"].tolist() == [[F, END, PAD, PAD, *[PAD] * more], [A, B, C, END, *[PAD] * more]]
        assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, *[0] * more], [1, 1, 1, 1, *[0] * more]]
        no = IGNORED_LABEL
        assert batch["labels"].tolist() == [[no, END, no, no, *[no] * more], [no, B, C, END, *[no] * more]]
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_pad_token_in_the_text_is_text(tmp_path: Path) -> None:
    """Where padding is the end of text, as with GPT-2, the one that ends a document is seen and predicted."""
    folder = save_gpt2(tmp_path / "model")
    recipe = CausalLanguageModel(Given(["a b", "c d e"]), Pretrained(str(folder)), 8, "documents")
    data = prepared(recipe, tmp_path / "cache")
    batch = recipe.collate(data.train[[0, 1]], data)
    assert data.properties["pad_id"] == END
    assert batch["input_ids"].tolist() == [[A, B, END, END], [C, D, E, END]]
    assert batch["labels"].tolist()[0] == [IGNORED_LABEL, B, END, IGNORED_LABEL]
    assert batch["attention_mask"].tolist()[0] == [1, 1, 1, 0]


def test_counts_of_the_table_are_those_of_the_loss(recipe: CausalLanguageModel, data: Prepared) -> None:
    """`label_count` is what the loss counts: of each row alone, of all together, and padded further."""
    model = recipe.build_model(data)
    for table in (data.train, data.eval):
        counts = label_counts(table)
        assert counts.tolist() == [length - 1 for length in table.column("length")]
        for rows in [*([row] for row in range(len(table))), list(range(len(table)))]:
            for length in (None, 8, 16):
                _, count = recipe.loss(model, recipe.collate(table[rows], data, length))
                assert int(count) == counts[rows].sum()


# --- loss ---------------------------------------------------------------------------------------------------

# Of logits (0, ln 3) the two tokens have the probabilities 1/4 and 3/4.
LN4, LN4_3 = math.log(4), math.log(4 / 3)
N = IGNORED_LABEL


@pytest.mark.parametrize(
    ("labels", "losses", "counts"),
    [
        ([[N, 1, 0], [N, 0, 0]], [LN4_3 + LN4, 2 * LN4], [2, 2]),
        ([[N, 1, N], [N, 0, 1]], [LN4_3, LN4 + LN4_3], [1, 2]),
        ([[1, 1, 1], [0, 0, 0]], [2 * LN4_3, 2 * LN4], [2, 2]),  # what stands first is no target, labelled or not
        ([[N, N, N], [N, N, 0]], [0.0, LN4], [0, 1]),
        ([[N, N, N], [N, N, N]], [0.0, 0.0], [0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loss_and_predictions_by_hand(
    labels: list[list[int]], losses: list[float], counts: list[int], dtype: torch.dtype
) -> None:
    """The loss is the sum over targets and their count; predictions are the same, row by row, in fp64."""
    recipe = letters(TRAIN)
    model = Fixed(torch.tensor([0.0, math.log(3)]).repeat(2, 3, 1).to(dtype))
    ids = torch.zeros((2, 3), dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": torch.tensor(labels)}
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-6
    loss_sum, count = recipe.loss(model, batch)
    assert loss_sum.item() == pytest.approx(sum(losses), rel=tolerance)
    assert int(count) == sum(counts)
    assert loss_sum.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    with torch.no_grad():
        predictions = recipe.predict(model, batch)
    assert predictions.dtype is torch.float64
    assert predictions[:, 0].tolist() == pytest.approx(losses, rel=tolerance)
    assert predictions[:, 1].tolist() == counts
    loss_sum.backward()  # type: ignore[no-untyped-call]
    gradient = model.logits.grad
    assert gradient is not None
    # A place is moved by the label after it, if there is one, and the last place by none.
    for row, place in np.ndindex(2, 3):
        label = labels[row][place + 1] if place < 2 else N
        expected = [0.0, 0.0] if label == N else [0.25 - (label == 0), 0.75 - (label == 1)]
        assert gradient[row, place].float().tolist() == pytest.approx(expected, abs=5e-3)


def test_loss_is_that_of_transformers(recipe: CausalLanguageModel, data: Prepared) -> None:
    """On one row the loss per target is what the model itself makes of the same labels."""
    model = recipe.build_model(data).eval()
    for row in range(len(data.train)):
        batch = recipe.collate(data.train[[row]], data)
        loss_sum, count = recipe.loss(model, batch)
        assert float(loss_sum.detach()) / int(count) == pytest.approx(float(model(**batch).loss.detach()), rel=1e-5)


def test_only_fillers(recipe: CausalLanguageModel, data: Prepared) -> None:
    """A batch of fillers runs through a real model with loss 0, count 0 and no gradient but zeros."""
    model = recipe.build_model(data)
    batch = without_targets(recipe.collate(data.train[[0, 0]], data, 8), np.array([True, True]))
    loss_sum, count = recipe.loss(model, batch)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    assert (float(loss_sum.detach()), int(count)) == (0.0, 0)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(not gradient.any() for gradient in gradients)
    assert recipe.predict(model, batch).tolist() == [[0.0, 0.0]] * 2


# --- perplexity ---------------------------------------------------------------------------------------------


def test_perplexity_by_hand(data: Prepared) -> None:
    """The exponential of the loss over all targets, not a mean over rows, which here have one target and two."""
    total = 3 * math.log(6)
    predictions = torch.tensor([[1.0, 1], [total - 1, 2], [0, 0]], dtype=torch.float64)
    found = letters(TRAIN).metrics(predictions, data.eval)
    assert found == pytest.approx({"perplexity": 6.0, "loss": math.log(6)}, rel=1e-12)
    assert list(found) == letters(TRAIN).metric_names == letters(TRAIN).minimised


def test_perplexity_of_a_real_model(recipe: CausalLanguageModel, data: Prepared) -> None:
    """However rows are batched and padded, perplexity is that of one prediction after the other."""
    torch.manual_seed(0)
    model = recipe.build_model(data).eval().double()
    expected = perplexity_by_hand(model, data.train)
    rows = list(range(len(data.train)))
    for size in (1, 2, len(rows)):
        for length in (None, 11):
            with torch.no_grad():
                parts = [
                    recipe.predict(model, recipe.collate(data.train[rows[i : i + size]], data, length))
                    for i in range(0, len(rows), size)
                ]
            found = recipe.metrics(torch.cat(parts), data.train)["perplexity"]
            assert found == pytest.approx(expected, rel=1e-10)
    assert expected > 5


# --- models -------------------------------------------------------------------------------------------------


def test_a_block_longer_than_the_model_has_positions(tmp_path: Path) -> None:
    """It is refused before anything is tokenised, with the largest size that fits."""
    letters(TRAIN, block_size=32).check_model()
    with pytest.raises(UserError, match=r"^recipe\.block_size=33 is more than the 32 positions .* set .*=32 or less$"):
        letters(TRAIN, block_size=33).facts(Cache(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_sees_ahead(tmp_path: Path) -> None:
    """A model made to fill gaps is refused: it would be told the tokens that it is to predict."""
    recipe = letters(TRAIN, causal=False)
    with pytest.raises(UserError, match=r"^recipe\.model is a BertLMHeadModel, which sees the tokens it is to predict"):
        recipe.build_model(prepared(recipe, tmp_path))
    model = gpt2(13).train()
    assert not sees_ahead(model)
    assert model.training


def test_what_the_model_says_of_itself_is_passed_on() -> None:
    """Dropout and notes are the model's."""
    assert letters(TRAIN).has_dropout is False
    assert letters(TRAIN, has_dropout=True).has_dropout is True
    assert list(letters(TRAIN).notes) == ["a note"]


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    """Weights and tokenizer of a pretrained folder are read by transformers' own classes, and predict alike."""
    recipe = CausalLanguageModel(Given(TRAIN), Pretrained(str(save_gpt2(tmp_path / "model"))), 8, "documents")
    data = prepared(recipe, tmp_path / "cache")
    model = recipe.build_model(data).eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)  # as training would
    recipe.save(model, data, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("a b c")["input_ids"] == [A, B, C]
    batch = recipe.collate(data.train[[0, 3]], data)
    with torch.no_grad():
        assert torch.allclose(recipe.predict(loaded, batch), recipe.predict(model, batch), rtol=1e-5)
        # The saved model is the one that was trained on, and the folder it came from is another.
        before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
        assert not torch.allclose(recipe.predict(before, batch), recipe.predict(model, batch), rtol=1e-2)


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 0, -8])
def test_wrong_block_size(size: int) -> None:
    """One token cannot be predicted from nothing."""
    with pytest.raises(UserError, match=rf"^recipe\.block_size={size} cannot be"):
        letters(TRAIN, block_size=size)


@pytest.mark.parametrize(("packing", "near"), [("block", "'blocks'"), ("document", "'documents'"), ("none", "there")])
def test_wrong_packing(packing: str, near: str) -> None:
    """A packing that there is not is refused with the nearest one, or both."""
    with pytest.raises(UserError, match=rf"^recipe\.packing={packing} is no packing") as caught:
        letters(TRAIN, packing=packing)
    assert near in str(caught.value)
