"""Reading pairs of answers: forms of rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.sources.preferences import PreferenceFiles
from runner.errors import UserError
from tests.recipes.writers import write_rows

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (
    ("user", "Where?"), ("assistant", "There."), ("assistant", "Here."),
))  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}


def read(rows: list[dict[str, Any]], **settings: Any) -> Any:
    write_rows(Path("rows.jsonl"), rows)
    return PreferenceFiles(train="rows.jsonl", eval="rows.jsonl", **settings).read().train


@pytest.mark.parametrize("row", [
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "Where?", "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "Where?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
])  # fmt: skip
def test_forms_of_conversations(row: dict[str, Any], here: Path) -> None:
    found = read([row])
    assert [list(chats.rows) for chats in (found.chosen, found.rejected)] == [
        [{"messages": [USER, GOOD]}], [{"messages": [USER, BAD]}],
    ]  # fmt: skip


def test_texts(here: Path) -> None:
    """With a prompt, and without one; in columns of other names."""
    found = read([{"q": "Where?", "yes": " There.", "no": " Here."}], prompt_column="q", chosen_column="yes",
                 rejected_column="no")  # fmt: skip
    assert list(found.rejected.rows) == [{"prompt": "Where?", "completion": " Here."}]
    found = read([{"chosen": "Where? There.", "rejected": "Where? Here.", "source": "me"}])
    assert list(found.chosen.rows) == [{"prompt": "", "completion": "Where? There."}]
    assert "source" in found.notes[0]


GOOD_ROW = {"prompt": "Where?", "chosen": "There.", "rejected": "Here."}


@pytest.mark.parametrize(("wrong", "says"), [
    ({**GOOD_ROW, "rejected": "There."}, "the same chosen and rejected"),
    ({**GOOD_ROW, "rejected": " "}, "no text in 'rejected'"),
    ({**GOOD_ROW, "prompt": None}, "no text in 'prompt'"),
])  # fmt: skip
def test_wrong_texts(wrong: dict[str, Any], says: str, here: Path) -> None:
    with pytest.raises(UserError, match=rf"recipe\.data\.train=rows\.jsonl: row 2 has {says}.*remove"):
        read([GOOD_ROW, wrong])


@pytest.mark.parametrize(("wrong", "says"), [
    ({"chosen": [USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, "differ before the last message"),
    ({"chosen": [USER, GOOD], "rejected": [USER, BAD, USER]}, "does not end with a message of the assistant"),
    ({"chosen": [GOOD], "rejected": [BAD]}, "begins with a message of the assistant"),
    ({"chosen": [USER, GOOD], "rejected": []}, "has no list of messages"),
])  # fmt: skip
def test_wrong_conversations(wrong: dict[str, Any], says: str, here: Path) -> None:
    with pytest.raises(UserError, match=f"row 2 .*{says}"):
        read([{"chosen": [USER, GOOD], "rejected": [USER, BAD]}, wrong])


def test_missing_columns(here: Path) -> None:
    with pytest.raises(UserError, match=r"no column 'rejected'"):
        read([{"chosen": "There."}])
    write_rows(Path("asked.jsonl"), [{"prompt": "Where?", "chosen": "There."}])
    assert not PreferenceFiles().read_evaluation("asked.jsonl").eval.compared
