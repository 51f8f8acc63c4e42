"""Which rows of a text source are kept, how labels become classes, and what is known of data that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from recipes.sources.text_files import TextFiles
from recipes.synthetic.acceptability import GrammarCorpus, SmallTransformer
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from runner.data.cache import Cache
from runner.data.recipe import DataFacts
from runner.errors import Unavailable, UserError

NAMES = ["entailment", "neutral", "contradiction"]
#: Text and label of each row; two rows without agreement.
ROWS = [("a", "neutral"), ("b", "-"), ("c", "entailment"), ("d", "contradiction"), ("e", "-"), ("f", "neutral")]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Hub, and nothing of it in a cache."""
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def source(folder: Path, rows: list[tuple[str, str]] = ROWS, **changes: Any) -> TextFiles:
    for part in ("train", "eval"):
        (folder / f"{part}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    of: dict[str, Any] = {
        "columns": 2,
        "text_column": 0,
        "label_column": 1,
        "label_names": NAMES,
        "skip_labels": ["-"],
        "train": str(folder / "train.tsv"),
        "eval": str(folder / "eval.tsv"),
    }
    return TextFiles(**{**of, **changes})


def read(folder: Path, rows: list[tuple[str, str]] = ROWS, **changes: Any) -> Corpus:
    return source(folder, rows, **changes).read()


def said(folder: Path, rows: list[tuple[str, str]] = ROWS, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, rows, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- labels -------------------------------------------------------------------------------------------------


def test_names_are_classes_in_their_order(tmp_path: Path) -> None:
    """A label's class is the place of its name in the list, and rows to be skipped are gone from both parts."""
    corpus = read(tmp_path)
    assert corpus.train == corpus.eval == LabelledText(["a", "c", "d", "f"], [1, 0, 2, 1])
    assert corpus.classes == 3
    assert read(tmp_path, label_names=NAMES[::-1]).train.labels == [1, 2, 0, 1]


def test_numbers_beside_names(tmp_path: Path) -> None:
    """Class numbers will do where names are known, unless a name looks like a number."""
    rows = [("a", "0"), ("b", "2"), ("c", "1"), ("d", "neutral")]
    assert read(tmp_path, rows).train.labels == [0, 2, 1, 1]
    stars = [("a", "1"), ("b", "2"), ("c", "3")]
    assert read(tmp_path, stars, label_names=["1", "2", "3"]).train.labels == [0, 1, 2]
    assert "the label '0' in column 2, which recipe.data.label_names has not" in said(
        tmp_path, [*stars, ("d", "0")], label_names=["1", "2", "3"]
    )


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("nuetral", "which recipe.data.label_names has not; did you mean 'neutral'?"),
        ("Neutral", "did you mean 'neutral'?"),
        ("3", "which recipe.data.label_names has not"),
        ("-", "there are: contradiction, entailment, neutral (recipe.data.skip_labels leaves rows out)"),
    ],
)
def test_label_without_a_class(tmp_path: Path, label: str, words: str) -> None:
    """A label that is none of the names is refused with its line, the nearest name, and the way to leave rows out."""
    message = said(tmp_path, [*ROWS[:1], ("x", label)], skip_labels=[])
    assert f"is malformed: line 2 has the label '{label}' in column 2, " in message
    assert words in message


def test_class_without_a_row(tmp_path: Path) -> None:
    """A name that no row to train on has is refused: a model would be built for a class that it never sees."""
    message = said(tmp_path, [row for row in ROWS if row[1] != "contradiction"])
    assert message.startswith(
        "recipe.data.train has no row labelled 'contradiction', which recipe.data.label_names lists"
    )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("neutral", "give the classes' names in a list"),
        ([True, False], "give the classes' names in a list"),
        (["a", ""], "give the classes' names in a list"),
        (["a"], "two classes or more"),
        ([], "two classes or more"),
        (["a", "b", "a"], "each named once"),
    ],
)
def test_wrong_names(tmp_path: Path, names: Any, words: str) -> None:
    """Names have to be texts, different, and at least two."""
    message = said(tmp_path, label_names=names)
    assert message.startswith("recipe.data.label_names=")
    assert words in message


# --- rows ---------------------------------------------------------------------------------------------------


def test_the_first_rows_of_those_that_are_left(tmp_path: Path) -> None:
    """The limits count rows after skipping, each part by its own, and a higher one than there are rows takes all."""
    corpus = read(tmp_path, max_train_samples=3, max_eval_samples=1)
    assert (corpus.train.texts, corpus.eval.texts) == (["a", "c", "d"], ["a"])
    assert len(read(tmp_path, max_train_samples=99).train) == 4
    assert corpus.digest != read(tmp_path).digest


def test_rows_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    """A file is read up to the last row that is wanted: what comes after may be anything."""
    assert len(read(tmp_path, [*ROWS, ("x", "no class")], max_train_samples=4, max_eval_samples=4).train) == 4
    assert "'no class'" in said(tmp_path, [*ROWS, ("x", "no class")], max_train_samples=5)


@pytest.mark.parametrize("setting", ["max_train_samples", "max_eval_samples", "hub_train_samples", "hub_eval_samples"])
def test_wrong_limits(tmp_path: Path, setting: str) -> None:
    """No row is no data."""
    for count in (0, -1):
        assert said(tmp_path, **{setting: count}).startswith(f"recipe.data.{setting}={count} cannot be")


def test_limit_that_leaves_one_class(tmp_path: Path) -> None:
    """The rows that are taken have to have every class."""
    assert "take more rows than recipe.data.max_train_samples=1" in said(tmp_path, max_train_samples=1)
    assert "no row labelled 'contradiction'" in said(tmp_path, max_train_samples=2)


