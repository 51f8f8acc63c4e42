"""Pairs of texts: tokenised as pairs, with types where the tokenizer makes them; single texts are what they were."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recipes.models.pretrained import Pretrained
from recipes.synthetic.acceptability import SmallTransformer
from recipes.tasks import classification
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.errors import UserError
from tests.tiny_models import save_bert

TEXTS = ["the dog ran", "a nun slept on the old book", "ran", "the book fell"]
PAIRS = ["a dog slept", "a nun slept", "it fell on the old dog", "it ran"]
LABELS = [0, 1, 2, 1]


class Given:
    """A text source with these rows, in pairs or not."""

    def __init__(self, in_pairs: bool = True, texts: list[str] = TEXTS, pairs: list[str] = PAIRS) -> None:
        self.train = LabelledText(texts, LABELS, pairs if in_pairs else None)
        self.eval = LabelledText(texts[:2], LABELS[:2], pairs[:2] if in_pairs else None)

    def read(self) -> Corpus:
        return Corpus(self.train, self.eval, "given")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), [*TEXTS, *PAIRS])


def recipe(bert: Path, max_length: int = 32, in_pairs: bool = True) -> SequenceClassification:
    return SequenceClassification(Given(in_pairs), Pretrained(str(bert)), max_length)


def prepare(of: SequenceClassification, folder: Path) -> Prepared:
    cache = Cache(folder)
    return Prepared.load(of.prepare(cache, of.facts(cache)))


@pytest.fixture
def prepared(bert: Path, tmp_path: Path) -> Prepared:
    return prepare(recipe(bert), tmp_path / "cache")


def tokens(prepared: Prepared, row: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(prepared.folder / "tokenizer")
    return " ".join(tokenizer.convert_ids_to_tokens(prepared.train[[row]]["input_ids"][0].tolist()))


# --- what a table holds -------------------------------------------------------------------------------------


def test_rows_are_pairs_with_types(prepared: Prepared) -> None:
    """Both texts stand in one row in the tokenizer's form, 0 up to the first separator and 1 after it."""
    assert tokens(prepared, 0) == "[CLS] the dog ran [SEP] a dog slept [SEP]"
    assert prepared.train[[0]]["token_type_ids"][0].tolist() == [0] * 5 + [1] * 4
    assert prepared.train.column("length").tolist() == [9, 13, 10, 8]
    assert prepared.train.column("label").tolist() == LABELS


def test_the_longer_text_is_cut_first(bert: Path, tmp_path: Path) -> None:
    """Of 7 and 3 words 6 are kept: 3 and 3, whichever of the two is the long one."""
    cut = prepare(recipe(bert, max_length=9), tmp_path)
    assert tokens(cut, 1) == "[CLS] a nun slept [SEP] a nun slept [SEP]"
    assert tokens(cut, 2) == "[CLS] ran [SEP] it fell on the old [SEP]"
    assert cut.train.column("length").tolist() == [9, 9, 9, 8]


@pytest.mark.parametrize(("in_pairs", "special"), [(True, 3), (False, 2)])
def test_no_room_for_text(bert: Path, tmp_path: Path, in_pairs: bool, special: int) -> None:
    """A length that special tokens fill up is refused: the tokenizer would leave texts as long as they are."""
    for max_length in (1, special):
        with pytest.raises(
            UserError, match=rf"^recipe\.max_length={max_length} .*{special} special tokens.*={special + 1} or"
        ):
            prepare(recipe(bert, max_length, in_pairs), tmp_path)
    rows = prepare(recipe(bert, special + 1, in_pairs), tmp_path)
    assert set(rows.train.column("length").tolist()) == {special + 1}


def test_single_texts_are_as_before(bert: Path, tmp_path: Path) -> None:
    """Without pairs digest and cache key are made of what they always were, and no types are stored."""
    of = recipe(bert, in_pairs=False)
    content = json.dumps([TEXTS, LABELS, TEXTS[:2], LABELS[:2]])
    digest = hashlib.sha256(content.encode()).hexdigest()
    assert of.facts(Cache(tmp_path)).digest == digest
    single = prepare(of, tmp_path)
    assert json.loads((single.folder / "key.json").read_text()) == {
        "layout": 1,
        "task": "classification",
        "data": digest,
        "tokenizer": of.model.tokenizer_identity(),
        "max_length": 32,
    }
    assert sorted(single.train[[0]]) == ["input_ids", "label", "label_count", "length", "row"]
    assert "token_type_ids" not in of.collate(single.train[[0]], single)


def test_digest_follows_pairs() -> None:
    """Another second text, the texts exchanged and no pairs at all are other data."""
    given = [Given(), Given(pairs=[*PAIRS[:3], "it sat"]), Given(texts=PAIRS, pairs=TEXTS), Given(in_pairs=False)]
    assert len({source.read().digest for source in given}) == 4


