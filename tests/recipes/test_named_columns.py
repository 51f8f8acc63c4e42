"""Files whose columns have names: tab-separated with a header, and JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.sources.text_files import TextFiles
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import UserError

HEADER = "id\tgold\tsentence1\tsentence2\n"
TSV = HEADER + "7\t1\tA dog ran.\tIt ran.\n8\t0\tIt fell.\tNothing fell.\n"
ROWS: list[dict[str, Any]] = [
    {"gold": 1, "sentence1": "A dog ran.", "sentence2": "It ran.", "genre": "made up"},
    {"gold": "0", "sentence1": "It fell.", "sentence2": "Nothing fell.", "pairID": 3},
]
PAIRS = LabelledText(["A dog ran.", "It fell."], [1, 0], ["It ran.", "Nothing fell."])


def json_lines(*rows: Any) -> str:
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


class Files:
    """Writes a training and an evaluation file with this suffix and reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, content: str, suffix: str = ".tsv", **changes: Any) -> Corpus:
        paths = [self.folder / f"{part}{suffix}" for part in ("train", "dev")]
        for path in paths:
            path.write_text(content)
        of: dict[str, Any] = {"text_column": "sentence1", "pair_column": "sentence2", "label_column": "gold"}
        return TextFiles(**{**of, "train": str(paths[0]), "eval": str(paths[1]), **changes}).read()

    def said(self, content: str, suffix: str = ".tsv", **changes: Any) -> str:
        with pytest.raises(UserError) as caught:
            self.read(content, suffix, **changes)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


# --- what is read -------------------------------------------------------------------------------------------


def test_columns_under_a_header(files: Files) -> None:
    """Columns are found by name wherever they stand, and the header is no row."""
    assert files.read(TSV).train == files.read(TSV).eval == PAIRS
    moved = "sentence2\tsentence1\tgold\nIt ran.\tA dog ran.\t1\nNothing fell.\tIt fell.\t0\n"
    assert files.read(moved).train == PAIRS


@pytest.mark.parametrize(
    "content", [TSV.replace("\n", "\r\n"), "\ufeff" + TSV, "\n" + TSV.replace("\n", "\n\n"), TSV.replace("\t", " \t ")]
)
def test_header_whatever_the_editor_left(files: Files, content: str) -> None:
    """Line ends, a byte order mark, empty lines and blanks around names and values change nothing."""
    assert files.read(content).train == PAIRS


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL"])
def test_json_lines(files: Files, suffix: str) -> None:
    """An object per line; labels as numbers or text, other fields are of no interest."""
    assert files.read(json_lines(*ROWS), suffix).train == PAIRS
    assert files.read(json_lines(ROWS[0], "\n", ROWS[1]), suffix).train == PAIRS


def test_text_alone(files: Files) -> None:
    """Without a pair column there are single texts, from either form."""
    for content, suffix in ((TSV, ".tsv"), (json_lines(*ROWS), ".jsonl")):
        assert files.read(content, suffix, pair_column=None).train == LabelledText(["A dog ran.", "It fell."], [1, 0])


def test_both_forms_are_the_same_data(files: Files) -> None:
    """The same rows have the same digest in either form, and by position from a file without a header."""
    digests = {
        files.read(TSV).digest,
        files.read(json_lines(*ROWS), ".jsonl").digest,
        files.read(TSV.removeprefix(HEADER), text_column=2, pair_column=3, label_column=1, columns=4).digest,
    }
    assert len(digests) == 1


def test_quotes_and_line_ends_are_text(files: Files) -> None:
    """A quote does not join lines, and a line end within a JSON text stays within it."""
    assert files.read(TSV.replace("A dog", '"A dog')).train.texts[0] == '"A dog ran.'
    assert files.read(json_lines({**ROWS[0], "sentence1": "A\ndog\u2028ran"}, ROWS[1]), ".jsonl").train.texts[0] == (
        "A\ndog\u2028ran"
    )


