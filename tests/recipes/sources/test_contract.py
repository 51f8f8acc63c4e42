"""What every source of data promises: formats, digests, random subsets, a part held out, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from recipes.sources.conversations import ConversationFiles
from recipes.sources.plain_text import PlainText
from recipes.sources.preferences import PreferenceFiles
from recipes.sources.source import Source
from recipes.sources.squad_files import SquadData
from recipes.sources.tagged_words import TaggedWords
from recipes.sources.text_files import TextFiles
from recipes.sources.text_pairs import TextPairFiles
from runner.errors import Unavailable, UserError
from tests.recipes import zoo
from tests.recipes.labelled import tagged
from tests.recipes.writers import chats, write_rows

Rows = list[dict[str, Any]]
TEXTS = [f"the text of row number {number}" for number in range(40)]


def questions() -> Rows:
    paragraphs = zoo.content(0, 20)["data"][0]["paragraphs"]
    return [{**asked, "context": one["context"]} for one in paragraphs for asked in one["qas"]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A source, forty different rows for it, and what a row's sample is known by in a set that was read."""

    source: Callable[..., Source]
    rows: Rows
    known: Callable[[Any], list[Any]]
    column: str


CASES = {
    "texts": Case(
        TextFiles,
        [{"text": text, "label": "ab"[row % 2]} for row, text in enumerate(TEXTS)],
        lambda part: part.texts,
        "text",
    ),
    "pairs": Case(
        TextPairFiles,
        [{"source": text, "target": text[-2:]} for text in TEXTS],
        lambda part: list(zip(part.sources, part.targets, strict=True)),
        "target",
    ),
    "documents": Case(PlainText, [{"text": text} for text in TEXTS], list, "text"),
    "words": Case(
        TaggedWords,
        [{"tokens": [*words, str(row)], "tags": [*tags, "O"]} for row, (words, tags) in enumerate(tagged(40, 0))],
        lambda part: [tuple(words) for words in part.words],
        "tokens",
    ),
    "chats": Case(
        ConversationFiles,
        [{"messages": [*chat["messages"], {"role": "user", "content": text}]}
         for chat, text in zip(chats(40), TEXTS, strict=True)],
        lambda part: [row["messages"][-1]["content"] for row in part.rows],
        "messages",
    ),
    "preferences": Case(
        PreferenceFiles,
        [{"prompt": text, "chosen": text[-2:], "rejected": "no"} for text in TEXTS],
        lambda part: [row["prompt"] for row in part.chosen.rows],
        "chosen",
    ),
    "questions": Case(SquadData, questions(), lambda part: [one.id for one in part.questions], "context"),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, here: Path) -> Case:
    """Its rows are in `all.jsonl`, its first four in `few.jsonl`."""
    found = CASES[request.param]
    write_rows(here / "all.jsonl", found.rows)
    write_rows(here / "few.jsonl", found.rows[:4])
    return found


def read(case: Case, train: str = "all.jsonl", evaluation: str | None = "few.jsonl", **settings: Any) -> Any:
    return case.source(**{"train": train, "eval": evaluation, **settings}).read()  # type: ignore[attr-defined]


def test_formats(case: Case, here: Path) -> None:
    """The same rows from JSON, Parquet, Arrow, a saved data set, several files and a data set of the Hub."""
    expected = read(case)
    assert case.known(expected.train) == case.known(read(case, "few.jsonl", "all.jsonl").eval)
    (here / "all.json").write_text(json.dumps(case.rows))
    rows = Dataset.from_list(case.rows)
    rows.to_parquet("all.parquet")
    rows.save_to_disk("saved")
    for part in (0, 1):
        rows.select(range(20 * part, 20 * part + 20)).to_parquet(f"part-{part}.parquet")
    names = ["all.parquet", "saved/*.arrow", "saved", "part-*.parquet"]
    if case.source is not SquadData:  # whose .json is SQuAD's own form
        names.append("all.json")
    assert {read(case, name).digest for name in names} == {expected.digest}
    (here / "hub").mkdir()
    rows.to_parquet("hub/train-00000-of-00001.parquet")
    rows.select(range(4)).to_parquet("hub/validation-00000-of-00001.parquet")
    hub = case.source(hub_name=str(here / "hub"))
    assert hub.read().digest == expected.digest  # type: ignore[attr-defined]
    assert hub.described("train", "eval") == f"Hub: {here / 'hub'}"
    with pytest.raises(UserError, match=r"recipe\.data\.hub_name=.*no split 'dev'"):
        case.source(hub_name=str(here / "hub"), hub_eval="dev").read()  # type: ignore[attr-defined]


def test_digests(case: Case) -> None:
    """They follow every row and the order of rows, in both sets, and not the file."""
    digests = [read(case).digest, read(case, "few.jsonl").digest, read(case, evaluation="all.jsonl").digest]
    write_rows(Path("other.jsonl"), [*case.rows[1:], case.rows[0]])
    digests.append(read(case, "other.jsonl").digest)
    write_rows(Path("other.jsonl"), case.rows)
    assert len({*digests, read(case, "other.jsonl").digest}) == len(digests) == 4


def test_subsets(case: Case) -> None:
    """Random rows in their order, the same every time; more rows include the fewer; another seed takes others."""
    every = case.known(read(case).train)

    def chosen(count: int, seed: int = 0) -> list[Any]:
        return case.known(read(case, max_train_samples=count, subset_seed=seed).train)

    ten = chosen(10)
    assert ten == chosen(10) == sorted(ten, key=every.index) != every[:10]
    assert len(ten) == 10
    assert set(ten) < set(chosen(20))
    assert chosen(10, seed=1) != ten
    assert chosen(99) == every