def test_one_part_in_pairs_is_no_corpus() -> None:
    """A source that gives pairs for one part only is broken."""
    with pytest.raises(AssertionError):
        Corpus(Given().train, Given(in_pairs=False).eval, "half")


def test_tokenizer_without_types(bert: Path, tmp_path: Path) -> None:
    """Where a tokenizer makes no types none are stored, and the model is given none."""
    tokenizer = AutoTokenizer.from_pretrained(bert)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    other = tmp_path / "bert"
    AutoModelForSequenceClassification.from_pretrained(bert).save_pretrained(other)
    tokenizer.save_pretrained(other)
    found = prepare(recipe(other), tmp_path / "cache")
    assert "token_type_ids" not in found.train[[0]]
    assert tokens(found, 0) == "[CLS] the dog ran [SEP] a dog slept [SEP]"


def test_rows_do_not_depend_on_what_is_tokenised_together(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising a few samples at a time gives the same table, with the same order, as all at once."""
    whole = prepare(recipe(bert), tmp_path / "whole")
    monkeypatch.setattr(classification, "_AT_ONCE", 3)
    parts = prepare(recipe(bert), tmp_path / "parts")
    for name in ("input_ids", "token_type_ids", "label", "length"):
        ours, theirs = (table.train[[0, 1, 2, 3]][name] for table in (whole, parts))
        assert [list(row) if name.endswith("ids") else row for row in ours] == [
            list(row) if name.endswith("ids") else row for row in theirs
        ]


def test_small_transformer_knows_the_words_of_both_texts(tmp_path: Path) -> None:
    """The built-in tokenizer is made from first and second texts, and sets a separator after each."""
    sizes: dict[str, Any] = {"hidden_size": 16, "feed_forward_size": 16, "layers": 1, "heads": 2}
    model = SmallTransformer(**sizes, dropout=0.0, attention_dropout=0.0, initializer_range=0.5)
    found = prepare(SequenceClassification(Given(), model), tmp_path)
    assert tokens(found, 2) == "[CLS] ran [SEP] it fell on the old dog [SEP]"


# --- what the model makes of them ---------------------------------------------------------------------------


def lively(of: SequenceClassification, prepared: Prepared) -> nn.Module:
    """A model with weights far larger than new ones are, which shows what reaches it."""
    torch.manual_seed(0)
    model = of.build_model(prepared).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if "LayerNorm" in name else 20)
    return model


def test_types_are_padded_and_reach_the_model(bert: Path, prepared: Prepared) -> None:
    """Types are padded with 0 beside the tokens, to whatever length is asked for, and change the logits."""
    of = recipe(bert)
    model = lively(of, prepared)
    for length in (None, 20):
        batch = of.collate(prepared.train[[0, 1]], prepared, length)
        assert batch["token_type_ids"].shape == batch["input_ids"].shape == (2, length or 13)
        assert batch["token_type_ids"][0].tolist() == [0] * 5 + [1] * 4 + [0] * ((length or 13) - 9)
    with torch.no_grad():
        with_types = of.predict(model, batch)
        without = of.predict(model, {name: tensor for name, tensor in batch.items() if name != "token_type_ids"})
        assert not torch.allclose(with_types, without, atol=1e-2)
        labels = torch.tensor([0, 1])
        loss, count = of.loss(model, {**batch, "labels": labels})
        expected = torch.nn.functional.cross_entropy(with_types, labels, reduction="sum")
        assert (float(loss), int(count)) == (pytest.approx(float(expected)), 2)


def test_padding_does_not_matter(bert: Path, prepared: Prepared) -> None:
    """A pair's logits are the same alone and beside longer ones, to 1e-5."""
    of = recipe(bert)
    model = lively(of, prepared)
    with torch.no_grad():
        together = of.predict(model, of.collate(prepared.train[[0, 1, 2, 3]], prepared, 30))
        for row in range(4):
            alone = of.predict(model, of.collate(prepared.train[[row]], prepared))
            assert torch.allclose(alone[0], together[row], atol=1e-5)
        assert (together[0] - together[1]).abs().max() > 1e-2


def test_what_is_saved_classifies_pairs(bert: Path, prepared: Prepared, tmp_path: Path) -> None:
    """transformers' own classes give the same logits for the same pairs with what a run leaves."""
    of = recipe(bert)
    torch.manual_seed(0)
    model = of.build_model(prepared).eval()
    of.save(model, prepared, tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    inputs = AutoTokenizer.from_pretrained(tmp_path / "model")(TEXTS, PAIRS, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours = of.predict(model, of.collate(prepared.train[[0, 1, 2, 3]], prepared))
        assert torch.allclose(loaded(**inputs).logits, ours, atol=1e-6)
