"""Questions about paragraphs: SQuAD 1.1's JSON, or rows with the same fields from files or the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from recipes.sources.rows import check_columns, read_texts
from recipes.sources.source import Part, Source, wrong_text
from recipes.tasks.question_answering import Paragraphs, Question, QuestionCorpus
from runner.errors import UserError

#: A question as its source has it: id, question, context, answers.
_Row = tuple[Any, Any, Any, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class SquadData(Source):
    """Files in SQuAD 1.1's JSON, or rows with its fields: `id`, `question`, `context` and `answers`."""

    unit: ClassVar[str] = "question"

    def read(self) -> QuestionCorpus:
        """Read and check the data. Raises UserError, Unavailable."""
        self.check_both()
        train, evaluation = self._paragraphs("train"), self._paragraphs("eval")
        leak = self.leak(train.asked(), evaluation.asked())
        return QuestionCorpus(train, evaluation, self.described("train", "eval"), notes=leak)

    def read_evaluation(self, file: str | None = None) -> QuestionCorpus:
        """The evaluation set, or the questions of `file` without their answers, and no training set."""
        return QuestionCorpus(Paragraphs([], []), self._paragraphs("eval", file), file or self.described("eval"))

    def _paragraphs(self, part: Part, file: str | None = None) -> Paragraphs:
        answered = file is None
        found = self.file(part, file)
        if found is not None and found[0].lower().endswith(".json"):
            rows, setting = _articles(*found, answered), found[1]
        else:
            read = self.rows(part, file)
            check_columns(read, ["id", "question", "context", *["answers"] * answered])
            rows, setting = _rows(read.dataset, answered), read.setting
        questions = _collect(rows, setting, answered)
        return questions.select(self.chosen(part, len(questions))) if answered else questions


def _articles(name: str, setting: str, answered: bool) -> Iterator[_Row]:
    """The questions of files in SQuAD's own nested JSON."""
    try:
        articles = [article for text in read_texts(name, setting) for article in json.loads(text)["data"]]
        for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
            for asked in paragraph["qas"]:
                yield asked["id"], asked["question"], paragraph["context"], asked["answers"] if answered else ()
    except json.JSONDecodeError as error:
        raise UserError(f"{setting} is not JSON ({error}): give a file in SQuAD 1.1's format") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{setting} is not in SQuAD 1.1's format ({error!r}): compare it with SQuAD's file") from error


def _rows(rows: Iterable[Mapping[str, Any]], answered: bool) -> Iterator[_Row]:
    for row in rows:
        answers = row["answers"] if answered else ()
        if isinstance(answers, dict):  # columns, as in the Hub's copy of SQuAD
            pairs = zip(answers["text"], answers["answer_start"], strict=True)
            answers = [{"text": text, "answer_start": start} for text, start in pairs]
        yield row["id"], row["question"], row["context"], answers


def _collect(rows: Iterable[_Row], setting: str, answered: bool = True) -> Paragraphs:
    contexts: dict[str, int] = {}
    questions: dict[str, Question] = {}
    for id_, text, context, answers in rows:
        where = f"{setting} is malformed: question '{id_}'"
        for name, value in (("id", id_), ("question", text), ("context", context)):
            if (wrong := wrong_text(value)) is not None:
                raise UserError(f"{where} has {wrong} as '{name}'")
        if id_ in questions:
            raise UserError(f"{where} occurs twice")
        if answered and not answers:
            raise UserError(f"{where} has no answer: SQuAD 1.1 has one for every question; remove questions without")
        found = tuple(_answer(answer, context, where) for answer in answers)
        questions[id_] = Question(id_, text.strip(), contexts.setdefault(context, len(contexts)), found)
    if not questions:
        raise UserError(f"{setting} contains no question: give a file with questions")
    return Paragraphs(list(contexts), list(questions.values()))


def _answer(answer: Mapping[str, Any], context: str, where: str) -> tuple[str, int]:
    text, start = answer.get("text"), answer.get("answer_start")
    if not isinstance(text, str) or not text.strip() or type(start) is not int or start < 0:
        raise UserError(f"{where} has an answer without a 'text' and an 'answer_start' of at least 0")
    if context[start : start + len(text)] != text:
        raise UserError(f"{where} has the answer '{text[:40]}', which is not at answer_start={start} of its context")
    return text, start
