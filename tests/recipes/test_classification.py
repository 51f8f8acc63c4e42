"""Sequence classification: what a batch, a loss and a metric are, checked by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recipes.synthetic.acceptability import GrammarCorpus, SmallTransformer
from recipes.tasks.classification import METRICS, Corpus, LabelledText, SequenceClassification
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Prepared, without_targets
from runner.data.table import Table, write_table
from runner.errors import UserError

TRAIN = LabelledText(["the book fell", "a dog slept on the old book", "ran"], [0, 2, 1])
EVAL = LabelledText(["the dog ran", "unheard of"], [1, 0])


class Given:
    """A text source with these rows."""

    def read(self) -> Corpus:
        return Corpus(TRAIN, EVAL, "given")


def small_transformer(**changes: Any) -> SmallTransformer:
    of: dict[str, Any] = {
        "hidden_size": 16,
        "feed_forward_size": 16,
        "layers": 1,
        "heads": 2,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.5,
    }
    return SmallTransformer(**{**of, **changes})


def recipe(max_length: int = 16, metrics_shown: Sequence[str] = ("accuracy",)) -> SequenceClassification:
    return SequenceClassification(Given(), small_transformer(), max_length, metrics_shown)


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    cache = Cache(tmp_path / "cache")
    return Prepared.load(recipe().prepare(cache, recipe().facts(cache)))


class Fixed(nn.Module):
    """A model that answers with these logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits)


# --- data ---------------------------------------------------------------------------------------------------


def test_facts(tmp_path: Path) -> None:
    """What is known of the data before anything is tokenised."""
    facts = recipe().facts(Cache(tmp_path))
    assert (facts.train_samples, facts.eval_samples, facts.source) == (3, 2, "given")
    assert facts.digest == Given().read().digest


def test_prepared_tables(prepared: Prepared) -> None:
    """Each part is tokenised into its own table: ids, labels, lengths with special tokens, one target a row."""
    assert (len(prepared.train), len(prepared.eval)) == (3, 2)
    assert prepared.train.column("label").tolist() == [0, 2, 1]
    assert prepared.eval.column("label").tolist() == [1, 0]
    assert prepared.train.column("length").tolist() == [3 + 2, 7 + 2, 1 + 2]
    assert prepared.train.column("label_count").tolist() == [1, 1, 1]
    assert [len(row) for row in prepared.train[[0, 1, 2]]["input_ids"]] == [5, 9, 3]
    assert prepared.properties == {"classes": 3, "vocabulary": 4 + 9, "pad_id": 0}


