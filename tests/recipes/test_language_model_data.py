"""What a causal language model's data are: facts before a worker starts, cache entries, estimates."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from recipes.tasks.packing import Size

from recipes.tasks.language_model import CausalLanguageModel, Documents, ExpectedText
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.errors import Unavailable, UserError
from tests.recipes.letters import LETTERS, PAD, Given, SmallModel, letters

TRAIN = ["a b c", "d e", "f", "a c e g i b d f h j a b", "j"]


@pytest.fixture(params=["blocks", "documents"])
def recipe(request: pytest.FixtureRequest) -> CausalLanguageModel:
    return letters(TRAIN, ["b c d", "e"], block_size=8, packing=request.param)


def test_facts_of_blocks(tmp_path: Path) -> None:
    """Both parts are tokenised, since nothing less tells how many blocks there are, and the digest is the texts'."""
    facts = letters(TRAIN[:3], ["b c d", "e"]).facts(Cache(tmp_path))
    assert (facts.train_samples, facts.eval_samples, facts.unit, facts.source) == (2, 2, "blocks", "given")
    assert (facts.groups, facts.train_groups, facts.eval_groups, facts.estimated) == (None, None, None, False)
    assert facts.digest == Documents(TRAIN[:3], ["b c d", "e"], "elsewhere").digest


def test_facts_of_documents(tmp_path: Path) -> None:
    """Rows are counted, and their documents: of the fourth, of 13 tokens, the last one would be no row."""
    recipe = letters(TRAIN, ["b c d", "e"], packing="documents")
    facts = recipe.facts(Cache(tmp_path))
    assert (facts.train_samples, facts.eval_samples, facts.unit) == (4 + 3, 2, "rows")
    assert (facts.groups, facts.train_groups, facts.eval_groups) == ("documents", 5, 2)
    groups = Prepared.load(recipe.prepare(Cache(tmp_path), facts)).train.column("group")
    assert groups.tolist() == [0, 1, 2, 3, 3, 3, 4]


def test_workers_find_what_the_facts_have_made(recipe: CausalLanguageModel, tmp_path: Path) -> None:
    """Facts and workers use one entry, though the workers read no data."""
    facts = recipe.facts(Cache(tmp_path))
    (entry,) = tmp_path.iterdir()
    assert dataclasses.replace(recipe, data=Given([])).prepare(Cache(tmp_path), facts) == entry
    tables = Prepared.load(entry)
    assert (len(tables.train), len(tables.eval)) == (facts.train_samples, facts.eval_samples)
    assert tables.properties == {"vocabulary": 3 + len(LETTERS), "pad_id": PAD}


def test_what_makes_another_entry(tmp_path: Path) -> None:
    """Another text, order, part, block size, packing or tokenizer is another entry; the same again is the same."""

    def entry(*texts: Any, **of: Any) -> Path:
        recipe = letters(*(texts or (["a b", "c d e f"],)), **of)
        return recipe.prepare(Cache(tmp_path), recipe.facts(Cache(tmp_path)))

    others = [
        entry(["a b", "c d e g"]),
        entry(["c d e f", "a b"]),
        entry(["a b c d e f"]),
        entry(["a b"], ["c d e f"]),
        entry(block_size=5),
        entry(packing="documents"),
        entry(made="otherwise"),
    ]
    assert len({entry(), entry(), *others}) == 8


def test_data_that_changed_meanwhile(tmp_path: Path) -> None:
    """Data that changed since the run was planned are refused, and are not cached under the name of the old ones."""
    facts = dataclasses.replace(letters(TRAIN).facts(Cache(tmp_path / "other")), digest="of other texts")
    with pytest.raises(UserError, match=r"^the data \(given\) changed"):
        letters(TRAIN).prepare(Cache(tmp_path / "cache"), facts)
    assert list((tmp_path / "cache").iterdir()) == []


def test_text_with_nothing_to_predict(tmp_path: Path) -> None:
    """A part in which no row has two tokens is refused by its setting."""
    recipe = letters(["a b"], [""])
    with pytest.raises(UserError, match=r"^recipe\.data\.eval has no row of two tokens"):
        recipe.facts(Cache(tmp_path))


class Absent:
    """A data source whose data are not here, but of which something is known."""

    def __init__(self, known: ExpectedText | None) -> None:
        self.known = known

    def read(self) -> Documents:
        raise Unavailable("there are no data")

    def expected(self) -> ExpectedText | None:
        return self.known


def test_expected_facts() -> None:
    """A plan without the data has the rows that their known size comes to, and says that it is an estimate."""
    source = Absent(ExpectedText(Size(10, 1000), Size(4, 100), "somebody"))
    facts = CausalLanguageModel(source, SmallModel(), 50).expected_facts()
    assert facts is not None
    assert (facts.train_samples, facts.eval_samples, facts.unit, facts.source) == (20, 2, "blocks", "somebody")
    assert facts.estimated
    facts = CausalLanguageModel(source, SmallModel(), 50, "documents").expected_facts()
    assert facts is not None
    assert (facts.train_samples, facts.train_groups, facts.eval_samples, facts.eval_groups) == (25, 10, 4, 4)
    assert CausalLanguageModel(Absent(None), SmallModel(), 50).expected_facts() is None


def test_expected_facts_of_texts_that_are_here() -> None:
    """Where it is the tokenizer that is missing, sizes come from the texts, and the digest is theirs."""
    texts = ["word " * 80] * 6
    facts = CausalLanguageModel(Given(texts), SmallModel(), 20).expected_facts()
    assert facts is not None
    assert (facts.train_samples, facts.eval_samples, facts.estimated) == (math.ceil(6 * 101 / 20), 1, True)
    assert facts.digest == Documents(texts, ["a"], "").digest
    assert "number of bytes" in facts.source
