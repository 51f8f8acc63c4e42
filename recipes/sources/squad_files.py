"""Questions about paragraphs, in SQuAD 1.1's JSON or from the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.sources.files import check_subsets, evaluation_file, local_files, read_text, subset
from recipes.sources.hub import load_splits
from recipes.tasks.question_answering import Paragraphs, Question, QuestionCorpus
from runner.errors import UserError

#: A question as its source has it: id, question, context, answers.
_Row = tuple[Any, Any, Any, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class SquadData:
    """Two local files in SQuAD 1.1's JSON, or a data set of the Hub with the same fields.

    `max_train_samples`, `max_eval_samples`: keep a random subset of the questions in their order, which `subset_seed`
    determines; None for all.
    """

    train: str | None = None
    eval: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    subset_seed: int = 0
    hub_name: str | None = None
    hub_train: str = "train"
    hub_eval: str = "validation"

    def __post_init__(self) -> None:
        check_subsets(self, "question")

    def read(self) -> QuestionCorpus:
        """Read and check the data. Raises UserError, Unavailable."""
        files = local_files(self.train, self.eval, self.hub_name)
        if files is None:
            (train, evaluation), source = self._from_hub(self.hub_train, self.hub_eval), f"Hub: {self.hub_name}"
        else:
            train, evaluation = (
                _collect(_file_rows(name, setting), setting)
                for name, setting in zip(files, map("recipe.data.{}={}".format, ("train", "eval"), files), strict=True)
            )
            source = ", ".join(files)
        return QuestionCorpus(
            self._some(train, self.max_train_samples), self._some(evaluation, self.max_eval_samples), source
        )

    def read_evaluation(self, file: str | None = None) -> QuestionCorpus:
        """The evaluation set, or the questions of `file` without their answers, and no training set."""
        if file is not None:
            setting = f"--input={file}"
            evaluation, source = _collect(_file_rows(file, setting, answered=False), setting, answered=False), file
        elif (name := evaluation_file(self.eval, self.hub_name)) is not None:
            setting = f"recipe.data.eval={name}"
            evaluation = self._some(_collect(_file_rows(name, setting), setting), self.max_eval_samples)
            source = name
        else:
            (found,), source = self._from_hub(self.hub_eval), f"Hub: {self.hub_name}"
            evaluation = self._some(found, self.max_eval_samples)
        return QuestionCorpus(Paragraphs([], []), evaluation, source)

    def _some(self, part: Paragraphs, limit: int | None) -> Paragraphs:
        return part.select(subset(len(part), limit, self.subset_seed))

    def _from_hub(self, *splits: str) -> list[Paragraphs]:
        assert self.hub_name is not None
        found = load_splits(self.hub_name, None, splits, ("id", "question", "context", "answers"))
        return [_collect(_hub_rows(split), f"recipe.data.hub_name={self.hub_name}") for split in found]


def _file_rows(name: str, setting: str, answered: bool = True) -> Iterator[_Row]:
    try:
        for article in json.loads(read_text(name, setting))["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    yield asked["id"], asked["question"], paragraph["context"], asked["answers"] if answered else ()
    except json.JSONDecodeError as error:
        raise UserError(f"{setting} is not JSON ({error}): give a file in SQuAD 1.1's format") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{setting} is not in SQuAD 1.1's format ({error!r}): compare it with SQuAD's file") from error


def _hub_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[_Row]:
    for row in rows:
        answers = row["answers"]
        if isinstance(answers, dict):  # columns, as in the Hub's copy of SQuAD
            pairs = zip(answers["text"], answers["answer_start"], strict=True)
            answers = [{"text": text, "answer_start": start} for text, start in pairs]
        yield row["id"], row["question"], row["context"], answers


def _collect(rows: Iterable[_Row], setting: str, answered: bool = True) -> Paragraphs:
    contexts: dict[str, int] = {}
    questions: dict[str, Question] = {}
    for id_, text, context, answers in rows:
        where = f"{setting} is malformed: question '{id_}'"
        if not all(isinstance(value, str) and value.strip() for value in (id_, text, context)):
            raise UserError(f"{where} needs a text for 'id', 'question' and 'context'")
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
