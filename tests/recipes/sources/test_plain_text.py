"""Documents from plain text files and from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from recipes.sources.plain_text import PlainText
from recipes.tasks.language_model import Documents
from runner.errors import UserError

TEXT = "one\ntwo\n\nthree\n \n\n  four\nfive\n"


def read(content: str, **settings: Any) -> Documents:
    Path("train.txt").write_bytes(content.encode())
    Path("eval.txt").write_text("held out\n")
    return PlainText("train.txt", "eval.txt", **settings).read()


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("lines", ["one", "two", "three", "  four", "five"]),
        ("paragraphs", ["one\ntwo", "three", "  four\nfive"]),
        ("files", ["one\ntwo\n\nthree\n \n\n  four\nfive"]),
    ],
)
@pytest.mark.parametrize("content", [TEXT, TEXT.rstrip("\n"), TEXT.replace("\n", "\r\n"), "\ufeff\n" + TEXT + "\n"])
def test_kinds_of_documents(documents: str, expected: list[str], content: str, here: Path) -> None:
    """Blank documents, line ends around documents and a byte order mark are dropped."""
    found = read(content, documents=documents)
    assert (found.train, found.eval, found.source) == (expected, ["held out"], "train.txt, eval.txt")


@pytest.mark.parametrize("text", ["line\u2028separator", "form\x0cfeed", "next\x85line", "tab\tand  spaces ", "北京"])
def test_a_line_stays_whole(text: str, here: Path) -> None:
    assert read(f"first\n{text}\nlast").train == ["first", text, "last"]


def test_patterns(here: Path) -> None:
    """The files of a pattern are read in the order of their names; brackets in a file's own name are no pattern."""
    (here / "corpus" / "deep").mkdir(parents=True)
    (here / "corpus" / "c.txt").mkdir()
    for name in ("b.txt", "a.txt", "deep/d.txt", "other.md"):
        (here / "corpus" / name).write_text(f"of {name}\n")
    (here / "x[1].txt").write_text("brackets\n")
    for pattern, expected in (
        ("corpus/*.txt", ["of a.txt", "of b.txt"]),
        ("corpus/**/*.txt", ["of a.txt", "of b.txt", "of deep/d.txt"]),
        ("corpus/[b-c].txt", ["of b.txt"]),
        ("x[1].txt", ["brackets"]),
    ):
        assert PlainText(pattern, "x[1].txt").read().train == expected


def test_digest_follows_the_borders_of_documents(here: Path) -> None:
    same = read(TEXT).digest
    assert read(TEXT.replace("\n", "\r\n\r\n")).digest == same
    assert len({same, *(read(TEXT.replace("one\ntwo", other)).digest for other in ("onet\nwo", "two\none"))}) == 3


def test_rows_with_a_text(tmp_path: Path, here: Path) -> None:
    """From the Hub, or from files with columns."""
    splits = {
        "train": {"text": ["", " = Title = \n", "first\nsecond\n"], "id": [0, 1, 2]},
        "validation": {"text": ["held out\n"], "id": [3]},
        "test": {"text": ["\n"], "id": [4]},
    }
    hub = tmp_path / "hub"
    for name, rows in splits.items():
        Dataset.from_dict(rows).to_json(hub / f"{name}.jsonl")
    expected = [" = Title = ", "first", "second"]
    found = PlainText(hub_name=str(hub)).read()
    assert (found.train, found.eval) == (expected, ["held out"])
    assert PlainText(hub_name=str(hub), documents="files").read().train == [" = Title = ", "first\nsecond"]
    assert PlainText("hub/train.jsonl", "hub/validation.jsonl").read() == Documents(
        expected, ["held out"], "hub/train.jsonl, hub/validation.jsonl"
    )
    for changes in ({"hub_eval": "test"}, {"hub_text": "id"}, {"hub_text": "sentence"}):
        with pytest.raises(UserError, match=r"recipe\.data\.hub_name="):
            PlainText(hub_name=str(hub), **changes).read()


@pytest.mark.parametrize(
    ("settings", "beginning"),
    [
        ({"documents": "line"}, "recipe.data.documents=line "),
        ({"train": "blank.txt"}, "recipe.data.train=blank.txt contains no text"),
        ({"train": "zeros.txt"}, "recipe.data.train=zeros.txt: document 2 has NUL characters"),
        ({"eval": "*.bin"}, "recipe.data.eval=*.bin (latin.bin) is not UTF-8"),
        ({"eval": "x" * 300}, "recipe.data.eval=xxx"),
    ],
)
def test_wrong_settings(here: Path, settings: dict[str, Any], beginning: str) -> None:
    (here / "good.txt").write_text("a\n")
    (here / "blank.txt").write_text("\n \n")
    (here / "zeros.txt").write_text("a\n" + "\0" * 512 + "\n")
    (here / "latin.bin").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError) as caught:
        PlainText(**{"train": "good.txt", "eval": "good.txt", **settings}).read()
    assert str(caught.value).startswith(beginning)
