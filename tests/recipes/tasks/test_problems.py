"""Regression and multi-label classification: tables, loss and metrics by hand, and what is saved."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from recipes.models.pretrained import Pretrained
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from recipes.tasks.problems import PROBLEMS
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Prepared, label_counts, without_targets
from runner.errors import UserError
from tests.recipes.labelled import CLASSES
from tests.recipes.tasks.test_classification import Fixed
from tests.tiny_models import save_bert

TEXTS = ["the dog ran", "a nun slept on the old book", "ran", "the book fell"]
LABELS: dict[str, Any] = {"regression": [0.5, -100.0, 3.25, 1.0], "multi_label": [(0, 2), (), (1,), (0, 1, 2)]}
PROBLEM = pytest.mark.parametrize("problem", list(LABELS))


@dataclasses.dataclass(frozen=True)
class Given:
    """A source with these labels. `eval` has the first three texts, the last of the labels first."""

    labels: Any
    names: tuple[str, ...] | None

    def read(self) -> Corpus:
        train = LabelledText(TEXTS, self.labels)
        evaluation = LabelledText(TEXTS[:3], None if self.labels is None else self.labels[:0:-1])
        return Corpus(train, evaluation, "given", self.names)

    def read_part(self, part: str, file: str | None = None, label_names: Any = None) -> LabelledText:
        found = self.read().eval
        return found if label_names is not None else dataclasses.replace(found, labels=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), TEXTS)


def recipe_of(problem: str, folder: Path, **of: Any) -> SequenceClassification:
    names = CLASSES if problem == "multi_label" else None
    settings: dict[str, Any] = {"metrics_shown": None, "max_length": 32, "problem": problem, **of}
    return SequenceClassification(Given(LABELS[problem], names), Pretrained(str(folder)), **settings)


def prepare(recipe: SequenceClassification, cache: Path) -> Prepared:
    return Prepared.load(recipe.prepare(Cache(cache), recipe.facts(Cache(cache))))


@PROBLEM
def test_the_loss_is_that_of_transformers(problem: str, folder: Path, tmp_path: Path) -> None:
    """Sum ÷ count is the mean that the saved model computes itself; and the table's count is that of the loss."""
    recipe = recipe_of(problem, folder)
    found = prepare(recipe, tmp_path / "cache")
    torch.manual_seed(0)
    model = recipe.build_model(found).eval()
    batch = recipe.collate(found.train[[0, 1, 2, 3]], found)
    loss_sum, count = recipe.loss(model, batch)
    loss_sum = loss_sum.detach()
    assert int(count) == label_counts(found.train).sum() == {"regression": 4, "multi_label": 12}[problem]
    recipe.save(model, found, tmp_path / "saved")
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    labels = batch["labels"].float() if problem == "multi_label" else batch["labels"].float()[:, None]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    expected = saved(**inputs, labels=labels).loss
    assert float(loss_sum / count) == pytest.approx(expected.item(), rel=1e-5)
    assert saved.config.problem_type == PROBLEMS[problem].problem_type


@PROBLEM
def test_fillers_have_no_loss(problem: str, folder: Path, tmp_path: Path) -> None:
    """Also next to a number that is the mark of ignored classes."""
    recipe = recipe_of(problem, folder)
    found = prepare(recipe, tmp_path)
    model = recipe.build_model(found).double().eval()
    batch = recipe.collate(found.train[[0, 1, 2]], found)
    some = without_targets(batch, np.array([False, False, True]))
    loss_sum, count = recipe.loss(model, some)
    alone, own = recipe.loss(model, {name: tensor[:2] for name, tensor in batch.items()})
    assert float(loss_sum.detach()) == pytest.approx(float(alone.detach()), rel=1e-12)
    assert int(count) == int(own) == {"regression": 2, "multi_label": 6}[problem]
    loss_sum, count = recipe.loss(model, without_targets(batch, np.array([True] * 3)))
    loss_sum.backward()  # type: ignore[no-untyped-call]
    assert (float(loss_sum.detach()), int(count)) == (0.0, 0)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


