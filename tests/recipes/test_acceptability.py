"""The small transformer in its two shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recipes.synthetic.acceptability import GrammarCorpus, SmallTransformer
from recipes.tasks.classification import SequenceClassification
from runner.config.compose import compose, settings
from runner.config.instantiate import build_recipe
from runner.data.cache import Cache
from runner.data.recipe import Batch, Prepared
from runner.errors import UserError

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "feed_forward_size": 24,
    "layers": 2,
    "heads": 2,
    "dropout": 0.1,
    "attention_dropout": 0.2,
    "initializer_range": 0.5,
}
SHAPES = ["bert", "gpt2"]


def recipe(shape: str) -> SequenceClassification:
    return SequenceClassification(GrammarCorpus(0, 40, 10), SmallTransformer(**SIZES, shape=shape), max_length=32)


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    cache = Cache(tmp_path / "cache")
    return Prepared.load(recipe("bert").prepare(cache, recipe("bert").facts(cache)))


def batch(prepared: Prepared, rows: list[int]) -> Batch:
    return recipe("bert").collate(prepared.train[rows], prepared)


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_does_not_matter(prepared: Prepared, shape: str) -> None:
    """In fp64 a sentence's logits are the same alone and in a padded batch, to 1e-12."""
    torch.manual_seed(0)
    model = recipe(shape).build_model(prepared).double().eval()
    together = batch(prepared, list(range(20)))
    assert (together["attention_mask"].sum(1) < together["attention_mask"].shape[1]).sum() > 10
    with torch.no_grad():
        logits = recipe(shape).predict(model, together)
        assert logits.shape == (20, 2)
        for row in range(20):
            alone = recipe(shape).predict(model, batch(prepared, [row]))
            assert (alone[0] - logits[row]).abs().max() < 1e-12
        assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_gpt2_reads_the_last_token_and_looks_back(prepared: Prepared) -> None:
    """The logits are those of the last token's state, and words at either end of the sentence change them."""
    torch.manual_seed(0)
    model = recipe("gpt2").build_model(prepared).double().eval()
    given = batch(prepared, [0, 1])
    length = int(given["attention_mask"][0].sum())
    with torch.no_grad():
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        expected = model.score(model.transformer(**inputs).last_hidden_state[0, length - 1])
        assert torch.allclose(recipe("gpt2").predict(model, given)[0], expected, atol=1e-12)
        for place in (1, length - 2):
            changed = {**given, "input_ids": given["input_ids"].clone()}
            changed["input_ids"][0, place] = 4 if given["input_ids"][0, place] != 4 else 5
            assert (recipe("gpt2").predict(model, changed)[0] - expected).abs().max() > 1e-3


def test_both_shapes_have_the_sizes_asked_for(prepared: Prepared) -> None:
    """Widths, depth, positions, dropouts and the spread of new weights are the same; only the shape differs."""
    torch.manual_seed(0)
    bert, gpt2 = (recipe(shape).build_model(prepared) for shape in SHAPES)
    assert (type(bert).__name__, type(gpt2).__name__) == (
        "BertForSequenceClassification",
        "GPT2ForSequenceClassification",
    )
    of, other = bert.config, gpt2.config
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size"):
        assert getattr(of, name) == getattr(other, name), name
    assert (of.num_labels, of.pad_token_id, of.initializer_range) == (2, 0, 0.5)
    assert (other.num_labels, other.pad_token_id, other.initializer_range) == (2, 0, 0.5)
    assert (of.intermediate_size, of.hidden_dropout_prob, of.attention_probs_dropout_prob) == (24, 0.1, 0.2)
    assert (other.n_inner, other.resid_pdrop, other.embd_pdrop, other.attn_pdrop) == (24, 0.1, 0.1, 0.2)
    assert float(gpt2.score.weight.detach().std()) == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_saved_can_be_loaded(prepared: Prepared, tmp_path: Path, shape: str) -> None:
    """Either shape is read by transformers' own classes, which pad with the tokenizer's pad token."""
    torch.manual_seed(0)
    model = recipe(shape).build_model(prepared).eval()
    recipe(shape).save(model, prepared, tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = GrammarCorpus(0, 40, 10).read().train.texts[:5]
    theirs = tokenizer(texts, padding=True, return_tensors="pt")
    assert type(loaded) is type(model)
    with torch.no_grad():
        logits = loaded(input_ids=theirs["input_ids"], attention_mask=theirs["attention_mask"]).logits
        assert torch.allclose(logits, recipe(shape).predict(model, batch(prepared, [0, 1, 2, 3, 4])), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "near"),
    [("gtp2", "did you mean 'gpt2'?"), ("BERT", "did you mean 'bert'?"), ("t5", "there are: bert, gpt2")],
)
def test_wrong_shape(shape: str, near: str) -> None:
    """A shape that does not exist is refused with the nearest one, or both."""
    with pytest.raises(UserError, match=rf"^recipe\.model\.shape={shape} is not a shape") as caught:
        recipe(shape).check_model()
    assert near in str(caught.value)


def test_shape_is_a_setting() -> None:
    """`recipe.model.shape=gpt2` chooses it; the default is BERT's, also where a configuration does not say."""
    for overrides, shape in ((["recipe.model.shape=gpt2"], "gpt2"), ([], "bert"), (["~recipe.model.shape"], "bert")):
        config = settings(compose(["recipe=acceptability", *overrides]))
        built = build_recipe(config.recipe, [])
        assert isinstance(built, SequenceClassification)
        assert isinstance(built.model, SmallTransformer)
        assert built.model.shape == shape
