"""Labelled texts from tab-separated files: no row is lost, and every malformed line is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from recipes.sources.text_files import TextFiles
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import UserError

GOOD = "s\t0\t*\tbad it is\ns\t1\t\tit is good\n"


class Files:
    """Writes a training and an evaluation file and reads them as CoLA's."""

    def __init__(self, folder: Path) -> None:
        self.train, self.eval = folder / "train.tsv", folder / "dev.tsv"

    def source(self, train: str | bytes = GOOD, evaluation: str | bytes = GOOD, /, **changes: Any) -> TextFiles:
        for path, content in ((self.train, train), (self.eval, evaluation)):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        of: dict[str, Any] = {
            "train": str(self.train),
            "eval": str(self.eval),
            "columns": 4,
            "text_column": 3,
            "label_column": 1,
            "hub_name": "owner/data",
            "hub_config": "part",
            "hub_train": "train",
            "hub_eval": "validation",
            "hub_text": "sentence",
            "hub_label": "label",
        }
        return TextFiles(**{**of, **changes})

    def read(self, train: str | bytes = GOOD, evaluation: str | bytes = GOOD, /, **changes: Any) -> Corpus:
        return self.source(train, evaluation, **changes).read()

    def said(self, train: str | bytes = GOOD, evaluation: str | bytes = GOOD, /, **changes: Any) -> str:
        """The one sentence with which the files are refused."""
        with pytest.raises(UserError) as caught:
            self.read(train, evaluation, **changes)
        message = str(caught.value)
        assert "\n" not in message
        return message


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_columns_and_parts(files: Files) -> None:
    """Text and label come from their columns, each part from its own file, in the file's order."""
    corpus = files.read(GOOD, "s\t1\t\tone\ns\t1\t\ttwo\ns\t0\t\tthree\n")
    assert corpus.train == LabelledText(["bad it is", "it is good"], [0, 1])
    assert corpus.eval == LabelledText(["one", "two", "three"], [1, 1, 0])
    assert (len(corpus.eval), corpus.classes) == (3, 2)
    assert str(files.train) in corpus.source


def test_other_columns(files: Files) -> None:
    """Files of another shape can be read by naming their columns."""
    two = "\ufeffgood\t1\nbad\t0\nworse\t2\n"  # a byte order mark is no part of the first text
    corpus = files.read(two, two, columns=2, text_column=0, label_column=1)
    assert corpus.train == LabelledText(["good", "bad", "worse"], [1, 0, 2])
    assert corpus.classes == 3


@pytest.mark.parametrize(
    "text",
    [
        '"he said',
        'he said "',
        '"',
        '""',
        '"a" "b',
        "'tis",
        "it's \\n a backslash",
        "a,b;c",
        "line\u2028separator",
        "form\x0cfeed and \x1c file separator",
        "next\x85line",
        "ärger · 北京 · 🙂",
        "# no comment",
        "NA",
        "1.5",
    ],
)
def test_no_row_is_lost(files: Files, text: str) -> None:
    """Quote characters, separators and line ends of other kinds are plain text: rows stay rows, texts stay whole."""
    lines = [f"s\t{number % 2}\t\t{text}" if number in (1, 3) else f"s\t{number % 2}\t\trow" for number in range(6)]
    corpus = files.read("\n".join(lines))
    assert corpus.train.texts == ["row", text, "row", text, "row", "row"]
    assert corpus.train.labels == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        GOOD.rstrip("\n"),  # no end of the last line
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,  # as some editors save it
        "\n" + GOOD.replace("\n", "\n\n  \n"),
        GOOD.replace("\t0\t", "\t 0 \t"),
        GOOD.replace("good", "good  "),
    ],
)
def test_same_rows_whatever_the_editor_left(files: Files, content: str) -> None:
    """Line ends, a byte order mark, empty lines and stray blanks change no row."""
    assert files.read(content).train == LabelledText(["bad it is", "it is good"], [0, 1])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("s\t1\tthree columns", "has 3 tab-separated columns, and 4 are expected"),
        ("s\t1\t\tfive\tcolumns", "has 5 tab-separated columns, and 4 are expected"),
        ("spaces 1 for tabs", "has 1 tab-separated columns, and 4 are expected"),
        ("s\tyes\t\ttext", "has the label 'yes' in column 2, which is not a class number"),
        ("s\t\t\ttext", "has the label '' in column 2"),
        ("s\t-1\t\ttext", "has the label '-1' in column 2"),
        ("s\t1.0\t\ttext", "has the label '1.0' in column 2"),
        ("s\t1²\t\ttext", "has the label '1²' in column 2"),
        ("source\tlabel\tmark\tsentence", "has the label 'label' in column 2"),
    ],
)
@pytest.mark.parametrize(("before", "number"), [("", 1), (GOOD, 3), ("\n\n" + GOOD + "\n", 6)])
def test_malformed_line(files: Files, line: str, words: str, before: str, number: int) -> None:
    """A malformed line is named by setting, file and number as an editor counts it, with what is wrong."""
    message = files.said(before + line + "\n" + GOOD)
    assert message.startswith(f"recipe.data.train={files.train} is malformed: line {number} {words}")
    message = files.said(GOOD, before + line + "\n")
    assert message.startswith(f"recipe.data.eval={files.eval} is malformed: line {number} {words}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n \n\r\n", "is empty"),
        (b"s\t1\t\tcaf\xe9\n", "is not UTF-8 text (byte 8)"),
        (b"\xff\xfes\x00\t\x00", "is not UTF-8 text (byte 0)"),
    ],
)
def test_unreadable_content(files: Files, content: bytes, words: str) -> None:
    """A file without rows, or in another encoding, is refused by setting and file."""
    assert files.said(content).startswith(f"recipe.data.train={files.train} {words}")
    assert files.said(GOOD, content).startswith(f"recipe.data.eval={files.eval} {words}")


