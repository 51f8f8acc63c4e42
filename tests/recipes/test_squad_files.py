"""SQuAD's JSON: what is read, in which order, and what each mistake in a file is answered with."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.sources.squad_files import Question, QuestionCorpus, SquadData
from runner.errors import Unavailable, UserError
from tests.recipes import zoo


def read(folder: Path, train: Any = None, **settings: Any) -> QuestionCorpus:
    files = zoo.write(folder)
    if train is not None:
        files[0].write_text(train if isinstance(train, str) else json.dumps(train))
    return SquadData(str(files[0]), str(files[1]), **settings).read()


def test_paragraphs_and_questions_in_their_order(tmp_path: Path) -> None:
    """Every question with its paragraph's number, its answers and their places; a paragraph is kept once."""
    corpus = read(tmp_path)
    assert (len(corpus.train), len(corpus.train.contexts), len(corpus.eval)) == (40, 20, 12)
    context = corpus.train.contexts[1]
    answers = (("the reed bed", context.index("the reed bed")), ("reed bed", context.index("reed bed")))
    assert corpus.train.questions[2] == Question("where-1", "Where does the heron live?", 1, answers)


def test_one_paragraph_under_two_articles_is_one(tmp_path: Path) -> None:
    """Equal paragraphs share a number, wherever they stand."""
    content = zoo.content(0, 2)
    again = copy.deepcopy(content["data"][0])
    for one in again["paragraphs"]:
        for asked in one["qas"]:
            asked["id"] += "-again"
    content["data"].append(again)
    corpus = read(tmp_path, content)
    assert [question.context for question in corpus.train.questions] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert len(corpus.train.contexts) == 2


def test_first_questions_only(tmp_path: Path) -> None:
    """Limits count questions, and take paragraphs along that are asked about; more than there are is all."""
    corpus = read(tmp_path, max_train_samples=3, max_eval_samples=100)
    assert [question.id for question in corpus.train.questions] == ["where-0", "when-0", "where-1"]
    assert len(corpus.train.contexts) == 2
    assert len(corpus.eval) == 12


def test_digest_follows_everything(tmp_path: Path) -> None:
    """A changed answer, question, paragraph, limit or order gives another digest; the file's spaces do not."""

    def changed(change: Callable[[list[Any]], Any]) -> str:
        content = zoo.content(0, 20)
        change(content["data"][0]["paragraphs"])
        return read(tmp_path, content).digest

    digests = [
        changed(lambda paragraphs: None),
        changed(lambda paragraphs: paragraphs[0]["qas"][0]["answers"].pop()),
        changed(lambda paragraphs: paragraphs[0]["qas"][0].update(question="Where?")),
        changed(lambda paragraphs: paragraphs[0].update(context=paragraphs[0]["context"] + " ")),
        changed(lambda paragraphs: paragraphs.reverse()),
        read(tmp_path, max_train_samples=39).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert read(tmp_path, json.dumps(zoo.content(0, 20), indent=3)).digest == digests[0]


def edited(**changes: Any) -> dict[str, Any]:
    """A file whose second question is changed; a value of None takes the key away."""
    content = zoo.content(0, 2)
    asked = content["data"][0]["paragraphs"][0]["qas"][1]
    for key, value in changes.items():
        if value is None:
            del asked[key]
        else:
            asked[key] = value
    return content


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "the file has no list 'data'"),
        ({"data": {}}, "the file has no list 'data'"),
        ({"data": []}, "has no question"),
        ({"data": [7]}, r"data\[0\] has no list 'paragraphs'"),
        ({"data": [{"paragraphs": [{"context": "A."}]}]}, r"paragraphs\[0\] has no list 'qas'"),
        ({"data": [{"paragraphs": [{"qas": [{"answers": []}]}]}]}, "no text under 'id'"),
        (edited(answers=None), r"qas\[1\] has no list 'answers'"),
        (edited(answers=[]), "without an answer, such as 'when-0'"),
        (edited(answers=["day"]), "without 'text' or 'answer_start'"),
        (edited(answers=[{"text": "day"}]), "without 'text' or 'answer_start'"),
        (edited(answers=[{"text": "day", "answer_start": "9"}]), "without 'text' or 'answer_start'"),
        (edited(answers=[{"text": "night", "answer_start": 3}]), "'night' where its paragraph reads otherwise"),
        (edited(answers=[{"text": "day", "answer_start": 10**6}]), "reads otherwise"),
        (edited(answers=[{"text": "of", "answer_start": -6}]), "without 'text' or 'answer_start'"),
        (edited(answers=[{"text": "T", "answer_start": True}]), "without 'text' or 'answer_start'"),
        (edited(answers=[{"text": " ", "answer_start": 4}]), "without 'text' or 'answer_start'"),
        (edited(question=" "), "no text under 'question'"),
        (edited(question="Half \ud800 a pair?"), "no text under 'question'"),
        ("[" * 100_000, "nested too deeply"),
        (edited(question=None), "no text under 'question'"),
        (edited(id=7), "no text under 'id'"),
        (edited(id="where-0"), "the id 'where-0' of an earlier question"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, train: Any, message: str) -> None:
    """Each is one sentence that names the file and the place in it."""
    with pytest.raises(UserError, match=message) as refusal:
        read(tmp_path, train)
    assert str(refusal.value).startswith(f"recipe.data.train={tmp_path}")
    assert "\n" not in str(refusal.value)