def test_vocabulary_is_of_the_training_part(prepared: Prepared) -> None:
    """Words that only the held-out part has are unknown to the model, as they would be later."""
    tokenizer = AutoTokenizer.from_pretrained(prepared.folder / "tokenizer")
    known, unknown = (prepared.eval[[row]]["input_ids"][0].tolist() for row in (0, 1))
    assert tokenizer.convert_ids_to_tokens(known) == ["[CLS]", "the", "dog", "ran", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(unknown) == ["[CLS]", "[UNK]", "[UNK]", "[SEP]"]


def test_long_texts_are_cut(tmp_path: Path) -> None:
    """No row has more tokens than max_length, special tokens counted, and other lengths are other cache entries."""
    cache = Cache(tmp_path)
    short = recipe(max_length=4).prepare(cache, recipe().facts(cache))
    assert Prepared.load(short).train.column("length").tolist() == [4, 4, 3]
    assert recipe(max_length=16).prepare(cache, recipe().facts(cache)) != short
    assert recipe(max_length=4).prepare(cache, recipe().facts(cache)) == short


def test_data_that_changed_meanwhile(tmp_path: Path) -> None:
    """Data that changed since the run was planned are refused, and are not cached under the name of the old ones."""
    facts = dataclasses.replace(recipe().facts(Cache(tmp_path)), digest="of other rows")
    with pytest.raises(UserError, match=r"^the data \(given\) changed"):
        recipe().prepare(Cache(tmp_path), facts)
    assert list(tmp_path.iterdir()) == []


def test_collate(prepared: Prepared) -> None:
    """Rows are padded on the right to the longest of the batch, and the mask covers just the tokens."""
    batch = recipe().collate(prepared.train[[2, 0]], prepared)
    assert batch["input_ids"].shape == (2, 5)
    assert batch["input_ids"][0, 3:].tolist() == [0, 0]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert all(tensor.is_contiguous() for tensor in batch.values())


@pytest.mark.parametrize("length", [5, 6, 16])
def test_collate_pads_to_the_length_it_is_given(prepared: Prepared, length: int) -> None:
    """Where a length is given every row is padded to it, tokens staying where they are, and the mask hides the rest."""
    shortest, given = (recipe().collate(prepared.train[[2, 0]], prepared, to) for to in (None, length))
    assert given["input_ids"].shape == given["attention_mask"].shape == (2, length)
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(given[name][:, :5], shortest[name])
        assert not given[name][:, 5:].any()  # the pad token is 0, too
    assert torch.equal(given["labels"], shortest["labels"])


def test_mask_comes_from_lengths(prepared: Prepared) -> None:
    """A pad token inside a text is text: the mask does not hide it."""
    rows = {name: list(values) for name, values in prepared.train[[0, 2]].items()}
    rows["input_ids"] = [ids.copy() for ids in rows["input_ids"]]
    rows["input_ids"][0][2] = prepared.properties["pad_id"]
    batch = recipe().collate(rows, prepared)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_padding_does_not_matter(prepared: Prepared) -> None:
    """A sentence's logits are the same alone, beside a longer one and padded to a bucket, to 1e-5."""
    torch.manual_seed(0)
    model = recipe().build_model(prepared).eval()
    with torch.no_grad():
        together = recipe().predict(model, recipe().collate(prepared.train[[0, 1, 2]], prepared))
        for row in range(3):
            for length in (None, 16):
                alone = recipe().predict(model, recipe().collate(prepared.train[[row]], prepared, length))
                assert torch.allclose(alone[0], together[row], atol=1e-5)
    assert together.shape == (3, 3)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


# --- loss ---------------------------------------------------------------------------------------------------

# Of logits (0, ln 3) the classes have the probabilities 1/4 and 3/4.
LOGITS = torch.tensor([[0.0, math.log(3)]] * 4)
LN4, LN4_3 = math.log(4), math.log(4 / 3)


@pytest.mark.parametrize(
    ("labels", "loss", "count"),
    [
        ([0, 1, 1, 0], 2 * LN4 + 2 * LN4_3, 4),
        ([1, 1, 1, 1], 4 * LN4_3, 4),
        ([0, IGNORED_LABEL, 1, IGNORED_LABEL], LN4 + LN4_3, 2),
        ([IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL, 0], LN4, 1),
        ([IGNORED_LABEL] * 4, 0.0, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loss_is_a_sum_and_a_count(labels: list[int], loss: float, count: int, dtype: torch.dtype) -> None:
    """The loss is the sum over labelled rows, and the count how many there were: ignored rows are in neither."""
    model = Fixed(LOGITS.to(dtype))
    ids = torch.zeros((4, 1), dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": torch.tensor(labels)}
    loss_sum, counted = recipe().loss(model, batch)
    assert loss_sum.item() == pytest.approx(loss, rel=1e-2 if dtype is torch.bfloat16 else 1e-6)
    assert int(counted) == count
    assert loss_sum.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    gradient = model.logits.grad
    assert gradient is not None
    for row, label in zip(gradient.float(), labels, strict=True):
        expected = [0.0, 0.0] if label == IGNORED_LABEL else [0.25 - (label == 0), 0.75 - (label == 1)]
        assert row.tolist() == pytest.approx(expected, abs=5e-3)


def test_filler_moves_nothing(prepared: Prepared) -> None:
    """A filler row runs through a real model with loss 0, count 0 and no gradient but zeros."""
    model = recipe().build_model(prepared)
    batch = without_targets(recipe().collate(prepared.train[[2]], prepared), np.array([True]))
    loss_sum, count = recipe().loss(model, batch)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    assert (float(loss_sum.detach()), int(count)) == (0.0, 0)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(not gradient.any() for gradient in gradients)


# --- metrics ------------------------------------------------------------------------------------------------


def answers(predicted: list[int], classes: int) -> Tensor:
    """Logits whose largest is that of the class predicted."""
    return 5 * nn.functional.one_hot(torch.tensor(predicted), classes).double()


#: (labels, predictions, classes) -> accuracy, Matthews, macro F1 in percent.
TABLES = {
    # true positives 4, false negatives 2, false positives 1, true negatives 3: Matthews (12 - 2) ÷ √(5 · 6 · 4 · 5)
    "binary": (
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 1, 0, 0, 0],
        2,
        (70.0, 1000 / math.sqrt(600), 50 * (8 / 11 + 6 / 9)),
    ),
    "inverted": ([1, 1, 0, 0], [0, 0, 1, 1], 2, (0.0, -100.0, 0.0)),
    "perfect": ([1, 0, 1], [1, 0, 1], 2, (100.0, 100.0, 100.0)),
    # F1 of 0: 2·2/(2·2+1) · of 1: 2·1/(2·1+0+1) · of 2: 2·1/(2·1+1+1); Matthews (4·6 - 13) ÷ √((36 - 14) · (36 - 14))
    "three": ([0, 0, 0, 1, 1, 2], [0, 0, 2, 1, 0, 2], 3, (400 / 6, 50.0, 100 * (4 / 6 + 2 / 3 + 2 / 3) / 3)),
    # Always the same answer: no better than chance.
    "constant of three": ([0, 1, 2, 2], [2, 2, 2, 2], 3, (50.0, 0.0, 100 * (4 / 6) / 3)),
}


def metrics(labels: list[int], predictions: Tensor, folder: Path) -> dict[str, float]:
    write_table(folder / "table", {"label": labels, "length": [1] * len(labels)})
    return recipe(metrics_shown=("accuracy", "matthews", "macro_f1")).metrics(predictions, Table(folder / "table"))


@pytest.mark.parametrize("name", TABLES)
def test_metrics_by_hand(name: str, tmp_path: Path) -> None:
    """Accuracy, Matthews' coefficient and macro F1 are in percent and those of the confusion table."""
    labels, predicted, classes, (accuracy, matthews, macro_f1) = TABLES[name]
    found = metrics(labels, answers(predicted, classes), tmp_path)
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert found["matthews"] == pytest.approx(matthews, abs=1e-4)
    assert found["macro_f1"] == pytest.approx(macro_f1, abs=1e-4)


@pytest.mark.parametrize("constant", [0, 1])
def test_constant_answer_has_no_correlation(constant: int, tmp_path: Path) -> None:
    """A model that always gives the same of two answers has a Matthews coefficient of 0, as is published."""
    found = metrics([1] * 7 + [0] * 3, answers([constant] * 10, 2), tmp_path)
    assert found["matthews"] == pytest.approx(0.0, abs=1e-4)


def test_loss_metric(tmp_path: Path) -> None:
    """The loss is the mean over samples of the negative log-likelihood in nats, not in percent."""
    found = metrics([0, 1, 1, 1], LOGITS.double(), tmp_path)
    assert found["loss"] == pytest.approx((LN4 + 3 * LN4_3) / 4, abs=1e-6)


def test_metrics_do_not_depend_on_the_order_of_samples(tmp_path: Path) -> None:
    """Predictions belong to rows: moving both together changes no metric, moving predictions alone does."""
    labels, predicted, classes, _ = TABLES["binary"]
    order = [3, 9, 0, 7, 1, 5, 2, 8, 4, 6]
    straight = metrics(labels, answers(predicted, classes), tmp_path / "a")
    moved = metrics([labels[i] for i in order], answers(predicted, classes)[order], tmp_path / "b")
    alone = metrics(labels, answers(predicted, classes)[order], tmp_path / "c")
    assert moved == pytest.approx(straight)
    assert alone["accuracy"] != pytest.approx(straight["accuracy"])


@pytest.mark.parametrize(
    ("shown", "names"),
    [
        (("accuracy",), ["accuracy", "loss"]),
        (("matthews", "accuracy"), ["matthews", "accuracy", "loss"]),
        (("loss", "accuracy"), ["loss", "accuracy"]),
        ((), ["loss"]),
    ],
)
def test_metric_names(shown: Sequence[str], names: list[str], tmp_path: Path) -> None:
    """The metrics asked for come in their order, the loss once, and `metrics` computes just the names announced."""
    write_table(tmp_path / "table", {"label": [0, 1], "length": [1, 1]})
    of = recipe(metrics_shown=shown)
    assert list(of.metric_names) == names
    assert list(of.metrics(answers([0, 1], 2), Table(tmp_path / "table"))) == names


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [0, -1, "long", 1.5, None])
def test_wrong_max_length(max_length: Any) -> None:
    """A text has to keep at least one token."""
    with pytest.raises(UserError, match=rf"^recipe\.max_length={max_length} cannot be"):
        recipe(max_length=max_length)


@pytest.mark.parametrize(
    ("name", "near"),
    [("acuracy", "did you mean 'accuracy'?"), ("macrof1", "did you mean 'macro_f1'?"), ("bleu", "there are:")],
)
def test_unknown_metric(name: str, near: str) -> None:
    """A metric that does not exist is refused with the nearest one, or all of them."""
    with pytest.raises(UserError, match=rf"^recipe\.metrics_shown has no metric '{name}'") as caught:
        recipe(metrics_shown=["accuracy", name])
    assert near in str(caught.value)
    assert set(METRICS) >= {"accuracy", "matthews", "macro_f1", "loss"}


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"hidden_size": 0}, "recipe.model.hidden_size=0"),
        ({"feed_forward_size": 0}, "recipe.model.feed_forward_size=0"),
        ({"layers": 0}, "recipe.model.layers=0"),
        ({"heads": -1}, "recipe.model.heads=-1"),
        ({"heads": 3}, "recipe.model.hidden_size=16 does not divide by recipe.model.heads=3"),
        ({"dropout": 1.0}, "recipe.model.dropout=1.0"),
        ({"dropout": -0.1}, "recipe.model.dropout=-0.1"),
    ],
)
def test_wrong_model(changes: dict[str, Any], setting: str) -> None:
    """Sizes that make no transformer are refused by their setting."""
    small_transformer().check()
    with pytest.raises(UserError) as caught:
        small_transformer(**changes).check()
    assert str(caught.value).startswith(setting)