def test_path_that_is_no_file(files: Files, tmp_path: Path) -> None:
    """A missing file and a folder are told apart, and the place that was looked in is named."""
    missing = tmp_path / "nowhere" / "train.tsv"
    message = files.said(train=str(missing))
    assert message.startswith(f"recipe.data.train={missing} does not exist (looked in {missing.parent})")
    assert files.said(eval=str(tmp_path)).startswith(f"recipe.data.eval={tmp_path} is a folder")


def test_relative_path_and_home(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths may be relative to the working folder, or start at home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(files.read(train="train.tsv", eval="~/dev.tsv").train) == 2


@pytest.mark.parametrize(("given", "missing"), [("train", "eval"), ("eval", "train")])
def test_one_file_only(files: Files, given: str, missing: str) -> None:
    """One file without the other is refused with both settings, instead of being mixed with the Hub's data."""
    message = files.said(**{missing: None})
    assert message.startswith(f"recipe.data.{given} is given and recipe.data.{missing} is not")
    assert "owner/data" in message


def test_no_data_at_all(files: Files) -> None:
    """Without files and without a name on the Hub both settings that can be given are named."""
    message = files.said(train=None, eval=None, hub_name=None)
    assert "recipe.data.train=…" in message
    assert "recipe.data.eval=…" in message
    assert "None" not in files.said(eval=None, hub_name=None)


@pytest.mark.parametrize(
    ("train", "evaluation", "words"),
    [
        ("s\t1\t\ta\ns\t1\t\tb\n", GOOD, "recipe.data.train has one class only: all 2 labels are 1"),
        ("s\t0\t\ta\ns\t2\t\tb\n", GOOD, "recipe.data.train has the classes 0, 2: number them from 0"),
        ("s\t1\t\ta\ns\t2\t\tb\n", GOOD, "recipe.data.train has the classes 1, 2: number them from 0"),
        (GOOD, GOOD + "s\t2\t\tc\ns\t7\t\td\n", "recipe.data.eval has classes that recipe.data.train has not: 2, 7"),
    ],
)
def test_classes_that_do_not_fit(files: Files, train: str, evaluation: str, words: str) -> None:
    """Classes have to be numbered from 0 without gaps, and be more than one; evaluation may bring no new ones."""
    assert files.said(train, evaluation).startswith(words)


def test_evaluation_may_lack_a_class(files: Files) -> None:
    """Held-out rows of one class only are allowed."""
    assert files.read(GOOD, "s\t1\t\tonly\n").eval.labels == [1]


def test_offline_without_files(files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without files and without the Hub both ways out are named: local files, or going online."""
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    message = files.said(train=None, eval=None)
    for word in ("recipe.data.train=…", "recipe.data.eval=…", "go online", "'owner/data'", "Hub"):
        assert word in message


def test_data_set_of_the_hub(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of the Hub is read by the names given for its parts and columns."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = []

    def load_dataset(name: str, config: str | None) -> Any:
        asked.append((name, config))
        parts = {
            "train": {"sentence": ["a", "b"], "label": [1, 0], "idx": [0, 1]},
            "validation": {"sentence": ["c"], "label": [1]},
            "test": {"sentence": ["d"], "label": [-1]},
            "holes": {"sentence": ["e", None], "label": [1, 0]},
            "lists": {"sentence": [["a", "token"]], "label": [1]},
        }
        return {name: Dataset.from_dict(part) for name, part in parts.items()}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    corpus = files.read(train=None, eval=None)
    assert "no part 'dev' on the Hub" in files.said(train=None, eval=None, hub_eval="dev")
    assert "no column 'text' on the Hub" in files.said(train=None, eval=None, hub_text="text")
    for number, name in ((1, "holes"), (0, "lists")):
        message = files.said(train=None, eval=None, hub_train=name)
        assert f"row {number} of '{name}' has no text in column 'sentence'" in message
    del asked[1:]
    assert asked == [("owner/data", "part")]
    assert corpus.train == LabelledText(["a", "b"], [1, 0])
    assert corpus.eval == LabelledText(["c"], [1])
    assert corpus.source == "Hub: owner/data/part (train, validation)"


def test_digest_follows_every_row(files: Files) -> None:
    """A changed text, label, order or part changes the digest; the same rows in another file do not."""
    same = files.read().digest
    assert files.read(GOOD.replace("\n", "\r\n")).digest == same
    lines = GOOD.splitlines()
    others = [
        files.read(GOOD.replace("good", "god")).digest,
        files.read(GOOD.replace("\t1\t", "\t2\t").replace("\t0\t", "\t1\t").replace("\t2\t", "\t0\t")).digest,
        files.read("\n".join(reversed(lines))).digest,
        files.read(GOOD + "s\t1\t\tmore\n").digest,
        files.read(GOOD, GOOD + "s\t1\t\tmore\n").digest,
    ]
    assert len({same, *others}) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"text_column": 4},  # IndexError
        {"label_column": 9},  # IndexError
        {"text_column": None},  # TypeError
        {"train": 3, "eval": 4},  # TypeError
        {"text_column": -1},  # accepted
    ],
)
def test_columns_that_are_not_there(files: Files, changes: dict[str, Any]) -> None:
    """A column beyond those of the file, and a path that is no text, are refused by their setting."""
    said = files.said(**changes)
    assert any(f"recipe.data.{name}={'null' if value is None else value}" in said for name, value in changes.items())


def test_row_without_a_text(files: Files) -> None:
    """A row whose text is empty is named as malformed, for a model cannot be given nothing."""
    assert "line 3" in files.said(GOOD + "s\t1\t\t\n")
