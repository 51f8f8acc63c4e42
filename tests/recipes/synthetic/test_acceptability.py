"""The built-in corpus and the small transformer in its two shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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


def recipe(shape: str) -> SequenceClassification:
    return SequenceClassification(GrammarCorpus(0, 40, 10), SmallTransformer(**SIZES, shape=shape), max_length=32)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder: Path = tmp_path_factory.mktemp("cache")
    return Prepared.load(recipe("bert").prepare(Cache(folder), recipe("bert").facts(Cache(folder))))


def batch(prepared: Prepared, rows: list[int]) -> Batch:
    return recipe("bert").collate(prepared.train[rows], prepared)


def test_gpt2_reads_the_last_token(prepared: Prepared) -> None:
    torch.manual_seed(0)
    model = recipe("gpt2").build_model(prepared).double().eval()
    given = batch(prepared, [0, 1])
    length = int(given["attention_mask"][0].sum())
    with torch.no_grad():
        states = model.transformer(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        expected = model.score(states.last_hidden_state[0, length - 1])
        assert torch.allclose(recipe("gpt2").predict(model, given)[0], expected, atol=1e-12)


def test_sizes(prepared: Prepared) -> None:
    bert, gpt2 = (recipe(shape).build_model(prepared).config for shape in ("bert", "gpt2"))
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size"):
        assert getattr(bert, name) == getattr(gpt2, name), name
    for config in (bert, gpt2):
        assert (config.num_labels, config.pad_token_id, config.initializer_range) == (2, 0, 0.5)
    assert (bert.intermediate_size, bert.hidden_dropout_prob, bert.attention_probs_dropout_prob) == (24, 0.1, 0.2)
    assert (gpt2.n_inner, gpt2.resid_pdrop, gpt2.embd_pdrop, gpt2.attn_pdrop) == (24, 0.1, 0.1, 0.2)
    assert recipe("bert").has_dropout
    assert not SmallTransformer(**{**SIZES, "dropout": 0.0, "attention_dropout": 0.0}).has_dropout


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"shape": "gtp2"}, "recipe.model.shape=gtp2"),
        ({"layers": 0}, "recipe.model.layers=0"),
        ({"heads": 3}, "recipe.model.hidden_size=16"),
        ({"dropout": 1.0}, "recipe.model.dropout=1.0"),
        ({"initializer_range": 0.0}, "recipe.model.initializer_range=0.0"),
    ],
)
def test_wrong_models(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(UserError, match=setting):
        SmallTransformer(**{**SIZES, **changes}).check()


@pytest.mark.parametrize(("sizes", "name"), [((1, 10), "train"), ((10, 0), "eval"), ((10**7, 10), "train")])
def test_wrong_sizes_of_the_corpus(sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(UserError, match=rf"recipe\.data\.{name}_samples={sizes[name == 'eval']} "):
        GrammarCorpus(0, *sizes).read()


def test_settings() -> None:
    """`recipe.model.shape` and `recipe.padding` reach the classes."""
    for overrides, expected in (([], ("bert", "none")), (["recipe.padding=max_length"], ("bert", "max_length"))):
        built = build_recipe(settings(compose(["recipe=acceptability", *overrides])).recipe, [])
        assert (built.model.shape, built.padding) == expected
    assert build_recipe(settings(compose(["recipe.model.shape=gpt2"])).recipe, []).model.shape == "gpt2"
