"""Labelled texts from files and from the Hub: no row is lost, and a malformed one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from recipes.sources.text_files import TextFiles
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import Unavailable, UserError

COLA = "s\t0\t*\tbad it is\ns\t1\t\tit is good\n"
HEADER = "id\tgold\tsentence1\tsentence2\n"
PAIRS_TSV = HEADER + "7\t1\tA dog ran.\tIt ran.\n8\t0\tIt fell.\tNothing fell.\n"
PAIRS_JSON = [
    {"gold": 1, "sentence1": "A dog ran.", "sentence2": "It ran.", "genre": "x"},
    {"gold": "0", "sentence1": "It fell.", "sentence2": "Nothing fell."},
]
PAIRS = LabelledText(["A dog ran.", "It fell."], [1, 0], ["It ran.", "Nothing fell."])
BY_POSITION: dict[str, Any] = {"text_column": 3, "label_column": 1, "columns": 4}
BY_NAME: dict[str, Any] = {"text_column": "sentence1", "pair_column": "sentence2", "label_column": "gold"}
NAMES = ["entailment", "neutral", "contradiction"]


def json_lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(train: str | bytes, evaluation: str | bytes | None = None, /, suffix: str = ".tsv", **settings: Any) -> Corpus:
    for part, content in (("train", train), ("eval", train if evaluation is None else evaluation)):
        Path(part + suffix).write_bytes(content if isinstance(content, bytes) else content.encode())
    files = {"train": f"train{suffix}", "eval": f"eval{suffix}"}
    return TextFiles(**{**files, **settings}).read()


def refusal(*content: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(*content, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is read -------------------------------------------------------------------------------------------


def test_columns_by_position(here: Path) -> None:
    corpus = read(COLA, "s\t1\t\tone\ns\t0\t\ttwo\n", **BY_POSITION)
    assert corpus.train == LabelledText(["bad it is", "it is good"], [0, 1])
    assert corpus.eval == LabelledText(["one", "two"], [1, 0])
    assert corpus.source == "train.tsv, eval.tsv"


@pytest.mark.parametrize(
    "text",
    [
        *(
            '"he said',
            '"a" "b',
            "'tis",
            "\\n a backslash",
            "a,b;c",
            "line\u2028separator",
            "form\x0cfeed and \x1c more",
        ),
        *("next\x85line", "a lone \r return", "ärger · 北京 · 🙂", "# no comment", "NA", "null", "1.5"),
    ],
)
def test_no_row_is_lost(here: Path, text: str) -> None:
    """Quotes, markers of missing values and other line separators are text: pandas' defaults would change them."""
    lines = [f"s\t{number % 2}\t\t{text if number in (1, 3) else 'row'}" for number in range(6)]
    corpus = read("\n".join(lines), **BY_POSITION)
    assert corpus.train == LabelledText(["row", text, "row", text, "row", "row"], [0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    "content", [COLA.rstrip("\n"), COLA.replace("\n", "\r\n"), "\ufeff" + COLA, COLA.replace("\n", "\n\n  \n")]
)
def test_line_ends_blank_lines_and_byte_order_mark(here: Path, content: str) -> None:
    assert read(content, **BY_POSITION).digest == read(COLA, **BY_POSITION).digest


def test_columns_by_name(here: Path) -> None:
    """The same pairs from a file with a header, in any order of columns, from JSON Lines and by position."""
    moved = "sentence2\tsentence1\tgold\nIt ran.\tA dog ran.\t1\nNothing fell.\tIt fell.\t0\n"
    position = {"text_column": 2, "pair_column": 3, "label_column": 1, "columns": 4}
    found = [
        read(PAIRS_TSV, **BY_NAME),
        read(moved.replace("\t", " \t "), **BY_NAME),
        read(json_lines(*PAIRS_JSON) + "\n", suffix=".jsonl", **BY_NAME),
        read(PAIRS_TSV.removeprefix(HEADER), **position),
    ]
    assert all(corpus.train == PAIRS for corpus in found)
    assert len({corpus.digest for corpus in found}) == 1
    assert read(PAIRS_TSV, **{**BY_NAME, "pair_column": None}).train.pairs is None


def test_label_names_skipped_labels_and_limits(here: Path) -> None:
    """Labels are names or their numbers; limits count the rows that are not skipped."""
    rows = "a\tneutral\nb\t-\nc\tentailment\nd\t2\ne\t-\nf\tneutral\n"
    settings: dict[str, Any] = {"text_column": 0, "label_column": 1, "columns": 2, "label_names": NAMES}
    corpus = read(rows, **settings, skip_labels=["-"], max_eval_samples=2)
    assert corpus.train == LabelledText(["a", "c", "d", "f"], [1, 0, 2, 1])
    assert corpus.eval == LabelledText(["a", "c"], [1, 0])
    # Names that look like numbers are names.
    stars = read("a\t1\nb\t2\nc\t3\n", **{**settings, "label_names": ["1", "2", "3"]})
    assert stars.train.labels == [0, 1, 2]
    assert "'-'" in refusal(rows, **settings)
    assert "did you mean 'neutral'" in refusal("a\tnuetral\n", **settings)


def test_digest_follows_every_row(here: Path) -> None:
    lines = COLA.splitlines()
    contents = [COLA, COLA.replace("good", "god"), "\n".join(reversed(lines)), COLA + "s\t1\t\tmore\n"]
    digests = [read(content, COLA, **BY_POSITION).digest for content in contents]
    assert len({*digests, read(COLA, contents[-1], **BY_POSITION).digest}) == 5


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("s\t1\t\tfive\tcolumns", "line 4"),  # pandas' own message
        ("s\t1\tthree columns", "line 4 has no text in recipe.data.text_column=3"),
        ("s\tyes\t\ttext", "line 4 has the label 'yes' in recipe.data.label_column=1"),
        ("s\t1.0\t\ttext", "line 4 has the label '1.0'"),
        ("s\t-1\t\ttext", "line 4 has the label '-1'"),
        ("s\t1234567\t\ttext", "line 4 has the label '1234567'"),
    ],
)
def test_malformed_lines(here: Path, line: str, words: str) -> None:
    """A malformed line is named by file and number as an editor counts it, blank lines included."""
    message = refusal(COLA, COLA + "\n" + line + "\n", **BY_POSITION)
    assert message.startswith("recipe.data.eval=eval.tsv ")
    assert words in message