def test_columns_may_be_counted_too(files: Files) -> None:
    """With names `columns` may be left out, or be the header's number; another one is refused."""
    assert files.read(TSV, columns=4).train == PAIRS
    message = files.said(TSV, columns=5)
    assert message.startswith("recipe.data.columns=5 is not what recipe.data.train=")
    assert message.endswith("whose header names 4: set it to null")


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (HEADER, "has a header and no rows"),
        (TSV + "9\t1\tthree cells\n", "line 4 has 3 tab-separated columns, and the header has 4"),
        (TSV + "\n9\tmaybe\tA.\tB.\n", "line 5 has the label 'maybe' in column 'gold', which is not a class number"),
        (TSV + "9\t1\t\tB.\n", "line 4 has no text in column 'sentence1'"),
        (TSV + "9\t1\tA.\t  \n", "line 4 has no text in column 'sentence2'"),
    ],
)
def test_wrong_lines_under_a_header(files: Files, content: str, words: str) -> None:
    """What is wrong is named with the file and the line's number, the header counted."""
    message = files.said(content)
    assert message.startswith("recipe.data.train=")
    assert words in message


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            HEADER.replace("sentence2", "sentence_2"),
            "recipe.data.pair_column=sentence2 is not in the header (line 1) of",
        ),
        (HEADER.replace("gold", "sentence1"), "recipe.data.text_column=sentence1 is twice in the header (line 1) of"),
        (HEADER.replace("gold", "Gold"), "did you mean 'Gold'?"),
    ],
)
def test_wrong_header(files: Files, header: str, words: str) -> None:
    """A name that the header has not, or has twice, is refused by its setting, with the nearest one."""
    message = files.said(TSV.replace(HEADER, header))
    assert words in message
    assert str(files.folder) in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 3 is no JSON (Expecting property name"),
        ("A dog ran.\tIt ran.", "line 3 is no JSON (Expecting value"),
        ("[1, 2]", "line 3 is no JSON object"),
        ("[" * 100_000, "line 3 is no JSON (nested too deeply"),
        (json.dumps({**ROWS[0], "sentence1": "Half \ud800 a pair."}), 'line 3 has "Half \\ud800 a pair." in the field'),
        ('"text"', "line 3 is no JSON object"),
        (
            '{"gold": 1, "sentence1": "A.", "sentence3": "B."}',
            "line 3 has no field 'sentence2' (recipe.data.pair_column)",
        ),
        (
            '{"gold": 1, "sentence1": "A.", "sentence2": null}',
            "line 3 has null in the field 'sentence2', which is no text",
        ),
        ('{"gold": 1, "sentence1": 5, "sentence2": "B."}', "line 3 has 5 in the field 'sentence1', which is no text"),
        ('{"gold": 1, "sentence1": ["A."], "sentence2": "B."}', "line 3 has [\"A.\"] in the field 'sentence1'"),
        (
            '{"gold": true, "sentence1": "A.", "sentence2": "B."}',
            "line 3 has true in the field 'gold', which is neither",
        ),
        ('{"gold": 1.5, "sentence1": "A.", "sentence2": "B."}', "line 3 has 1.5 in the field 'gold', which is neither"),
        ('{"gold": -1, "sentence1": "A.", "sentence2": "B."}', "line 3 has the label '-1' in column 'gold'"),
        ('{"gold": 1, "sentence1": "A.", "sentence2": " "}', "line 3 has no text in column 'sentence2'"),
    ],
)
def test_wrong_json_lines(files: Files, line: str, words: str) -> None:
    """A line that is no object, a missing field and a value of another type are named with the line's number."""
    message = files.said(json_lines(*ROWS, line + "\n"), ".jsonl")
    assert message.startswith("recipe.data.train=")
    assert words in message


def test_missing_field_and_its_neighbour(files: Files) -> None:
    """The field that was meant is proposed."""
    assert "did you mean 'gold'?" in files.said(json_lines(*ROWS), ".jsonl", label_column="glod")


def test_empty_json_lines(files: Files) -> None:
    """A file of JSON Lines without a line is empty."""
    assert "is empty" in files.said("\n", ".jsonl")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_column": 2}, "recipe.data.text_column=2 and recipe.data.label_column=gold cannot be together"),
        ({"pair_column": 0}, "recipe.data.text_column=sentence1 and recipe.data.pair_column=0 cannot be together"),
        (
            {"pair_column": "sentence1"},
            "recipe.data.pair_column=sentence1 cannot be: recipe.data.text_column is the same",
        ),
        ({"label_column": ""}, "recipe.data.label_column= cannot be"),
        ({"label_column": True}, "recipe.data.label_column=true cannot be"),
        (
            {"text_column": 2, "pair_column": None, "label_column": 1},
            "recipe.data.columns=null cannot be with recipe.data.text_column=2",
        ),
        (
            {"text_column": 2, "pair_column": 4, "label_column": 1, "columns": 4},
            "recipe.data.pair_column=4 cannot be: columns are numbered from 0, and recipe.data.columns=4",
        ),
    ],
)
def test_columns_that_do_not_go_together(files: Files, changes: dict[str, Any], words: str) -> None:
    """Positions mixed with names, a column twice and positions without a number of columns are refused."""
    assert files.said(TSV, **changes).startswith(words)


def test_json_lines_have_names_only(files: Files) -> None:
    """Neither positions nor a number of columns mean anything for JSON Lines."""
    positions: dict[str, Any] = {"text_column": 2, "pair_column": 3, "label_column": 1, "columns": 4}
    assert "is JSON Lines, whose fields have names" in files.said(json_lines(*ROWS), ".jsonl", **positions)
    message = files.said(json_lines(*ROWS), ".jsonl", columns=4)
    assert message.startswith("recipe.data.columns=4 cannot be for JSON Lines")
