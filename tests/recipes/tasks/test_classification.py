"""Sequence classification of texts and pairs: tables, batches, loss and metrics by hand."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from benchmarks.peers.trained_tokenizer import trained_tokenizer
from recipes.models.pretrained import Pretrained
from recipes.synthetic.acceptability import SmallTransformer
from recipes.tasks import transformer_recipe
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from recipes.tasks.problems import SingleLabel
from runner.data.cache import Cache
from runner.data.layout import layout
from runner.data.loader import batches
from runner.data.recipe import Prepared
from runner.data.table import Table, write_table
from runner.errors import UserError
from tests.tiny_models import save_bert

TEXTS = ["the dog ran", "a nun slept on the old book", "ran", "the book fell"]
PAIRS = ["a dog slept", "a nun slept", "it fell on the old dog", "it ran"]
LABELS = [0, 1, 2, 1]


class Given:
    """A text source with these rows."""

    def __init__(self, texts: list[str] = TEXTS, pairs: list[str] | None = None) -> None:
        self.train = LabelledText(texts, LABELS[: len(texts)], pairs)
        self.eval = LabelledText(["the dog ran", "unheard of"], [1, 0], pairs[:2] if pairs else None)

    def read(self) -> Corpus:
        return Corpus(self.train, self.eval, "given")


def small(max_length: int = 16, metrics_shown: Sequence[str] = ("accuracy",), **of: Any) -> SequenceClassification:
    sizes: dict[str, Any] = {"hidden_size": 16, "feed_forward_size": 16, "layers": 1, "heads": 2}
    model = SmallTransformer(**sizes, dropout=0.0, attention_dropout=0.0, initializer_range=0.5)
    return SequenceClassification(Given(), model, max_length, metrics_shown, **of)


def prepare(recipe: SequenceClassification, folder: Path) -> Prepared:
    return Prepared.load(recipe.prepare(Cache(folder), recipe.facts(Cache(folder))))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small(), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[SequenceClassification, Prepared]:
    """Pairs for a BERT."""
    bert = save_bert(tmp_path_factory.mktemp("bert"), [*TEXTS, *PAIRS])
    recipe = SequenceClassification(Given(pairs=PAIRS), Pretrained(str(bert)), 32)
    return recipe, prepare(recipe, tmp_path_factory.mktemp("cache"))


def tokens(prepared: Prepared, row: int, part: str = "train") -> str:
    tokenizer = AutoTokenizer.from_pretrained(prepared.folder / "tokenizer")
    ids = getattr(prepared, part)[[row]]["input_ids"][0].tolist()
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


# --- tables ---------------------------------------------------------------------------------------------------


def test_tables_of_single_texts(prepared: Prepared) -> None:
    """Ids, labels, lengths with special tokens, one target a row; the vocabulary is the training set's."""
    assert prepared.train.column("label").tolist() == LABELS
    assert prepared.train.column("length").tolist() == [5, 9, 3, 5]
    assert prepared.train.column("label_count").tolist() == [1] * 4
    assert sorted(prepared.train[[0]]) == ["input_ids", "label", "label_count", "length", "row"]
    properties = {name: prepared.properties[name] for name in ("label_names", "vocabulary", "pad_id")}
    assert properties == {"label_names": ["0", "1", "2"], "vocabulary": 4 + 10, "pad_id": 0}
    assert tokens(prepared, 0, "eval") == "[CLS] the dog ran [SEP]"
    assert tokens(prepared, 1, "eval") == "[CLS] [UNK] [UNK] [SEP]"


def test_tables_of_pairs(pairs: tuple[SequenceClassification, Prepared], tmp_path: Path) -> None:
    """Both texts in one row with their types, the longer one truncated first, tokenised in chunks."""
    recipe, found = pairs
    assert tokens(found, 0) == "[CLS] the dog ran [SEP] a dog slept [SEP]"
    assert found.train[[0]]["token_type_ids"][0].tolist() == [0] * 5 + [1] * 4
    assert found.train.column("length").tolist() == [9, 13, 10, 8]
    short = prepare(dataclasses.replace(recipe, max_length=9), tmp_path / "short")
    assert tokens(short, 1) == "[CLS] a nun slept [SEP] a nun slept [SEP]"
    assert tokens(short, 2) == "[CLS] ran [SEP] it fell on the old [SEP]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_recipe, "_CHUNK", 3)
        chunks = prepare(recipe, tmp_path / "chunks")
    assert [tokens(chunks, row) for row in range(4)] == [tokens(found, row) for row in range(4)]


