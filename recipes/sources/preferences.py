"""Pairs of answers, one of which was preferred, from local files or from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recipes.sources.conversations import wrong_messages
from recipes.sources.rows import check_columns
from recipes.sources.source import Part, Source, wrong_text
from recipes.tasks.chat import ASSISTANT, Chats
from recipes.tasks.preference import Pairs, Preferences
from runner.errors import UserError


@dataclass(frozen=True)
class PreferenceFiles(Source):
    """Rows with a prompt and two answers to it: texts, or lists of messages, each {"role": …, "content": …}.

    `prompt_column` may be missing. `chosen_column`, `rejected_column`: texts that continue the prompt; or messages that
    do, or whole conversations, which begin with the same messages and end with the assistant's answer.
    """

    prompt_column: str = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"

    unit: ClassVar[str] = "pair"

    def read(self) -> Preferences:
        """Read and check the data. Raises UserError, Unavailable."""
        self.check_both()
        train, evaluation = self._pairs("train"), self._pairs("eval")
        leak = self.leak(train.samples(), evaluation.samples())
        return Preferences(train, evaluation, self.described("train", "eval"), notes=(*leak, *train.notes))

    def read_evaluation(self, file: str | None = None) -> Preferences:
        """The evaluation set, or `file`, whose rows need no rejected answers, and no training set."""
        nothing = Pairs(Chats([]), Chats([]))
        return Preferences(nothing, self._pairs("eval", file), file or self.described("eval"))

    def _pairs(self, part: Part, file: str | None = None) -> Pairs:
        rows = self.rows(part, file)
        compared = file is None or self.rejected_column in rows.names
        columns = [self.chosen_column, *([self.rejected_column] if compared else [])]
        check_columns(rows, columns)
        if not len(rows):
            raise UserError(f"{rows.setting} has no rows: give a file with pairs of answers")
        chosen = self.chosen(part, len(rows)) if file is None else range(len(rows))
        numbers = [rows.numbers[row] for row in chosen]
        answers: list[list[dict[str, Any]]] = [[] for _ in columns]
        for number, row in zip(numbers, rows.dataset.select(chosen), strict=True):
            try:
                for found, column in zip(answers, columns, strict=True):
                    found.append(self._answered(row, column))
                if compared:
                    _check_pair(answers[0][-1], answers[1][-1])
            except _Refused as error:
                raise UserError(f"{rows.where} {number} {error}") from error
        unread = [name for name in rows.names if name not in (self.prompt_column, *columns)]
        notes = (f"columns that are not read: {', '.join(unread)}",) if unread else ()
        both = [Chats(found, rows.where, numbers) for found in answers]
        return Pairs(both[0], both[-1], compared, notes)

    def _answered(self, row: Mapping[str, Any], column: str) -> dict[str, Any]:
        """The prompt with one answer, as a row of `Chats`."""
        prompt, answer = row.get(self.prompt_column), row[column]
        if isinstance(answer, list):
            if answer and isinstance(answer[0], dict) and answer[0].get("role") == ASSISTANT:
                answer = [
                    *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []),
                    *answer,
                ]
            if (wrong := wrong_messages(answer, column, answered=True)) is not None:
                raise _Refused(wrong)
            if answer[-1]["role"] != ASSISTANT:
                raise _Refused(f"does not end with a message of the assistant in '{column}': add it, or remove the row")
            return {"messages": answer}
        if isinstance(prompt, list):
            raise _Refused(f"has messages in '{self.prompt_column}', but not in '{column}': give messages in both")
        for name, text in ((self.prompt_column, prompt), (column, answer)):
            if (name == column or self.prompt_column in row) and (wrong := wrong_text(text)) is not None:
                raise _Refused(f"has {wrong} in '{name}': give it one, or remove the row")
        return {"prompt": prompt or "", "completion": answer}


def _check_pair(chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> None:
    """Check that only the answers differ."""
    if chosen == rejected:
        raise _Refused("has the same chosen and rejected answer, so there is nothing to learn: remove it")
    if chosen.keys() != rejected.keys():
        raise _Refused("has a text as one answer and messages as the other: give two of a kind")
    if "messages" in chosen and chosen["messages"][:-1] != rejected["messages"][:-1]:
        raise _Refused("has conversations that differ before the last message: give two answers to the same messages")


class _Refused(Exception):
    """What is wrong with a row, to follow its number."""
