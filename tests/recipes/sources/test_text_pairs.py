"""Pairs of texts to read and to write: columns, fields of columns, and what is wrong with a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.sources.text_pairs import TextPairFiles
from runner.errors import UserError
from tests.recipes.writers import pairs, write_rows

FIELDS = {"source_column": "translation.en", "target_column": "translation.de"}


def test_columns_and_fields(tmp_path: Path) -> None:
    """The same texts from a field of a column and from a column."""
    files: Any = [str(write_rows(tmp_path / "a.jsonl", pairs(9)))] * 2
    found = TextPairFiles(*files, **FIELDS).read()
    texts = [(row["translation"]["en"], row["translation"]["de"]) for row in pairs(9)]
    assert list(zip(found.train.sources, found.train.targets or (), strict=True)) == texts
    plain: Any = [str(write_rows(tmp_path / "b.jsonl", [{"source": a, "target": b} for a, b in texts]))] * 2
    assert TextPairFiles(*plain).read().digest == found.digest
    write_rows(tmp_path / "c.jsonl", [{"source": "No target."}])
    alone = TextPairFiles().read_evaluation(str(tmp_path / "c.jsonl"))
    assert (alone.eval.sources, alone.eval.targets, len(alone.train)) == (["No target."], None, 0)


@pytest.mark.parametrize(
    ("rows", "settings", "named"),
    [
        ([{"source": "a", "target": "b"}, {"source": "a", "target": " "}], {}, "row 2 has no text in 'target'"),
        ([{"source": None, "target": "b"}], {}, "row 1 has no text in 'source'"),
        ([{"source": "a", "target": "b\0"}], {}, "row 1 has NUL characters"),
        ([{"source": 7, "target": "b"}], {}, "row 1 has no text in 'source'"),
        ([{"source": "a", "targets": "b"}], {}, "no column 'target'; did you mean 'targets'"),
        (pairs(2), {**FIELDS, "target_column": "translation.fr"}, "no column 'translation.fr'"),
        ([{"source": {"en": "a"}, "target": "b"}], {}, "'source'"),
    ],
)
def test_malformed_rows(tmp_path: Path, rows: list[dict[str, Any]], settings: dict[str, str], named: str) -> None:
    file = str(write_rows(tmp_path / "a.jsonl", rows))
    with pytest.raises(UserError) as found:
        TextPairFiles(file, file, **settings).read()  # type: ignore[arg-type]
    assert str(found.value).startswith(f"recipe.data.train={file}")
    assert named in str(found.value)