@pytest.mark.parametrize("chunk", [1, 10])
def test_truncated_samples_are_counted(
    pairs: tuple[SequenceClassification, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A sample of exactly `max_length` tokens is not truncated; progress is reported for both sets."""
    monkeypatch.setattr(transformer_recipe, "_CHUNK", chunk)
    calls: list[tuple[int, int]] = []
    cache = Cache(tmp_path, lambda done, total: calls.append((done, total)))
    recipe = dataclasses.replace(pairs[0], max_length=9)  # the samples have 9, 13, 10 and 8 tokens
    found = Prepared.load(recipe.prepare(cache, recipe.facts(cache))).properties["truncated"]
    assert (found["train"], found["eval"], found["tokens"]) == ([2, 4], [0, 2], 9)
    assert calls == [(done, total) for total in (4, 2) for done in [*range(0, total, chunk), total]]


def test_digests_and_names(tmp_path: Path) -> None:
    """The digest is over texts, labels and pairs; other names of the classes make another entry of the cache."""
    digest = hashlib.sha256(json.dumps([TEXTS, LABELS, ["the dog ran", "unheard of"], [1, 0]]).encode()).hexdigest()
    assert Given().read().digest == digest
    sources = [Given(), Given(pairs=PAIRS), Given(pairs=[*PAIRS[:3], "it sat"]), Given(texts=PAIRS, pairs=TEXTS)]
    assert len({source.read().digest for source in sources}) == 4
    recipe, cache = small(), Cache(tmp_path)
    facts = recipe.facts(cache)
    named = dataclasses.replace(facts, label_names=("bad", "good", "other"))
    assert recipe.prepare(cache, facts) != recipe.prepare(cache, named)


# --- batches --------------------------------------------------------------------------------------------------


def test_padding_to_max_length(prepared: Prepared) -> None:
    """Every batch has `max_length` tokens, whatever the device's layout; tables do not depend on it."""
    recipe, lengths = small(padding="max_length"), prepared.train.column("length")
    for chosen in (layout(lengths, 4, None, compiles=True), layout(lengths, 4, [4, 8], compiles=False)):
        loaded = batches(prepared.train, [[0, 1], [2], []], recipe, prepared, chosen)
        assert {batch["input_ids"].shape[1] for _, batch in loaded} == {16}
    assert prepare(recipe, prepared.folder.parent).folder == prepared.folder


# Logits (0, ln 3) give the classes the probabilities 1/4 and 3/4.
LN4, LN4_3 = math.log(4), math.log(4 / 3)


# --- metrics --------------------------------------------------------------------------------------------------


def answers(predicted: list[int], classes: int) -> Tensor:
    """Logits whose largest is that of the predicted class."""
    return 5 * nn.functional.one_hot(torch.tensor(predicted), classes).double()


def metrics(labels: list[int], predictions: Tensor, folder: Path) -> dict[str, float]:
    write_table(folder / "table", {"label": labels, "length": [1] * len(labels)})
    return small(metrics_shown=("accuracy", "matthews", "macro_f1")).metrics(predictions, Table(folder / "table"))


@pytest.mark.parametrize(
    ("labels", "predicted", "expected"),
    [
        # true positives 4, false negatives 2, false positives 1, true negatives 3: Matthews (12 - 2) ÷ √(5 · 6 · 4 · 5)
        (
            [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 1, 0, 0, 0],
            (70.0, 1000 / math.sqrt(600), 50 * (8 / 11 + 6 / 9)),
        ),
        ([1, 1, 0, 0], [0, 0, 1, 1], (0.0, -100.0, 0.0)),
        # F1 of 0: 2·2/(2·2+1), of 1: 2·1/(2·1+0+1), of 2: 2·1/(2·1+1+1); Matthews (4·6 - 13) ÷ (36 - 14)
        ([0, 0, 0, 1, 1, 2], [0, 0, 2, 1, 0, 2], (400 / 6, 50.0, 100 * (4 / 6 + 2 / 3 + 2 / 3) / 3)),
        # A constant prediction has a Matthews coefficient of 0.
        ([0, 1, 2, 2], [2, 2, 2, 2], (50.0, 0.0, 100 * (4 / 6) / 3)),
    ],
)
def test_metrics_by_hand(
    labels: list[int], predicted: list[int], expected: tuple[float, float, float], tmp_path: Path
) -> None:
    found = metrics(labels, answers(predicted, max(labels) + 1), tmp_path)
    assert [found[name] for name in ("accuracy", "matthews", "macro_f1")] == pytest.approx(expected, abs=1e-4)


def test_macro_f1_is_of_the_classes_of_the_evaluation_set(tmp_path: Path) -> None:
    """A third class of the model, which no row has, does not change the number of classes once it is predicted."""
    found = metrics([0, 0, 1, 1], answers([0, 2, 1, 1], 3), tmp_path)
    assert found["macro_f1"] == pytest.approx(100 * (2 / 3 + 1) / 2)


def test_loss_metric_and_names(tmp_path: Path) -> None:
    """The loss is the mean in nats; it is always added, once, after the configured metrics."""
    assert metrics([0, 1, 1, 1], torch.tensor([[0.0, math.log(3)]] * 4).double(), tmp_path)["loss"] == pytest.approx(
        (LN4 + 3 * LN4_3) / 4, abs=1e-6
    )
    assert small(metrics_shown=("matthews", "accuracy")).metric_names == ["matthews", "accuracy", "loss"]
    assert small(metrics_shown=("loss", "accuracy")).metric_names == ["loss", "accuracy"]
    assert small(metrics_shown=()).metric_names == ["loss"]


@pytest.mark.parametrize("labels", [[0, 1, 1, 0, 1], [2, 0, 1, 2, 2, 0]])
def test_what_a_constant_answer_scores(labels: list[int], tmp_path: Path) -> None:
    """The best value of each metric over the answers that are one class for every row."""
    problem, classes = SingleLabel(), max(labels) + 1
    constant = problem.constant(labels)
    names = [name for name in problem.fitting(classes) if name in constant]
    assert set(names) >= {"accuracy", "matthews", "macro_f1"}
    for name in names:
        scores = [
            problem.metrics[name](answers([one] * len(labels), classes), torch.tensor(labels)) for one in range(classes)
        ]
        assert constant[name] == pytest.approx(max(scores))
    assert problem.constant(None) == {}  # texts to predict for


TWO = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0], [0.0, 2.0]]).double()