@PROBLEM
def test_predictions_without_labels(problem: str, folder: Path, tmp_path: Path) -> None:
    """Texts to predict for have no targets; names and kind of problem come from the saved model."""
    recipe = recipe_of(problem, folder)
    found = prepare(recipe, tmp_path / "cache")
    recipe.save(recipe.build_model(found), found, tmp_path / "saved")
    for file, known in ((None, True), ("mine", False)):
        saved = recipe.from_saved(str(tmp_path / "saved"), file)
        data = Prepared.load(saved.prepare(Cache(tmp_path), saved.facts(Cache(tmp_path))))
        assert label_counts(data.eval).any() == known
        batch = saved.collate(data.eval[[0, 1, 2]], data)
        assert int(saved.loss(saved.build_model(data), batch)[1]) == label_counts(data.eval).sum()
        logits = saved.predict(saved.build_model(data), batch).detach().double()
        columns = saved.prediction_columns(logits, data.eval)
        assert ("label" in columns) is known
        assert columns["text"] == TEXTS[:3]
        if problem == "regression":
            assert columns["predicted"] == logits[:, 0].tolist()
        else:
            likely = [[name for name in CLASSES if columns[f"probability_{name}"][row] > 0.5] for row in range(3)]
            assert columns["predicted"] == likely
    other = dataclasses.replace(recipe, problem="single_label")
    with pytest.raises(UserError, match=r"recipe\.problem=single_label"):
        other.from_saved(str(tmp_path / "saved")).facts(Cache(tmp_path))


def test_pipelines(folder: Path, tmp_path: Path) -> None:
    """transformers' pipeline applies a sigmoid to classes and nothing to a number, as the configuration says."""
    for problem in LABELS:
        recipe = recipe_of(problem, folder)
        found = prepare(recipe, tmp_path / "cache")
        model = recipe.build_model(found).eval()
        recipe.save(model, found, tmp_path / problem)
        logits = recipe.predict(model, recipe.collate(found.train[[0]], found)).detach()[0]
        told = pipeline("text-classification", model=str(tmp_path / problem))("the dog ran", top_k=None)
        scores = {one["label"]: one["score"] for one in told}
        if problem == "regression":
            assert list(scores.values()) == pytest.approx(logits.tolist(), rel=1e-4)
        else:
            assert scores == pytest.approx(dict(zip(CLASSES, logits.sigmoid().tolist(), strict=True)), rel=1e-4)


# --- by hand ----------------------------------------------------------------------------------------------------


def loss_of(problem: str, logits: Tensor, labels: Tensor) -> tuple[float, int]:
    ids = torch.zeros((len(logits), 1), dtype=torch.int64)
    recipe = SequenceClassification(Given([], None), Pretrained("none"), metrics_shown=None, problem=problem)
    loss_sum, count = recipe.loss(Fixed(logits), {"input_ids": ids, "attention_mask": ids, "labels": labels})
    return float(loss_sum.detach()), int(count)


def test_losses_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    ignored = [IGNORED_LABEL] * 2
    found = loss_of("multi_label", logits, torch.tensor([[1, 1], ignored]))
    assert found == (pytest.approx(math.log(2) + math.log(4 / 3)), 2)
    found = loss_of("regression", logits[:, 1:], torch.tensor([1.0, -100.0], dtype=torch.float64))
    assert found == (pytest.approx((math.log(3) - 1) ** 2 + 1e4), 2)


def metrics_of(problem: str, predictions: list[Any], labels: Any) -> dict[str, float]:
    kind = PROBLEMS[problem]
    logits = torch.tensor(predictions, dtype=torch.float64)
    column = kind.columns(labels, len(labels), CLASSES)["label"]
    return {name: metric(logits, kind.tensor(column)) for name, metric in kind.metrics.items()}


