"""Conversations, or prompts and completions, from local files or from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from recipes.sources.rows import Rows, check_columns
from recipes.sources.source import Part, Source, wrong_text
from recipes.tasks.chat import ASSISTANT, Chats, Conversations
from runner.errors import UserError

_ROLES = ("system", "developer", "user", ASSISTANT, "tool")

#: Columns of other forms of conversations, and ShareGPT's roles -> what they are called here.
_SHAREGPT_COLUMN, _SHAREGPT_ROLES = "conversations", {"human": "user", "gpt": ASSISTANT}
_ALPACA_COLUMNS = ("instruction", "input", "output")


@dataclass(frozen=True)
class ConversationFiles(Source):
    """Rows with a list of messages, with a prompt and its completion, or with an instruction and its output.

    `messages_column`: of lists of {"role": …, "content": …}, or ShareGPT's {"from": …, "value": …}; without that column
    `conversations`. `prompt_column`, `completion_column`: of texts. Without any of these Alpaca's columns:
    `instruction`, `input` (which may be missing) and `output`.
    """

    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"

    unit: ClassVar[str] = "conversation"

    def read(self) -> Conversations:
        """Read and check the data. Raises UserError, Unavailable."""
        self.check_both()
        train, evaluation = self._chats("train"), self._chats("eval")
        leak = self.leak(train.samples(), evaluation.samples())
        return Conversations(train, evaluation, self.described("train", "eval"), notes=(*leak, *train.notes))

    def read_evaluation(self, file: str | None = None) -> Conversations:
        """The evaluation set, or `file`, whose rows need no answers, and no training set."""
        return Conversations(Chats([]), self._chats("eval", file), file or self.described("eval"))

    def _chats(self, part: Part, file: str | None = None) -> Chats:
        answered = file is None
        rows = self.rows(part, file)
        columns = self._columns(rows, answered)
        dataset = rows.dataset.select_columns(list(columns)).rename_columns(columns)
        if "prompt" not in columns.values():
            dataset = dataset.with_transform(_from_sharegpt if "messages" in columns.values() else _from_alpaca)
        numbers = list(rows.numbers)
        if answered and len(chosen := self.chosen(part, len(rows))) < len(rows):
            dataset, numbers = dataset.select(chosen), [numbers[row] for row in chosen]
        if not len(dataset):
            raise UserError(f"{rows.setting} has no rows: give a file with conversations")
        for number, row in zip(numbers, dataset, strict=True):
            if (wrong := _wrong(row, columns, answered)) is not None:
                raise UserError(f"{rows.where} {number} {wrong}")
        unread = [name for name in rows.names if name not in columns]
        notes = (f"columns that are not read: {', '.join(unread)}",) if unread else ()
        return Chats(dataset, rows.where, numbers, answered, notes)

    def _columns(self, rows: Rows, answered: bool) -> dict[str, str]:
        """The columns in use, and what they are called from here on."""
        if self.messages_column in rows.names:
            return {self.messages_column: "messages"}
        if self.prompt_column in rows.names:
            columns = {self.prompt_column: "prompt"}
            if answered or self.completion_column in rows.names:
                check_columns(rows, [self.completion_column])
                columns[self.completion_column] = "completion"
            return columns
        if _SHAREGPT_COLUMN in rows.names:
            return {_SHAREGPT_COLUMN: "messages"}
        if _ALPACA_COLUMNS[0] in rows.names:
            check_columns(rows, ["output"] if answered else [])
            return {name: name for name in _ALPACA_COLUMNS if name in rows.names}
        raise UserError(
            f"{rows.setting} has neither a column '{self.messages_column}' nor '{self.prompt_column}', but "
            f"{', '.join(rows.names)}: set recipe.data.messages_column, or prompt_column and completion_column"
        )


def _wrong(row: Mapping[str, Any], columns: Mapping[str, str], answered: bool) -> str | None:
    """What is wrong with a row, in words. `columns`: in the file; `answered`: whether there has to be an answer."""
    if "messages" in row:
        return wrong_messages(row["messages"], next(iter(columns)), answered)
    for column, name in columns.items():
        if (answered or name == "prompt") and (wrong := wrong_text(row[name])) is not None:
            return f"has {wrong} in '{column}'"
    return None


def _from_sharegpt(rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The column `messages` with roles and contents. Anything malformed stays, to be refused by its row."""

    def message(one: Any) -> Any:
        if not isinstance(one, dict) or "from" not in one:
            return one
        return {"role": _SHAREGPT_ROLES.get(one["from"], one["from"]), "content": one.get("value")}

    return {"messages": [list(map(message, row)) if isinstance(row, list) else row for row in rows["messages"]]}


def _from_alpaca(rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Conversations of an instruction, with its input after a blank line, and the output."""
    messages = []
    for place, instruction in enumerate(rows["instruction"]):
        more = rows["input"][place] if "input" in rows else None
        text = f"{instruction}\n\n{more}" if instruction and more else instruction
        messages.append([{"role": "user", "content": text}])
        if "output" in rows:
            messages[-1].append({"role": ASSISTANT, "content": rows["output"][place]})
    return {"messages": messages}


def wrong_messages(messages: Any, column: str, answered: bool) -> str | None:
    """What is wrong with a conversation, after "has" or as a verb; None if it can be trained on."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return f"has no list of messages, each with 'role' and 'content', in '{column}'"
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            return f"has the role '{role}' in message {number}: use one of {', '.join(_ROLES)}"
        empty = not isinstance(content, str) or (role == ASSISTANT and not content.strip())
        if empty and not message.get("tool_calls"):
            return f"has a message without a text as 'content' (message {number}): give it one, or remove it"
        if content and (wrong := wrong_text(content, blank=True)) is not None:
            return f"has {wrong} in message {number}"
    if messages[0]["role"] == ASSISTANT:
        return "begins with a message of the assistant, so that it answers nothing: put the user's before it"
    if answered and all(message["role"] != ASSISTANT for message in messages):
        return "has no message of the assistant, so there is nothing to learn: remove it"
    return None