@pytest.mark.parametrize(
    "line", ["{", "[1, 2]", '{"gold": 1, "sentence1": "A."}', json.dumps({**PAIRS_JSON[0], "sentence2": None})]
)
def test_malformed_json_lines(here: Path, line: str) -> None:
    message = refusal(json_lines(*PAIRS_JSON) + line, suffix=".jsonl", **BY_NAME)
    assert message.startswith("recipe.data.train=train.jsonl is malformed: line 3 ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"s\t1\t\tcaf\xe9\n", "is not UTF-8 text (byte 8)"),
        (COLA.replace("\t", "  "), "has 1 columns"),
        ("s\t1\t\ta\ns\t1\t\tb\n", "only labels of class 1"),
        ("s\t0\t\ta\ns\t2\t\tb\n", "has the classes 0, 2"),
    ],
)
def test_content_that_cannot_be_used(here: Path, content: str | bytes, words: str) -> None:
    message = refusal(content, COLA, **BY_POSITION)
    assert words in message
    assert "recipe.data." in message


def test_classes_of_the_evaluation_set(here: Path) -> None:
    """They may be fewer than those of the training set, but not others."""
    assert read(COLA, "s\t1\t\tonly\n", **BY_POSITION).eval.labels == [1]
    assert "recipe.data.eval has the classes 7" in refusal(COLA, COLA + "s\t7\t\tx\n", **BY_POSITION)
    rows = "a\t0\nb\t1\n"
    settings: dict[str, Any] = {"text_column": 0, "label_column": 1, "columns": 2, "label_names": NAMES}
    assert "'contradiction'" in refusal(rows, **settings)  # a class that is never trained


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": "nowhere/x.tsv"}, "recipe.data.train=nowhere/x.tsv does not exist"),
        ({"train": "."}, "recipe.data.train=. is a folder"),
        ({"train": None}, "recipe.data.train=null"),
        ({"eval": None, "hub_name": "owner/data"}, "owner/data"),
        ({"text_column": 4}, "recipe.data.text_column=4"),
        ({"label_column": -1}, "recipe.data.label_column=-1"),
        ({"label_column": "gold"}, "recipe.data.label_column=gold"),
        ({"columns": None}, "recipe.data.columns=null"),
        ({"columns": 5}, "recipe.data.columns=5"),
        ({"text_column": "sentense1", "label_column": "gold"}, "recipe.data.text_column=sentense1"),
        ({"label_names": ["one"]}, "recipe.data.label_names"),
        ({"label_names": [True, False]}, "recipe.data.label_names"),
        ({"skip_labels": "-"}, "recipe.data.skip_labels=-"),
        ({"max_eval_samples": 0}, "recipe.data.max_eval_samples=0"),
        ({"skip_labels": ["0", "1"]}, "recipe.data.skip_labels"),
        ({"hub_pair": "hypothesis"}, "recipe.data.pair_column=null"),
    ],
)
def test_wrong_settings(here: Path, settings: dict[str, Any], words: str) -> None:
    assert words in refusal(COLA, **{**BY_POSITION, **settings})