def test_a_share_is_held_out(case: Case) -> None:
    """Each row is in one part, in its order, and the source says so; both parts can be random subsets."""
    every = case.known(read(case).train)
    held_out: dict[str, Any] = {"evaluation": None, "eval_share": 0.25}
    found = read(case, **held_out)
    train, evaluation = case.known(found.train), case.known(found.eval)
    assert (len(train), len(evaluation)) == (30, 10)
    assert sorted(train + evaluation, key=every.index) == every
    assert train == sorted(train, key=every.index)
    assert case.known(read(case, **held_out, subset_seed=1).eval) != evaluation
    assert found.source == "all.jsonl, of which 25% are held out for evaluation"
    few = read(case, **held_out, max_train_samples=12, max_eval_samples=5)
    assert (len(few.train), len(few.eval)) == (12, 5)
    assert set(case.known(few.eval)) < set(evaluation)


def test_a_rare_class_stays_in_training(here: Path) -> None:
    rows = [{"text": text, "label": "rare" if row == 7 else "ab"[row % 2]} for row, text in enumerate(TEXTS)]
    write_rows(here / "rare.jsonl", rows)
    for seed in range(20):
        assert TEXTS[7] in TextFiles(train="rare.jsonl", eval_share=0.25, subset_seed=seed).read().train.texts


def test_evaluation_data_alone(case: Case) -> None:
    """The same rows as with the training set, which need not be there, also of a part that is held out."""
    for settings in ({"eval": "few.jsonl", "max_eval_samples": 3}, {"train": "all.jsonl", "eval_share": 0.1}):
        source: Any = case.source(**settings)
        whole = dataclasses.replace(source, train="all.jsonl").read()
        if case.source is TextFiles:  # which get the names of classes from a saved model, as the next ones do
            alone = source.read_part("eval", label_names=whole.label_names)
        elif case.source is TaggedWords:
            alone = source.read_evaluation(None, whole.names)
        else:
            found = source.read_evaluation()
            alone = found.eval
            assert len(found.train) == 0
        assert case.known(alone) == case.known(whole.eval)


def test_evaluation_rows_in_the_training_set(case: Case) -> None:
    """They are found by what is predicted for, whatever file and order they are in; a few are usual."""
    write_rows(Path("rest.jsonl"), case.rows[:20])
    write_rows(Path("most.jsonl"), case.rows[19:])
    notes = [note for note in read(case, "rest.jsonl", "few.jsonl").notes if "also in the training data" in note]
    few = [note for note in read(case, "rest.jsonl", "most.jsonl").notes if "also in the training data" in note]
    if case.source is PlainText:
        assert notes == few == []
        return
    (note,) = notes
    assert note.startswith(f"4 of 4 {case.source.unit}s of the evaluation data")  # type: ignore[attr-defined]
    assert few == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": "nowhere.jsonl"}, "recipe.data.train=nowhere.jsonl does not exist"),
        ({"train": "away/*.jsonl"}, "recipe.data.train=away/*.jsonl matches no file"),
        ({"train": None}, "recipe.data.train=null is invalid"),
        ({"eval": None}, "recipe.data.eval_share=0.1"),
        ({"eval": "empty.jsonl"}, "recipe.data.eval=empty.jsonl"),
        ({"train": "other.parquet"}, "recipe.data."),
        ({"max_train_samples": 0}, "recipe.data.max_train_samples=0 "),
        ({"max_eval_samples": 0}, "recipe.data.max_eval_samples=0 "),
        ({"subset_seed": -1}, "recipe.data.subset_seed=-1 "),
        ({"eval_share": 0.1}, "recipe.data.eval_share=0.1 is invalid: recipe.data.eval=few.jsonl"),
        ({"eval": None, "eval_share": 0}, "recipe.data.eval_share=0 "),
        ({"eval": None, "eval_share": 1.5}, "recipe.data.eval_share=1.5 "),
        ({"eval": None, "eval_share": 0.99}, "recipe.data.eval_share=0.99 is invalid: it would hold out all of 40"),
    ],
)
def test_wrong_settings(case: Case, settings: dict[str, Any], words: str) -> None:
    """One sentence that names the setting and its value, or the column that is missing."""
    Path("empty.jsonl").write_text("")
    Dataset.from_dict({"id": [1, 2], "more": [3, 4]}).to_parquet("other.parquet")
    with pytest.raises(UserError) as caught:
        read(case, **settings) if "eval" not in settings else read(case, evaluation=None, **settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_without_a_text(case: Case) -> None:
    """A missing or damaged text is named by its row."""
    for wrong in (None, "da\0maged"):
        if case.column in ("tokens", "messages"):
            wrong = None
        write_rows(Path("wrong.jsonl"), [*case.rows[:2], {**case.rows[2], case.column: wrong}])
        with pytest.raises(UserError, match=r"^recipe\.data\.train=wrong\.jsonl"):
            read(case, "wrong.jsonl")


def test_without_files_and_hub(case: Case) -> None:
    """What neither files nor the Hub can give now is Unavailable; without a name on the Hub it is a mistake."""
    with pytest.raises(Unavailable, match=r"recipe\.data\.train=….*'owner/data'"):
        case.source(hub_name="owner/data").read()  # type: ignore[attr-defined]
    with pytest.raises(UserError) as caught:
        case.source().read()  # type: ignore[attr-defined]
    assert not isinstance(caught.value, Unavailable)
