"""Conversations and prompts from files: columns, subsets, and what is wrong with a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.sources.conversations import ConversationFiles
from recipes.tasks.chat import Chats
from runner.errors import UserError
from tests.recipes.writers import chats, write_rows

USER, ANSWER = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}


def rows_of(part: Chats) -> list[Any]:
    return [dict(row) for row in part.rows]


def test_any_name_of_the_column(tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER, USER, ANSWER]}]
    file = str(write_rows(tmp_path / "a.jsonl", [{"id": 1, "chat": row["messages"]} for row in rows]))
    assert rows_of(ConversationFiles(file, file, messages_column="chat").read().train) == rows


def test_prompts_and_completions(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer,id\nWhere?,Here.,1\nWhen?,Now.,2\n")
    columns = {"prompt_column": "question", "completion_column": "answer"}
    found = ConversationFiles(*2 * [str(tmp_path / "a.csv")], **columns).read()  # type: ignore[arg-type]
    rows = [{"prompt": "Where?", "completion": "Here."}, {"prompt": "When?", "completion": "Now."}]
    assert rows_of(found.train) == rows_of(found.eval) == rows
    assert len(found.notes) == 2  # evaluated on the training data; a column that is not read
    (tmp_path / "b.csv").write_text("question\nWhere?\n")
    asked = ConversationFiles(**columns).read_evaluation(str(tmp_path / "b.csv"))  # type: ignore[arg-type]
    assert (rows_of(asked.eval), asked.eval.answered, len(asked.train)) == ([{"prompt": "Where?"}], False, 0)


def test_sharegpt_and_alpaca(tmp_path: Path) -> None:
    """The same conversations in other forms; a column that is not read is named."""
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER, USER, ANSWER]}]
    roles = {"user": "human", "assistant": "gpt"}
    sharegpt = [
        {"id": "x", "conversations": [{"from": roles[one["role"]], "value": one["content"]} for one in row["messages"]]}
        for row in rows
    ]
    found = ConversationFiles(*2 * [str(write_rows(tmp_path / "a.jsonl", sharegpt))]).read()
    assert rows_of(found.train) == rows
    assert found.digest == ConversationFiles(*2 * [str(write_rows(tmp_path / "b.jsonl", rows))]).read().digest
    assert found.notes[1:] == ("columns that are not read: id",)
    alpaca = [
        {"instruction": "Translate.", "input": "Wo?", "output": "Where?"},
        {"instruction": "Greet.", "input": "", "output": "Hi."},
    ]
    file = str(write_rows(tmp_path / "c.jsonl", alpaca))
    found = ConversationFiles(file, file).read()
    asked = ["Translate.\n\nWo?", "Greet."]
    assert [[one["content"] for one in row["messages"]] for row in found.train.rows] == [
        [question, row["output"]] for question, row in zip(asked, alpaca, strict=True)
    ]
    assert found.train.rows[0]["messages"][1]["role"] == "assistant"  # type: ignore[index]  # a Dataset
    named = ConversationFiles(file, file, prompt_column="instruction", completion_column="output").read()
    assert "input" in named.notes[1]
    only = str(write_rows(tmp_path / "d.jsonl", [{"instruction": "Greet."}]))
    assert rows_of(ConversationFiles().read_evaluation(only).eval)[0]["messages"] == [
        {"role": "user", "content": "Greet."}
    ]


def test_subsets_keep_the_numbers_of_rows(tmp_path: Path) -> None:
    files = [str(write_rows(tmp_path / "a.jsonl", chats(20)))] * 2
    part = ConversationFiles(*files, max_train_samples=5).read().train
    assert [chats(20)[number - 1] for number in part.numbers] == rows_of(part)
    assert len(part) == 5


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": [USER]}, "row 2 has no message of the assistant"),
        ({"messages": [ANSWER, USER, ANSWER]}, "row 2 begins with a message of the assistant"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, "message 1"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "message 2"),
        ({"messages": [{"role": "human", "content": "Where?"}, ANSWER]}, "the role 'human' in message 1"),
        ({"conversations": [{"from": "bing", "value": "Where?"}]}, "the role 'bing' in message 1"),
        ({"conversations": [{"from": "human"}]}, "row 2 has a message without a text"),
        ({"conversations": None}, "row 2 has no list of messages, each with 'role' and 'content', in 'conversations'"),
        ({"instruction": "Greet.", "output": None}, "row 2 has a message without a text as 'content' (message 2)"),
        ({"instruction": "Greet."}, "no column 'output'"),
        ({"messages": []}, "row 2 has no list of messages"),
        ({"messages": None}, "row 2 has no list of messages"),
        ({"prompt": "Where?", "completion": " "}, "row 2 has no text in 'completion'"),
        ({"prompt": "", "completion": "Here."}, "row 2 has no text in 'prompt'"),
        ({"prompt": "Wh\0ere?", "completion": "Here."}, "row 2 has NUL characters"),
        ({"messages": [{"role": "user", "content": "Wh\0ere?"}, ANSWER]}, "row 2 has NUL characters"),
        ({"prompt": "Where?"}, "no column 'completion'"),
        ({"text": "Where?"}, "recipe.data.messages_column"),
    ],
)
def test_malformed_rows(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    right: dict[str, Any] = dict.fromkeys(row, "a text")
    if "messages" in row:
        right = {"messages": [USER, ANSWER]}
    elif "conversations" in row:
        right = {"conversations": [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "Here."}]}
    file = str(write_rows(tmp_path / "a.jsonl", [right, row]))
    with pytest.raises(UserError) as found:
        ConversationFiles(file, file).read()
    assert str(found.value).startswith(f"recipe.data.train={file}")
    assert named in str(found.value)


def test_messages_that_call_tools_need_no_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": "{}"}}]}
    rows = [{"messages": [USER, call, {"role": "tool", "content": "noon"}, ANSWER]}]
    file = str(write_rows(tmp_path / "a.jsonl", rows))
    assert len(ConversationFiles(file, file).read().train) == 1