# --- the Hub ------------------------------------------------------------------------------------------------


def test_data_set_of_the_hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are class numbers, names or booleans; splits, columns and skipped labels are those configured."""
    texts = {"premise": ["a", "b", "c", "d"], "hypothesis": ["A", "B", "C", "D"]}
    splits = {
        "numbers": {**texts, "label": [1, 0, -1, 2]},
        "names": {**texts, "label": ["neutral", "entailment", "-1", "contradiction"]},
        "holes": {**texts, "hypothesis": ["A", None, "C", "D"], "label": [0, 1, 2, 0]},
    }
    monkeypatch.setattr("datasets.load_dataset", lambda *_: {n: Dataset.from_dict(s) for n, s in splits.items()})

    def source(**changes: Any) -> TextFiles:
        hub = {"hub_name": "owner/data", "hub_config": "part", "hub_train": "numbers", "hub_eval": "names"}
        columns = {"hub_text": "premise", "hub_pair": "hypothesis", "pair_column": 1, "columns": 3}
        settings = {"text_column": 0, "label_column": 2, "label_names": NAMES, "skip_labels": ["-1"]}
        return TextFiles(**{**hub, **columns, **settings, **changes})  # type: ignore[arg-type]

    corpus = source().read()
    assert corpus.train == corpus.eval == LabelledText(["a", "b", "d"], [1, 0, 2], ["A", "B", "D"])
    assert corpus.source == "Hub: owner/data/part"
    for changes, words in (
        ({"hub_eval": "dev"}, "no split 'dev'"),
        ({"hub_label": "gold"}, "no column 'gold'"),
        ({"hub_train": "holes"}, "'holes' row 1 has no text in recipe.data.hub_pair=hypothesis"),
        ({"skip_labels": []}, "'numbers' row 2 has the label '-1'"),
        ({"hub_pair": None}, "recipe.data.hub_pair=null"),
    ):
        with pytest.raises(UserError, match=words):
            source(**changes).read()


def test_without_files_and_hub() -> None:
    """What neither files nor the Hub can give now is Unavailable; without a name on the Hub it is a mistake."""
    with pytest.raises(Unavailable, match=r"recipe\.data\.train=….*'owner/data'"):
        TextFiles(0, 1, columns=2, hub_name="owner/data").read()
    with pytest.raises(UserError) as caught:
        TextFiles(0, 1, columns=2).read()
    assert not isinstance(caught.value, Unavailable)


def test_texts_alone_where_columns_are_positions(tmp_path: Path) -> None:
    """A file to predict for, of a model trained on a table without a header."""
    (tmp_path / "mine.tsv").write_text("I went there.\nWent there I.\n")
    source = TextFiles(text_column=3, label_column=1, columns=4)
    assert source.read_part("eval", str(tmp_path / "mine.tsv")).texts == ["I went there.", "Went there I."]
