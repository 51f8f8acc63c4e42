"""SQuAD's JSON and the Hub's form of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.sources.squad_files import SquadData
from recipes.tasks.question_answering import Question, QuestionCorpus
from runner.errors import UserError
from tests.recipes import zoo


def read(folder: Path, train: Any = None, **settings: Any) -> QuestionCorpus:
    files = zoo.write(folder)
    if train is not None:
        files[0].write_text(train if isinstance(train, str) else json.dumps(train))
    return SquadData(str(files[0]), str(files[1]), **settings).read()


def test_paragraphs_and_questions(tmp_path: Path) -> None:
    """Every question with its paragraph and answers, in order; equal paragraphs are kept once."""
    corpus = read(tmp_path)
    assert (len(corpus.train), len(corpus.train.contexts), len(corpus.eval)) == (40, 20, 12)
    context = corpus.train.contexts[1]
    answers = (("the reed bed", context.index("the reed bed")), ("reed bed", context.index("reed bed")))
    assert corpus.train.questions[2] == Question("where-1", "Where does the heron live?", 1, answers)
    content = zoo.content(0, 2)
    again = copy.deepcopy(content["data"][0])
    for one in again["paragraphs"]:
        for asked in one["qas"]:
            asked["id"] += "-again"
    content["data"].append(again)
    assert [question.context for question in read(tmp_path, content).train.questions] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_patterns(tmp_path: Path) -> None:
    """The articles of all files, in the order of their names."""
    for number in (2, 1):
        (tmp_path / f"part-{number}.json").write_text(json.dumps(zoo.content(10 * number, 5)))
    evaluation = zoo.write(tmp_path)[1]
    questions = SquadData(str(tmp_path / "part-*.json"), str(evaluation)).read().train.questions
    one = SquadData(str(tmp_path / "part-1.json"), str(evaluation)).read().train.questions
    assert len(questions) == 2 * len(one)
    assert questions[: len(one)] == one


def test_random_questions_only(tmp_path: Path) -> None:
    """In their order, with no other paragraphs than theirs."""
    every = read(tmp_path).train
    kept = read(tmp_path, max_train_samples=3, max_eval_samples=100).train
    contexts = {question.id: every.contexts[question.context] for question in every.questions}
    ids = [question.id for question in kept.questions]
    assert ids == [id_ for id_ in contexts if id_ in ids]
    assert [kept.contexts[question.context] for question in kept.questions] == [contexts[id_] for id_ in ids]
    assert len(kept) == 3
    assert set(kept.contexts) == {contexts[id_] for id_ in ids}


def test_digest_follows_everything(tmp_path: Path) -> None:
    def changed(change: Callable[[list[Any]], Any]) -> str:
        content = zoo.content(0, 20)
        change(content["data"][0]["paragraphs"])
        return read(tmp_path, content).digest

    digests = [
        changed(lambda paragraphs: None),
        changed(lambda paragraphs: paragraphs[0]["qas"][0]["answers"].pop()),
        changed(lambda paragraphs: paragraphs[0]["qas"][0].update(question="Where?")),
        changed(lambda paragraphs: paragraphs[0].update(context=paragraphs[0]["context"] + " ")),
    ]
    assert len(set(digests)) == len(digests)
    assert read(tmp_path, json.dumps(zoo.content(0, 20), indent=3)).digest == digests[0]


def edited(**changes: Any) -> dict[str, Any]:
    content = zoo.content(0, 2)
    content["data"][0]["paragraphs"][0]["qas"][1].update(changes)
    return content


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "SQuAD 1.1"),
        ({"data": []}, "contains no question"),
        ({"data": [{"paragraphs": [{"context": "A."}]}]}, "'qas'"),
        (edited(answers=[]), "'when-0' has no answer"),
        (edited(answers=[{"text": "day"}]), "'answer_start'"),
        (edited(answers=[{"text": "night", "answer_start": 3}]), "'night'"),
        (edited(answers=[{"text": "of", "answer_start": -6}]), "'answer_start'"),
        (edited(question=" "), "'question'"),
        (edited(question="wh\0ere"), "has NUL characters (a damaged file?) as 'question'"),
        (edited(id="where-0"), "'where-0' occurs twice"),
    ],
)
def test_malformed_files(tmp_path: Path, train: Any, words: str) -> None:
    """One sentence that names the file and what is wrong."""
    with pytest.raises(UserError) as caught:
        read(tmp_path, train)
    assert str(caught.value).startswith(f"recipe.data.train={tmp_path}")
    assert words in str(caught.value)


@pytest.mark.parametrize("as_columns", [True, False])
def test_hub_form(tmp_path: Path, as_columns: bool) -> None:
    """A data set in the Hub's form, answers as columns or as rows, equals SQuAD's file."""
    hub = tmp_path / "hub"
    hub.mkdir()
    for name, content in {"train": zoo.content(0, 20), "validation": zoo.content(20, 6)}.items():
        rows = []
        for one in content["data"][0]["paragraphs"]:
            for asked in one["qas"]:
                columns = {key: [answer[key] for answer in asked["answers"]] for key in ("text", "answer_start")}
                rows.append(
                    {**asked, "context": one["context"], "answers": columns if as_columns else asked["answers"]}
                )
        (hub / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert SquadData(hub_name=str(hub)).read().digest == read(tmp_path).digest