def test_everything_skipped(tmp_path: Path) -> None:
    """A file whose rows are all to be skipped is refused with the labels that do it."""
    message = said(tmp_path, skip_labels=["-", *NAMES])
    assert message.endswith(
        "has no rows: recipe.data.skip_labels=['-', 'entailment', 'neutral', 'contradiction'] leaves them all out"
    )


def test_labels_to_skip_are_a_list(tmp_path: Path) -> None:
    """A text instead of a list would skip by its letters."""
    assert said(tmp_path, skip_labels="-").startswith("recipe.data.skip_labels=- cannot be")


# --- the Hub ------------------------------------------------------------------------------------------------


def on_the_hub(monkeypatch: pytest.MonkeyPatch, **columns: list[Any]) -> dict[str, Any]:
    """Settings of a source whose data set has these columns in both parts."""
    part = Dataset.from_dict(columns)
    monkeypatch.setattr("datasets.load_dataset", lambda name, config: {"train": part, "validation": part})
    return {"train": None, "eval": None, "hub_name": "owner/data", "hub_text": "premise"}


def test_pairs_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's pairs, class numbers and names, limits and labels to skip mean what they mean for files."""
    columns: dict[str, list[Any]] = {"premise": ["a", "b", "c", "d"], "hypothesis": ["A", "B", "C", "D"]}
    expected = LabelledText(["a", "b", "d"], [1, 0, 2], ["A", "B", "D"])
    for labels in ([1, 0, -1, 2], ["neutral", "entailment", "-1", "contradiction"]):
        settings = on_the_hub(monkeypatch, **columns, label=labels)
        settings |= {"hub_pair": "hypothesis", "skip_labels": [-1]}
        assert read(tmp_path, **settings).train == expected
        corpus = read(tmp_path, **settings, max_eval_samples=2)
        assert (len(corpus.train), corpus.eval.pairs) == (3, ["A", "B"])
        assert "no column 'hypo' on the Hub" in said(tmp_path, **{**settings, "hub_pair": "hypo"})
        assert "row 2 of 'train' has the label '-1'" in said(tmp_path, **{**settings, "skip_labels": []})


def test_pairs_here_and_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs in the files and none on the Hub, or the other way round, would be two experiments under one name."""
    settings = on_the_hub(monkeypatch, premise=["a", "b"], hypothesis=["A", "B"], label=[0, 1])
    message = said(tmp_path, **settings, columns=3, pair_column=2)
    assert message.startswith("recipe.data.pair_column=2 is given and recipe.data.hub_pair is not, so the Hub's copy")
    message = said(tmp_path, hub_name="owner/data", hub_pair="hypothesis")
    assert message.startswith(
        "recipe.data.hub_pair=hypothesis is given and recipe.data.pair_column is not, so the files"
    )


# --- what is not here ---------------------------------------------------------------------------------------


def test_what_is_unavailable(tmp_path: Path) -> None:
    """Data that neither files nor the Hub can give now are unavailable; a missing file is a mistake."""
    with pytest.raises(Unavailable, match="there are no training data"):
        read(tmp_path, train=None, eval=None, hub_name="owner/data")
    for changes in ({"train": None, "eval": None}, {"train": "missing.tsv", "hub_name": "owner/data"}):
        with pytest.raises(UserError) as caught:
            read(tmp_path, **changes)
        assert not isinstance(caught.value, Unavailable)


WORDS = "owner/data/part (train, validation)"
SIZES: dict[str, Any] = {
    "train": None,
    "eval": None,
    "hub_name": "owner/data",
    "hub_config": "part",
    "hub_samples_of": WORDS,
    "hub_train_samples": 1000,
    "hub_eval_samples": 100,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1000, 100, f"the size of {WORDS} on the Hub")),
        ({"max_train_samples": 64, "max_eval_samples": 500}, (64, 100, f"the size of {WORDS} on the Hub")),
        # The numbers are of one data set and its parts, and of no other.
        ({"hub_config": None}, None),
        ({"hub_name": "owner/other"}, None),
        ({"hub_eval": "test"}, None),
        ({"hub_samples_of": None}, None),
        ({"hub_train_samples": None}, None),
        ({"hub_eval_samples": None}, None),
        ({"hub_name": None}, None),
        ({"train": "train.tsv", "eval": "dev.tsv"}, None),
    ],
)
def test_expected_sizes(tmp_path: Path, changes: dict[str, Any], expected: Any) -> None:
    """The sizes of the Hub's copy, cut to what is wanted, are known where both are given and no files are."""
    assert source(tmp_path, **{**SIZES, **changes}).expected_sizes() == expected


def recipe(data: Any) -> SequenceClassification:
    sizes: dict[str, Any] = {"hidden_size": 16, "feed_forward_size": 16, "layers": 1, "heads": 2}
    return SequenceClassification(
        data, SmallTransformer(**sizes, dropout=0.0, attention_dropout=0.0, initializer_range=0.5)
    )


def test_expected_facts(tmp_path: Path) -> None:
    """A recipe says what it expects of data that are not here, marked as such, where its source knows anything."""
    absent = recipe(source(tmp_path, **SIZES))
    with pytest.raises(Unavailable):
        absent.facts(Cache(tmp_path))
    assert absent.expected_facts() == DataFacts(
        1000, 100, "not read", f"the size of {WORDS} on the Hub", estimated=True
    )
    assert recipe(source(tmp_path, **{**SIZES, "hub_eval_samples": None})).expected_facts() is None
    assert recipe(GrammarCorpus(0, 40, 10)).expected_facts() is None
