"""Conversations, or prompts and completions, from local files or from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recipes.sources.rows import Rows, check_columns
from recipes.sources.source import Part, Source
from recipes.tasks.chat import ASSISTANT, Chats, Conversations
from runner.errors import UserError

_ROLES = ("system", "developer", "user", ASSISTANT, "tool")


@dataclass(frozen=True)
class ConversationFiles(Source):
    """Rows with a list of messages, or else with a prompt and its completion.

    `messages_column`: of lists of {"role": …, "content": …}. `prompt_column`, `completion_column`: of texts.
    """

    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"

    unit: ClassVar[str] = "conversation"

    def read(self) -> Conversations:
        """Read and check the data. Raises UserError, Unavailable."""
        self.check_both()
        train, evaluation = self._chats("train"), self._chats("eval")
        return Conversations(train, evaluation, self.described("train", "eval"), self.notes)

    def read_evaluation(self, file: str | None = None) -> Conversations:
        """The evaluation set, or `file`, whose rows need no answers, and no training set."""
        return Conversations(Chats([]), self._chats("eval", file), file or self.described("eval"))

    def _chats(self, part: Part, file: str | None = None) -> Chats:
        answered = file is None
        rows = self.rows(part, file)
        columns = self._columns(rows, answered)
        dataset = rows.dataset.select_columns(list(columns)).rename_columns(columns)
        numbers = list(rows.numbers)
        if answered and len(chosen := self.chosen(part, len(rows))) < len(rows):
            dataset, numbers = dataset.select(chosen), [numbers[row] for row in chosen]
        if not len(dataset):
            raise UserError(f"{rows.setting} has no rows: give a file with conversations")
        for number, row in zip(numbers, dataset, strict=True):
            if (wrong := self._wrong(row, answered)) is not None:
                raise UserError(f"{rows.where} {number} {wrong}")
        return Chats(dataset, rows.where, numbers, answered)

    def _columns(self, rows: Rows, answered: bool) -> dict[str, str]:
        """The columns in use, and what they are called from here on."""
        if self.messages_column in rows.names:
            return {self.messages_column: "messages"}
        if self.prompt_column not in rows.names:
            raise UserError(
                f"{rows.setting} has neither a column '{self.messages_column}' nor '{self.prompt_column}', but "
                f"{', '.join(rows.names)}: set recipe.data.messages_column, or prompt_column and completion_column"
            )
        columns = {self.prompt_column: "prompt"}
        if answered or self.completion_column in rows.names:
            check_columns(rows, [self.completion_column])
            columns[self.completion_column] = "completion"
        return columns

    def _wrong(self, row: Mapping[str, Any], answered: bool) -> str | None:
        """What is wrong with a row, in words. `answered`: whether there has to be something to learn."""
        if "messages" in row:
            return _wrong_messages(row["messages"], self.messages_column, answered)
        columns = {"prompt": self.prompt_column, **({"completion": self.completion_column} if answered else {})}
        for name, column in columns.items():
            if not isinstance(row[name], str) or not row[name].strip():
                return f"has no text in '{column}'"
        return None


def _wrong_messages(messages: Any, column: str, answered: bool) -> str | None:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return f"has no list of messages, each with 'role' and 'content', in '{column}'"
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            return f"has the role '{role}' in message {number}: use one of {', '.join(_ROLES)}"
        empty = not isinstance(content, str) or (role == ASSISTANT and not content.strip())
        if empty and not message.get("tool_calls"):
            return f"has a message without a text as 'content' (message {number}): give it one, or remove it"
    if messages[0]["role"] == ASSISTANT:
        return "begins with a message of the assistant, so that it answers nothing: put the user's before it"
    if answered and all(message["role"] != ASSISTANT for message in messages):
        return "has no message of the assistant, so there is nothing to learn: remove it"
    return None
