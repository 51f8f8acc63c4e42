"""`recipe.padding`: to the longest row of a batch, or always to the same length."""

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
from runner.data.layout import layout
from runner.data.loader import batches
from runner.data.recipe import Prepared
from runner.errors import UserError


def recipe(padding: str) -> SequenceClassification:
    sizes: dict[str, Any] = {"hidden_size": 16, "feed_forward_size": 16, "layers": 1, "heads": 2}
    model = SmallTransformer(**sizes, dropout=0.0, attention_dropout=0.0, initializer_range=0.5)
    return SequenceClassification(GrammarCorpus(0, 40, 10), model, max_length=24, padding=padding)


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    cache = Cache(tmp_path)
    return Prepared.load(recipe("longest").prepare(cache, recipe("longest").facts(cache)))


@pytest.mark.parametrize("length", [None, 16, 24])
def test_every_batch_has_the_same_length(prepared: Prepared, length: int | None) -> None:
    """Whatever length a batch would have, it gets `max_length` tokens, and the mask covers the real ones."""
    rows = prepared.train[[0, 1, 2]]
    batch = recipe("max_length").collate(rows, prepared, length)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (3, 24)
    assert batch["attention_mask"].sum(1).tolist() == [len(row) for row in rows["input_ids"]]


def test_through_the_loader(prepared: Prepared) -> None:
    """Also where the device pads to lengths of its own, and for batches of fillers."""
    lengths = prepared.train.column("length")
    for chosen in (layout(lengths, 4, None, compiles=True), layout(lengths, 4, [8, 16], compiles=False)):
        shapes = {
            batch["input_ids"].shape[1]
            for _, batch in batches(prepared.train, [[0, 1], [2], []], recipe("max_length"), prepared, chosen)
        }
        assert shapes == {24}


def test_the_table_is_the_same(prepared: Prepared, tmp_path: Path) -> None:
    """Padding is no part of the data: both find the same entry, whose lengths are those of the tokens."""
    cache = Cache(tmp_path)
    entry = recipe("max_length").prepare(cache, recipe("max_length").facts(cache))
    assert entry == prepared.folder
    assert prepared.train.column("length").max() < 24


def test_logits_are_the_same(prepared: Prepared) -> None:
    """In fp64 the logits of a sentence do not depend on how it is padded, to 1e-12."""
    torch.manual_seed(0)
    model = recipe("longest").build_model(prepared).double().eval()
    with torch.no_grad():
        ours, theirs = (
            recipe(padding).predict(model, recipe(padding).collate(prepared.train[[0, 1, 2]], prepared))
            for padding in ("longest", "max_length")
        )
    assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("padding", "near"),
    [("max_lenght", "did you mean 'max_length'?"), ("true", "there are: longest, max_length")],
)
def test_wrong_padding(padding: str, near: str) -> None:
    """A padding that does not exist is refused with the nearest one, or both."""
    with pytest.raises(UserError, match=rf"^recipe\.padding={padding} is no padding") as caught:
        recipe(padding)
    assert near in str(caught.value)


@pytest.mark.parametrize("name", ["acceptability", "cola", "mnli"])
def test_padding_is_a_setting(name: str) -> None:
    """`recipe.padding=max_length` chooses it for every recipe that classifies; the default is `longest`."""
    for overrides, padding in ((["recipe.padding=max_length"], "max_length"), ([], "longest")):
        built = build_recipe(settings(compose([f"recipe={name}", *overrides])).recipe, [])
        assert isinstance(built, SequenceClassification)
        assert built.padding == padding