def test_mistakes_in_settings(tmp_path: Path) -> None:
    """A missing file, a folder, one file of two, other bytes, and no questions at all."""
    train, evaluation = map(str, zoo.write(tmp_path))
    (tmp_path / "latin.json").write_bytes('{"data": "é"}'.encode("latin-1"))
    for name, message in (("nowhere.json", "does not exist"), (".", "is a folder"), ("latin.json", "not UTF-8")):
        with pytest.raises(UserError, match=message):
            SquadData(str(tmp_path / name), evaluation).read()
    with pytest.raises(UserError, match=r"recipe\.data\.train is given and recipe\.data\.eval is not"):
        SquadData(train, None).read()
    with pytest.raises(UserError, match=r"recipe\.data\.max_eval_samples=0 cannot be"):
        SquadData(train, evaluation, max_eval_samples=0)


def test_without_files_and_hub() -> None:
    """Offline, the Hub's copy is not available; its size is known all the same, up to the limits."""
    of = "rajpurkar/squad (train, validation)"
    known = SquadData(hub_name="rajpurkar/squad", hub_samples_of=of, hub_train_samples=87599, hub_eval_samples=10570)
    source = dataclasses.replace(known, max_train_samples=4000)
    with pytest.raises(Unavailable, match=r"there are no training data: give local files"):
        source.read()
    assert source.expected_sizes() == (4000, 10570, "the size of rajpurkar/squad (train, validation) on the Hub")
    for other in ({"hub_name": "someone/other"}, {"hub_name": None}, {"hub_train": "validation"}, {"train": "a.json"}):
        assert dataclasses.replace(known, **other).expected_sizes() is None
    with pytest.raises(UserError, match="there are no training data"):
        SquadData().read()


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([{"text": "red", "answer_start": 4}], None),
        ({"text": ["red"], "answer_start": [4]}, None),
        ({"text": ["red"], "answer_start": []}, "no equally long lists"),
        ({"text": ["red"]}, "no equally long lists"),
        (None, "no equally long lists"),
        ([None], "an answer without 'text'"),
        ([], "questions without an answer"),
    ],
)
def test_answers_of_the_hub(tmp_path: Path, answers: Any, why: str | None) -> None:
    """Either form is read, a list of answers or two lists; anything else is one sentence that names the row."""
    row = {"id": "1", "context": "It's red.", "question": "Which?", "answers": answers}
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "context": "Its red."}))
    source = SquadData(hub_name=str(tmp_path))
    if why is None:
        assert source.read().train.questions[0].answers == (("red", 4),)
    else:
        with pytest.raises(UserError, match=why):
            source.read()


def test_data_set_with_a_script(tmp_path: Path) -> None:
    """A data set that can only be read by running its own code is not read, and why is said in a sentence."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "old.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(UserError, match="old cannot be loaded: Dataset scripts are no longer supported"):
        SquadData(hub_name=str(folder)).read()


def test_hub_form(tmp_path: Path) -> None:
    """A data set in the Hub's form, read from a local folder, gives what SQuAD's file gives."""
    hub, files = tmp_path / "hub", tmp_path / "files"
    hub.mkdir()
    files.mkdir()
    parts = {"train": zoo.content(0, 20), "validation": zoo.content(20, 6)}
    for name, content in parts.items():
        rows = [
            {
                "id": asked["id"],
                "context": one["context"],
                "question": asked["question"],
                "answers": {key: [answer[key] for answer in asked["answers"]] for key in ("text", "answer_start")},
            }
            for one in content["data"][0]["paragraphs"]
            for asked in one["qas"]
        ]
        (hub / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = SquadData(hub_name=str(hub)).read()
    assert corpus.digest == read(files).digest
    with pytest.raises(UserError, match="no part 'dev' on the Hub"):
        SquadData(hub_name=str(hub), hub_eval="dev").read()
