"""Questions about paragraphs, in SQuAD 1.1's JSON or from the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.sources.sources import expected_sizes, from_json, hub_parts, hub_words, is_text, local_files, read_text
from runner.errors import UserError, require


@dataclass(frozen=True)
class Question:
    """`context`: its number in the part's list. `answers`: (text, place of its first character in the context)."""

    id: str
    text: str
    context: int
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Paragraphs:
    """One part of a data set: paragraphs, each once, and the questions that they answer."""

    contexts: list[str]
    questions: list[Question]

    def __len__(self) -> int:
        return len(self.questions)

    def first(self, count: int | None) -> Paragraphs:
        """The first `count` questions, and the paragraphs up to the last one that is asked about."""
        if count is None or count >= len(self):
            return self
        questions = self.questions[:count]
        return Paragraphs(self.contexts[: 1 + max(question.context for question in questions)], questions)


@dataclass(frozen=True)
class QuestionCorpus:
    """Training and evaluation part. `source`: where they came from, in words."""

    train: Paragraphs
    eval: Paragraphs
    source: str

    @property
    def digest(self) -> str:
        """A hash over every paragraph, question and answer, in order."""
        digest = hashlib.sha256()
        for part in (self.train, self.eval):
            rows = [(one.id, one.text, one.context, one.answers) for one in part.questions]
            digest.update(json.dumps([part.contexts, rows]).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class SquadData:
    """Two local files in SQuAD 1.1's JSON, or a data set of the Hub with the same fields.

    `max_train_samples`, `max_eval_samples`: questions that are taken, from the first on; None for all. `hub_*_samples`:
    how many the data set `hub_samples_of` is known to have, for a plan without the data.
    """

    train: str | None = None
    eval: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    hub_name: str | None = None
    hub_train: str = "train"
    hub_eval: str = "validation"
    hub_samples_of: str | None = None
    hub_train_samples: int | None = None
    hub_eval_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_eval_samples", "hub_train_samples", "hub_eval_samples"):
            count, rule = getattr(self, name), "it must be at least 1 question, or null for all"
            require(count is None or count >= 1, f"recipe.data.{name}", count, rule)

    def read(self) -> QuestionCorpus:
        """Read and check the data. Raises UserError, and Unavailable where the Hub is needed and cannot be had."""
        files = local_files(self.train, self.eval, self.hub_name)
        if files is not None:
            train, evaluation = _read_file("train", files[0]), _read_file("eval", files[1])
            source = ", ".join(files)
        else:
            assert self.hub_name is not None
            train, evaluation = self._from_hub(self.hub_name)
            source = f"Hub: {self.hub_name}"
        return QuestionCorpus(train.first(self.max_train_samples), evaluation.first(self.max_eval_samples), source)

    def expected_sizes(self) -> tuple[int, int, str] | None:
        """Questions of both parts if the Hub's copy were here, and whose numbers these are; None if not known."""
        if self.train is not None or self.eval is not None:
            return None
        words = hub_words(self.hub_name, None, self.hub_train, self.hub_eval)
        known = (self.hub_train_samples, self.hub_eval_samples)
        limits = (self.max_train_samples, self.max_eval_samples)
        return expected_sizes(words, self.hub_samples_of, known, limits)

    def _from_hub(self, name: str) -> tuple[Paragraphs, Paragraphs]:
        parts = hub_parts(name, None, (self.hub_train, self.hub_eval), ("id", "context", "question", "answers"))
        setting = f"recipe.data.hub_name={name}"
        train, evaluation = (_collect(_hub_rows(part, setting), setting) for part in parts)
        return train, evaluation


#: A question as its source gives it: id, text, context, answers, and where it stands.
_Row = tuple[Any, Any, Any, Sequence[Mapping[str, Any]], str]


def _hub_rows(rows: Any, setting: str) -> Iterator[_Row]:
    for number, row in enumerate(rows):
        where = f"row {number}"
        found = _hub_answers(row["answers"], f"{setting} is malformed: {where}")
        yield row["id"], row["question"], row["context"], found, where


def _hub_answers(given: Any, refusal: str) -> list[Mapping[str, Any]]:
    """A list of answers, as in SQuAD's own files, or a list of texts and one of places, as in the Hub's copy."""
    if isinstance(given, list):
        return given
    texts, starts = (given.get("text"), given.get("answer_start")) if isinstance(given, dict) else (None, None)
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise UserError(f"{refusal} has no equally long lists 'text' and 'answer_start' under 'answers'")
    return [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]


def _read_file(part: str, name: str) -> Paragraphs:
    setting = f"recipe.data.{part}={name}"
    try:
        content = from_json(read_text(name, setting, "the JSON file"))
    except json.JSONDecodeError as error:
        raise UserError(f"{setting} is not JSON (line {error.lineno}: {error.msg}): give SQuAD's own file") from error
    return _collect(_file_rows(content, setting), setting)


def _file_rows(content: Any, setting: str) -> Iterator[_Row]:
    for a, article in enumerate(_list_under(content, "data", setting, "the file")):
        at = f"data[{a}]"
        for p, paragraph in enumerate(_list_under(article, "paragraphs", setting, at)):
            at = f"data[{a}].paragraphs[{p}]"
            for q, asked in enumerate(_list_under(paragraph, "qas", setting, at)):
                where = f"{at}.qas[{q}]"
                found = _list_under(asked, "answers", setting, where)
                yield asked.get("id"), asked.get("question"), paragraph.get("context"), found, where


def _list_under(node: Any, key: str, setting: str, where: str) -> list[Any]:
    value = node.get(key) if isinstance(node, dict) else None
    if not isinstance(value, list):
        raise UserError(f"{setting} is not in SQuAD 1.1's form: {where} has no list '{key}'")
    return value


def _collect(rows: Iterator[_Row], setting: str) -> Paragraphs:
    contexts: dict[str, int] = {}
    questions: dict[str, Question] = {}
    for id_, text, context, answers, where in rows:
        for name, value in (("id", id_), ("question", text), ("context", context)):
            if not is_text(value) or not value.strip():
                raise UserError(f"{setting} is malformed: {where} has no text under '{name}'")
        if id_ in questions:
            raise UserError(f"{setting} is malformed: {where} has the id '{id_}' of an earlier question")
        number = contexts.setdefault(context, len(contexts))
        found = tuple(_answer(answer, context, f"{setting} is malformed: question '{id_}'") for answer in answers)
        if not found:
            raise UserError(
                f"{setting} has questions without an answer, such as '{id_}': recipe=squad is SQuAD 1.1, in which "
                "every question has one; leave such questions out"
            )
        questions[id_] = Question(id_, text.strip(), number, found)
    if not questions:
        raise UserError(f"{setting} has no question: give a file with some")
    return Paragraphs(list(contexts), list(questions.values()))


def _answer(answer: Any, context: str, refusal: str) -> tuple[str, int]:
    text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
    if not isinstance(text, str) or not text.strip() or type(start) is not int or start < 0:
        raise UserError(f"{refusal} has an answer without 'text' or 'answer_start'")
    if context[start : start + len(text)] != text:
        raise UserError(f"{refusal} has the answer '{text[:40]}' where its paragraph reads otherwise (place {start})")
    return text, start
