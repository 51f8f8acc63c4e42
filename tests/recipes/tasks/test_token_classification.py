"""Token classification: words and tokens, loss and metrics by hand, entities as seqeval counts them."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.peers.trained_tokenizer import trained_tokenizer
from recipes.models.pretrained import Pretrained
from recipes.tasks.token_classification import (
    Sentences,
    TaggedCorpus,
    TokenClassification,
    entities,
    entity_metrics,
    with_spaces,
)
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Prepared
from runner.errors import UserError
from tests.tiny_models import save_bert

N = IGNORED_LABEL
WORDS = [["The", "U.K.", "left"], ["Ada", "left", "the", "U.K.", "."]]
TAGS = [[0, 1, 0], [1, 0, 0, 1, 0]]
NAMES = ("O", "B-X")


@dataclasses.dataclass(frozen=True)
class Given:
    names: tuple[str, ...] = NAMES
    words: tuple[Any, ...] = tuple(WORDS)

    def read(self) -> TaggedCorpus:
        return TaggedCorpus(Sentences(self.words, TAGS), self.read_evaluation(None, self.names), "given", self.names)

    def read_evaluation(self, file: str | None = None, label_names: Any = None) -> Sentences:
        return Sentences(self.words[::-1], None if label_names is None else TAGS[::-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), [" ".join(words) for words in WORDS])


def recipe_of(folder: Path, **of: Any) -> TokenClassification:
    return TokenClassification(Given(), Pretrained(str(folder)), **{"max_length": 32, **of})


def prepare(recipe: TokenClassification, cache: Path) -> Prepared:
    return Prepared.load(recipe.prepare(Cache(cache), recipe.facts(Cache(cache))))


@pytest.fixture(scope="module")
def prepared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(recipe_of(folder), tmp_path_factory.mktemp("cache"))


# --- words and tokens -------------------------------------------------------------------------------------------


def test_tags_are_at_first_tokens(folder: Path, prepared: Prepared) -> None:
    """U.K. has four tokens, of which the first has its tag; special tokens and padding have none."""
    assert prepared.train.column("length").tolist() == [8, 10]
    assert prepared.train.column("label_count").tolist() == [3, 5]
    batch = recipe_of(folder).collate(prepared.train[[0, 1]], prepared, 12)
    assert batch["labels"].tolist() == [[N, 0, 1, N, N, N, 0, N, N, N, N, N], [N, 1, 0, 0, 1, N, N, N, 0, N, N, N]]
    assert batch["attention_mask"].sum(1).tolist() == [8, 10]
    tokens = AutoTokenizer.from_pretrained(prepared.folder / "tokenizer").convert_ids_to_tokens(batch["input_ids"][0])
    assert tokens[:8] == ["[CLS]", "The", "U", ".", "K", ".", "left", "[SEP]"]


def test_words_beyond_max_length(folder: Path, tmp_path: Path) -> None:
    """They are left out of loss and metrics, and predictions have no tag for them; sentences are counted."""
    recipe = recipe_of(folder, max_length=5)  # a word that is cut inside keeps its first token
    found = prepare(recipe, tmp_path / "cache")
    assert [row.tolist() for row in found.train[[0, 1]]["word"]] == [[0, 1], [0, 1, 2]]
    assert found.train.column("label_count").tolist() == [2, 3]
    assert found.properties["truncated"] == {
        "what": "sentences",
        "setting": "recipe.max_length",
        "tokens": 5,
        "train": [2, 2],
        "eval": [2, 2],
    }
    model = recipe.build_model(found).eval()
    predictions = recipe.predict(model, recipe.collate(found.eval[[0, 1]], found)).detach()
    assert predictions.shape == (2, 6)
    recipe.save(model, found, tmp_path / "saved")
    columns = recipe.from_saved(str(tmp_path / "saved")).prediction_columns(predictions, found.eval)
    assert columns["tokens"] == WORDS[::-1]
    assert [[tag is None for tag in row] for row in columns["predicted"]] == [
        [False] * 3 + [True] * 2,
        [False] * 2 + [True],
    ]
    whole = prepare(recipe_of(folder, max_length=10), tmp_path / "cache")
    assert whole.properties["truncated"]["train"] == [0, 2]


@pytest.mark.parametrize(("kind", "space"), [("gpt2", True), ("bert", False)])
def test_words_have_the_tokens_that_they_have_in_a_text(kind: str, space: bool) -> None:
    """A byte-level tokenizer makes a space a part of the word after it."""
    tokenizer = trained_tokenizer(kind, 400, ["the old dog ran to a dog"] * 20)
    words = ["a", "dog", "ran", "to", "the", "old", "dog"]
    (given,) = with_spaces(Sentences([words], None), tokenizer).words
    assert given == [" " * space + word for word in words]
    ids = tokenizer(given, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer(" " * space + " ".join(words), add_special_tokens=False)["input_ids"]


def test_sentences_without_a_token(tmp_path: Path) -> None:
    """Words of characters that the tokenizer drops leave nothing to predict."""
    words = [["\u200b"], ["\u200b", "left", "the", "dog", "."]]
    bert = save_bert(tmp_path / "bert", ["left the dog"])
    tokenizer = trained_tokenizer("bert", 200, ["left the dog"] * 9)
    tokenizer.save_pretrained(bert)
    recipe = TokenClassification(Given(words=tuple(words)), Pretrained(str(bert)))
    with pytest.raises(UserError, match=r"recipe\.data\.train has a sentence without a single token"):
        prepare(recipe, tmp_path / "cache")


# --- loss and predictions ---------------------------------------------------------------------------------------


def test_metrics_by_hand(folder: Path, prepared: Prepared) -> None:
    """Word by word, at first tokens only, whatever is predicted elsewhere."""
    recipe = recipe_of(folder)
    predictions = torch.ones((2, 33), dtype=torch.float64)
    predictions[:, 0] = torch.tensor([3.0, 5.0])
    right = recipe.collate(prepared.eval[[0, 1]], prepared, 32)["labels"]
    predictions[:, 1:][right == 0] = 0.0
    predictions[0, 3] = 1.0  # the second word of the first sentence is O
    found = recipe.metrics(predictions, prepared.eval)
    assert found == pytest.approx(
        {"precision": 75.0, "recall": 100.0, "f1": 600 / 7, "accuracy": 87.5, "loss": 1.0}, abs=1e-9
    )
    by_row = recipe.row_metrics(predictions, prepared.eval)
    assert {name: float(values.mean()) for name, values in by_row.items()} == pytest.approx(found)
    assert {values.shape for values in by_row.values()} == {(2,)}


def test_tags_without_entities(folder: Path, tmp_path: Path) -> None:
    """Parts of speech have no entities: accuracy remains; asking for more is an error."""
    recipe = dataclasses.replace(recipe_of(folder), data=Given(("NOUN", "VERB")))
    facts = recipe.facts(Cache(tmp_path))
    assert recipe.metrics_of(facts) == ["accuracy", "loss"]
    with pytest.raises(UserError, match=r"recipe\.metrics_shown=.*'NOUN'"):
        dataclasses.replace(recipe, metrics_shown=["f1"]).facts(Cache(tmp_path))
    table = Prepared.load(recipe.prepare(Cache(tmp_path), facts)).eval
    assert recipe.metrics(torch.zeros((2, 33), dtype=torch.float64), table) == {"accuracy": 62.5, "loss": 0.0}


# --- entities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        # seqeval's documentation and tests of get_entities
        ("B-PER I-PER O B-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),
        ("O O O B-MISC I-MISC I-MISC O", {("MISC", 3, 5)}),
        ("B-PER I-PER B-PER I-LOC O", {("PER", 0, 1), ("PER", 2, 2), ("LOC", 3, 3)}),
        ("I-PER I-PER O I-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),  # IOB1
        ("B-A I-A E-A S-B E-B", {("A", 0, 2), ("B", 3, 3), ("B", 4, 4)}),  # IOBES
        ("B-A-1 I-A-1 I-A-2", {("A-1", 0, 1), ("A-2", 2, 2)}),
        ("B I O B", {("", 0, 1), ("", 3, 3)}),
        ("O O", set()),
    ],
)
def test_entities(tags: str, expected: set[Any]) -> None:
    assert entities(tags.split()) == expected


def test_the_example_of_seqeval() -> None:
    """Its README: one of two entities is right, the other is too long by a word."""
    true = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predicted = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert entity_metrics(true, predicted) == {"precision": 50.0, "recall": 50.0, "f1": 50.0}
    assert entity_metrics(true, [["O"] * 7, ["O"] * 3]) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert entity_metrics(true, true) == {"precision": 100.0, "recall": 100.0, "f1": 100.0}


def by_the_rules_of_conll(tags: list[str]) -> set[tuple[str, int, int]]:
    """The end and the start of a chunk as in conlleval, which seqeval follows: a table of neighbouring tags."""
    found, begin = set(), 0
    for place, (before, tag) in enumerate(zip(["O", *tags], [*tags, "O"], strict=True)):
        (a, _, kind), (b, _, other) = before.partition("-"), tag.partition("-")
        ends = a in "ES" or (a in "BI" and b in "BSO") or (a != "O" and kind != other)
        starts = b in "BS" or (a in "ESO" and b in "EI") or (b != "O" and kind != other)
        if ends and a != "O":
            found.add((kind, begin, place - 1))
        if starts:
            begin = place
    return found


def test_entities_of_any_tags() -> None:
    """Whatever a model predicts, in two thousand random sequences."""
    draw, names = random.Random(0), ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in "XY")]
    for _ in range(2000):
        tags = draw.choices(names, k=draw.randint(1, 8))
        assert entities(tags) == by_the_rules_of_conll(tags), tags


# --- settings ---------------------------------------------------------------------------------------------------
