"""What all sources share: a part of the training data that is held out for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from recipes.sources.conversations import ConversationFiles
from recipes.sources.plain_text import PlainText
from recipes.sources.text_files import TextFiles
from recipes.tasks.classification import Corpus
from runner.errors import UserError
from tests.recipes.writers import chats, write_rows

ROWS = [f"text number {number}" for number in range(40)]
LABELS = ["rare" if number == 7 else ("a", "b")[number % 2] for number in range(40)]


@pytest.fixture
def table(here: Path) -> dict[str, Any]:
    """Forty texts, of which one alone has its label."""
    Dataset.from_dict({"text": ROWS, "label": LABELS}).to_csv("all.csv")
    return {"train": "all.csv", "eval_share": 0.25}


def read(**settings: Any) -> Corpus:
    return TextFiles(**settings).read()


def test_a_share_is_held_out(table: dict[str, Any]) -> None:
    """Each row is in one part, in its order; the source says so; a model is evaluated on the same rows later."""
    corpus = read(**table)
    train, evaluation = corpus.train.texts, corpus.eval.texts
    assert (len(train), len(evaluation)) == (30, 10)
    assert sorted(train + evaluation, key=ROWS.index) == ROWS
    assert train == sorted(train, key=ROWS.index)
    assert corpus.source == "all.csv, of which 25% are held out for evaluation"
    assert corpus.digest == read(**table).digest != read(**table, subset_seed=1).digest
    later = TextFiles(**table).read_part("eval", label_names=corpus.label_names)
    assert (later.texts, later.labels) == (evaluation, corpus.eval.labels)


def test_subsets_of_the_parts(table: dict[str, Any]) -> None:
    whole, few = read(**table), read(**table, max_train_samples=12, max_eval_samples=5)
    assert (len(few.train), len(few.eval)) == (12, 5)
    assert set(few.train.texts) < set(whole.train.texts)
    assert set(few.eval.texts) < set(whole.eval.texts)


def test_a_rare_class_stays_in_training(table: dict[str, Any]) -> None:
    for seed in range(20):
        assert ROWS[7] in read(**table, subset_seed=seed).train.texts


def test_other_sources_and_the_hub(here: Path) -> None:
    Path("lines.txt").write_text("\n".join(ROWS))
    documents = PlainText(train="lines.txt", eval_share=0.1).read()
    assert (len(documents.train), len(documents.eval)) == (36, 4)
    conversations = ConversationFiles(str(write_rows(here / "chats.jsonl", chats(20))), eval_share=0.1).read()
    assert (len(conversations.train), len(conversations.eval)) == (18, 2)
    (here / "data").mkdir()
    Dataset.from_dict({"text": ROWS, "label": LABELS}).to_parquet("data/train-00000-of-00001.parquet")
    corpus = read(hub_name=str(here), eval_share=0.1)
    assert (len(corpus.train), len(corpus.eval)) == (36, 4)
    assert "of which 10% are held out" in corpus.source


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eval_share": 1.5}, "recipe.data.eval_share=1.5"),
        ({"eval_share": 0}, "recipe.data.eval_share=0"),
        ({"eval_share": 0.99}, "recipe.data.eval_share=0.99 is invalid: it would hold out all of 40 rows"),
        ({"eval": "all.csv"}, "recipe.data.eval_share=0.25 is invalid: recipe.data.eval=all.csv"),
        ({"eval_share": None}, "recipe.data.eval_share=0.1"),
    ],
)
def test_wrong_settings(table: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(**{**table, **settings})
    assert words in str(caught.value)