def test_binary_metrics_by_hand(tmp_path: Path) -> None:
    """Class 1 is positive: 2 true positives, 1 false positive, 1 false negative; 5 of 6 pairs are in order."""
    write_table(tmp_path / "table", {"label": [0, 0, 1, 1, 1], "length": [1] * 5})
    found = small(metrics_shown=None).metrics(TWO, Table(tmp_path / "table"))
    assert list(found) == ["accuracy", "matthews", "macro_f1", "f1", "precision", "recall", "auc", "loss"]
    expected = [100 * share for share in (4 / 6, 4 / 6, 4 / 6, 5 / 6)]
    assert [found[name] for name in ("f1", "precision", "recall", "auc")] == pytest.approx(expected)


def test_auc_of_several_classes(tmp_path: Path) -> None:
    """The mean over classes against the others; nan where it is undefined, which does not end a diverged run."""
    write_table(tmp_path / "table", {"label": [0, 1, 2], "length": [1] * 3})
    table, recipe = Table(tmp_path / "table"), small(metrics_shown=["auc"])
    assert recipe.metrics(answers([0, 1, 2], 3), table)["auc"] == 100
    assert recipe.metrics(answers([0, 1, 0], 3), table)["auc"] == pytest.approx(100 * (0.75 + 1 + 0.5) / 3)
    assert math.isnan(recipe.metrics(torch.full((3, 3), math.nan), table)["auc"])
    assert math.isnan(recipe.metrics(answers([0, 1, 2], 4), table)["auc"])


def test_metrics_that_do_not_fit_the_data(tmp_path: Path) -> None:
    """Found when the data are read, before a folder is made; by default only those that fit are computed."""
    for name in ("f1", "precision", "recall"):
        with pytest.raises(UserError, match=rf"recipe\.metrics_shown=.*{name}.* 3; use macro_f1"):
            small(metrics_shown=[name]).facts(Cache(tmp_path))
    with pytest.raises(UserError, match=r"recipe\.metrics_shown=.*auc.*class '2'"):
        small(metrics_shown=["auc"]).facts(Cache(tmp_path))
    fitting = small(metrics_shown=None)
    assert list(fitting.metrics_of(fitting.facts(Cache(tmp_path)))) == ["accuracy", "matthews", "macro_f1", "loss"]


# --- models and settings --------------------------------------------------------------------------------------


def test_texts_without_tokens(tmp_path: Path) -> None:
    """A tokenizer without special tokens makes an empty row of an empty text, which no model reads."""
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    (gpt2 / "config.json").write_text(
        '{"model_type": "gpt2", "vocab_size": 300, "n_embd": 8, "n_layer": 1, "n_head": 1}'
    )
    trained_tokenizer("gpt2", 300, ["a dog"]).save_pretrained(gpt2)
    recipe = SequenceClassification(Given(["a dog", "", "ran"]), Pretrained(str(gpt2), "random"), 16)
    with pytest.raises(UserError, match=r"recipe\.data\.train has a text without a single token"):
        prepare(recipe, tmp_path / "cache")
