"""Several labels and numbers in files: every form that they have, and malformed rows by their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from recipes.models.pretrained import Pretrained
from recipes.sources.text_files import TextFiles
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from runner.errors import UserError

pytestmark = pytest.mark.usefixtures("here")

TEXTS = ["a first text that is long", "another one of some length", "the third of the texts", "and the very last one"]
SETS = [["b", "a"], [], ["b"], ["a", "c", "a"]]
NUMBERS = [(0, 1), (), (1,), (0, 2)]


def several(name: str, content: str | None = None, **settings: Any) -> Corpus:
    if content is not None:
        Path(name).write_text(content)
    return TextFiles(train=name, eval=name, problem="multi_label", **settings).read()


def json_lines(labels: list[Any], **more: Any) -> str:
    rows = [{"text": text, "labels": own, **more} for text, own in zip(TEXTS, labels, strict=True)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(name: str, cells: list[Any]) -> str:
    return f"text,{name}\n" + "".join(f"{text},{cell}\n" for text, cell in zip(TEXTS, cells, strict=True))


def test_lists(tmp_path: Path) -> None:
    """Of names or, in a typed data set, of class numbers; a column of lists is found by its content too."""
    expected = LabelledText(TEXTS, NUMBERS)
    named = several("names.jsonl", json_lines(SETS))
    assert (named.train.texts, named.train.labels, named.label_names) == (TEXTS, NUMBERS, ("a", "b", "c"))
    assert any("'a' is class 0, 'b' is class 1, 'c' is class 2" in note for note in named.notes)
    features = Features({"text": Value("string"), "genres": List(ClassLabel(names=["x", "y", "z"]))})
    rows = Dataset.from_dict({"text": TEXTS, "genres": [list(row) for row in NUMBERS]}, features=features)
    rows.to_parquet("typed.parquet")
    rows.save_to_disk("saved")
    for name in ("typed.parquet", "saved"):
        typed = several(name)
        assert (typed.train.labels, typed.label_names) == (expected.labels, ("x", "y", "z"))
    ordered = several("names.jsonl", label_names=["c", "b", "a"])
    assert ordered.train.labels == [(1, 2), (), (1,), (0, 2)]


def test_separated_labels() -> None:
    """A cell without any has no class; spaces around labels do not matter."""
    corpus = several("t.csv", table("label", ["b; a", "", "b;", "a;c;a"]), label_separator=";")
    assert (corpus.train.labels, corpus.label_names) == (NUMBERS, ("a", "b", "c"))


@pytest.mark.parametrize("column", ["comment", 1])
def test_columns_of_flags(column: Any) -> None:
    """By name, with the text inferred, or by position; by default the columns name the classes."""
    rows = [
        f"7,{text},{int(0 in own)},{int(1 in own)},{int(2 in own)}\n" for text, own in zip(TEXTS, NUMBERS, strict=True)
    ]
    if column == 1:
        corpus = several(
            "t.csv", "".join(rows), columns=5, text_column=1, label_columns=[2, 3, 4], label_names=[*"xyz"]
        )
        assert corpus.label_names == ("x", "y", "z")
    else:
        corpus = several("t.csv", "id,comment,toxic,rude,odd\n" + "".join(rows), label_columns=["toxic", "rude", "odd"])
        assert corpus.label_names == ("toxic", "rude", "odd")
        reordered = TextFiles(label_columns=["toxic", "rude", "odd"], problem="multi_label")
        assert reordered.read_part("eval", "t.csv", ["odd", "rude", "toxic"]).labels == [(1, 2), (), (1,), (0, 2)]
        assert reordered.read_part("eval", "t.csv").texts == TEXTS
    assert (corpus.train.texts, corpus.train.labels) == (TEXTS, NUMBERS)


def test_numbers() -> None:
    """Integers, decimals and exponents, from a table or typed, in columns of their usual names."""
    cells = ["3", "-1.5", "2e-1", " 0.25 "]
    for name, column in (("score", None), ("label", None), ("other", "other")):
        Path("t.csv").write_text(table(name, cells))
        source = TextFiles(train="t.csv", eval="t.csv", problem="regression", label_column=column, skip_labels=["3"])
        corpus = source.read()
        assert corpus.train.labels == [-1.5, 0.2, 0.25]
        assert corpus.label_names == ()
    Dataset.from_dict({"text": TEXTS, "score": [1.0, 2.5, -100.0, 0.0]}).to_parquet("t.parquet")
    typed = TextFiles(problem="regression").read_part("eval", "t.parquet", ())
    assert typed.labels == [1.0, 2.5, -100.0, 0.0]
    assert TextFiles(problem="regression").read_part("eval", "t.parquet").labels is None


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["1", "2", "x", "4"], "line 4 has the label 'x', which is not a finite number"),
        (["1", "2", "3", ""], "line 5 has no label"),
        (["1", "nan", "3", "4"], "line 3 has the label 'nan'"),
        (["1", "2", "inf", "4"], "line 4 has the label 'inf'"),
        (["2", "2", "2.0", "2"], "only the number 2"),
    ],
)
def test_malformed_numbers(cells: list[str], words: str) -> None:
    Path("t.csv").write_text(table("label", cells))
    with pytest.raises(UserError) as caught:
        TextFiles(train="t.csv", eval="t.csv", problem="regression").read()
    assert words in str(caught.value)
    assert str(caught.value).startswith("recipe.data.train")


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (json_lines([["a"], ["b"], None, ["a"]]), {}, "row 3 has no list of labels in recipe.data.label_column=labels"),
        (json_lines([["a"], ["b", None], [], ["a"]]), {}, "row 2 has an empty label"),
        (json_lines(["a", "b", "a b", "c"]), {}, "row 1 has the text 'a'"),
        (json_lines(SETS), {"label_names": ["a", "b"]}, "row 4 has the label 'c'"),
        (json_lines(SETS), {"label_names": ["a", "b", "c", "d"]}, "no row of the class 'd'"),
        (json_lines([["a"], [], ["a"], ["a"]]), {}, "has one class"),
        (json_lines([[], [], [], []]), {}, "has no class"),
        (json_lines(SETS, x=1, y=2), {"label_columns": ["x", "y"]}, "row 1 has '2' in recipe.data.label_columns=y"),
        (json_lines(SETS, x=1, y=None), {"label_columns": ["x", "y"]}, "row 1 has nothing in"),
        (json_lines(SETS, x=1, y=1), {"label_columns": ["x", "yy"]}, "recipe.data.label_columns=yy is not a column"),
        (json_lines(SETS), {"label_columns": ["x"]}, "recipe.data.label_columns=['x']"),
        (json_lines(SETS), {"label_columns": ["x", "y"], "label_column": "z"}, "recipe.data.label_columns="),
        (json_lines(SETS), {"label_columns": ["x", "y"], "label_names": [*"abc"]}, "recipe.data.label_names="),
        (json_lines(SETS), {"label_columns": [0, 1]}, "recipe.data.label_columns=0"),
        (json_lines(SETS), {"label_separator": " "}, "recipe.data.label_separator"),
        (json_lines(SETS), {"skip_labels": ["a"]}, "recipe.data.skip_labels"),
    ],
)
def test_malformed_sets(content: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        several("t.jsonl", content, **settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (table("label", ["1", "2.5", "1", "2.5"]), {}, "recipe=text_regression"),
        (table("label", ["1", "2", "1", "2"]), {"label_separator": ";"}, "recipe.data.label_separator=;"),
        (table("label", ["1", "2", "1", "2"]), {"label_columns": ["a", "b"]}, "recipe.data.label_columns"),
        (table("label", [*"1234"]), {"problem": "regression", "label_names": ["a", "b"]}, "recipe.data.label_names"),
    ],
)
def test_another_problem(content: str, settings: dict[str, Any], words: str) -> None:
    """Numbers that are no classes, and settings of other problems."""
    Path("t.csv").write_text(content)
    with pytest.raises(UserError) as caught:
        TextFiles(**{"train": "t.csv", "eval": "t.csv", **settings}).read()
    assert words in str(caught.value)


def test_recipe_and_data_have_the_same_problem() -> None:
    with pytest.raises(UserError, match=r"recipe\.data\.problem=regression"):
        SequenceClassification(TextFiles(problem="regression"), Pretrained("x"))


def test_lists_are_not_one_class() -> None:
    Path("t.jsonl").write_text(json_lines(SETS))
    with pytest.raises(UserError, match="recipe=multi_label"):
        TextFiles(train="t.jsonl", eval="t.jsonl").read()
    Path("halves.csv").write_text(table("label", ["0.5", "1.5", "0.5", "1.5"]))
    classes = TextFiles(train="halves.csv", eval="halves.csv", label_names=["0.5", "1.5"]).read()
    assert classes.train.labels == [0, 1, 0, 1]