@pytest.mark.parametrize(
    ("sizes", "setting"),
    [
        ((1, 10), "recipe.data.train_samples=1 "),
        ((10, 0), "recipe.data.eval_samples=0 "),
        ((10**7, 10), "recipe.data.train_samples=10000000 "),
    ],
)
def test_wrong_corpus_sizes(sizes: tuple[int, int], setting: str) -> None:
    """A corpus with nothing to learn from, or of more sentences than the grammar has, is refused by its setting."""
    with pytest.raises(UserError) as caught:
        GrammarCorpus(0, *sizes).read()
    assert str(caught.value).startswith(setting)


def test_grammar_corpus() -> None:
    """The built-in corpus has the sizes asked for and two classes, and its seed is told."""
    corpus = GrammarCorpus(3, 40, 10).read()
    assert (len(corpus.train), len(corpus.eval), corpus.classes) == (40, 10, 2)
    assert "seed 3" in corpus.source
    assert corpus == GrammarCorpus(3, 40, 10).read()
    assert corpus.digest != GrammarCorpus(4, 40, 10).read().digest


# --- saving -------------------------------------------------------------------------------------------------


def test_what_is_saved_can_be_loaded(prepared: Prepared, tmp_path: Path) -> None:
    """Weights and tokenizer are read by transformers' own classes, and classify a sentence as the run would."""
    torch.manual_seed(0)
    model = recipe().build_model(prepared).eval()
    recipe().save(model, prepared, tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    batch = tokenizer(TRAIN.texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = loaded(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        ours = recipe().predict(model, recipe().collate(prepared.train[[0, 1, 2]], prepared))
    assert torch.allclose(theirs, ours, atol=1e-6)
    assert loaded.config.num_labels == 3


def test_equal_seeds_give_equal_models(prepared: Prepared) -> None:
    """New weights are drawn from torch's generator: equal for equal seeds, on every worker, and other for others."""

    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(recipe().build_model(prepared).parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(5), weights(5), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(5), weights(6), strict=True))