def test_metrics_of_numbers_by_hand() -> None:
    found = metrics_of("regression", [[1.0], [2.0], [4.0]], [1.0, 3.0, 5.0])
    # errors 0, 1, 1; the labels' variance is 8 ÷ 3; the predictions' deviations are -4/3, -1/3 and 5/3
    assert found["mse"] == found["loss"] == pytest.approx(2 / 3)
    assert found["mae"] == pytest.approx(2 / 3)
    assert found["r2"] == pytest.approx(75)
    assert found["pearson"] == pytest.approx(100 * 6 / math.sqrt(42 / 9 * 8))
    assert found["spearman"] == pytest.approx(100)
    constant = metrics_of("regression", [[2.0]] * 3, [1.0, 2.0, 3.0])
    assert (constant["pearson"], constant["spearman"]) == (0.0, 0.0)
    assert all(math.isnan(value) for value in metrics_of("regression", [[math.nan]] * 3, [1.0, 2.0, 3.0]).values())


def test_metrics_of_classes_by_hand() -> None:
    """Of nine decisions: true positives 3, false positives 1, false negatives 1."""
    logits = [[2.0, -1.0, 1.0], [-2.0, -1.0, -3.0], [1.0, 3.0, -1.0]]
    found = metrics_of("multi_label", logits, [(0, 2), (1,), (1,)])
    assert found["micro_f1"] == pytest.approx(100 * 6 / 8)
    assert found["macro_f1"] == pytest.approx(100 * (2 / 3 + 2 / 3 + 1) / 3)
    assert found["exact_match"] == pytest.approx(100 / 3)
    assert found["ranking_precision"] == pytest.approx(100)
    assert found["auc"] == pytest.approx(100 * (1 + 3 / 4 + 1) / 3)
    diverged = metrics_of("multi_label", [[math.nan] * 3] * 2, [(0,), (1, 2)])
    assert math.isnan(diverged["ranking_precision"])
    assert math.isnan(diverged["loss"])


@pytest.mark.parametrize(
    ("problem", "changes", "labels", "words"),
    [
        ("regression", {"metrics_shown": ["acuracy"]}, None, r"^recipe\.metrics_shown=.*'acuracy'"),
        ("multi_label", {"metrics_shown": ["auc"]}, None, r"^recipe\.metrics_shown=.* only rows of the class 'music'"),
        ("regression", {}, [1.0, 2.0, 2.0, 2.0], r"^recipe\.metrics_shown=.*pearson is undefined.* number 2"),
        ("ranking", {}, None, r"^recipe\.problem=ranking .*multi_label"),
    ],
)
def test_wrong_settings(problem: str, changes: dict[str, Any], labels: Any, words: str, folder: Path) -> None:
    labels = labels or {**LABELS, "multi_label": [(0,), (1,), (0, 1), (1, 2)]}.get(problem)
    data = Given(labels, CLASSES if problem == "multi_label" else None)
    settings: dict[str, Any] = {"metrics_shown": None, "problem": problem, **changes}

    def use() -> None:
        SequenceClassification(data, Pretrained(str(folder)), **settings).facts(Cache("unused"))

    with pytest.raises(UserError, match=words):
        use()


def test_shown_metrics_and_classes() -> None:
    """Those that are minimised are told, and sources without names have numbers."""
    given = Given(LABELS["multi_label"], None).read()
    assert given.label_names == ("0", "1", "2")
    assert Given(LABELS["regression"], None).read().label_names == ()
    recipe = SequenceClassification(Given([], None), Pretrained("x"), metrics_shown=None, problem="regression")
    assert recipe.metric_names == ["pearson", "spearman", "mse", "mae", "r2", "loss"]
    assert recipe.minimised == ("mse", "mae", "loss")


def test_the_head_must_fit(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of("multi_label", folder)
    found = prepare(recipe, tmp_path / "cache")
    recipe.save(recipe.build_model(found), found, tmp_path / "three")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "three")
    assert json.loads((tmp_path / "three" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    with pytest.raises(UserError, match=r"recipe\.model\.name=.*3 classes.*have 1"):
        recipe_of("regression", tmp_path / "three").facts(Cache(tmp_path))
