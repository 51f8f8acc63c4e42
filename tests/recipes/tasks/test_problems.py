"""Regression and multi-label classification: tables, loss and metrics by hand, and what is saved."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, pipeline

from recipes.models.pretrained import Pretrained
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from recipes.tasks.problems import PROBLEMS
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Prepared
from runner.errors import UserError
from tests.recipes.labelled import CLASSES
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


def test_what_is_predicted(folder: Path, tmp_path: Path) -> None:
    """Numbers, or the classes with a probability above one half; a model of another problem is refused."""
    for problem in LABELS:
        recipe = recipe_of(problem, folder)
        found = prepare(recipe, tmp_path / "cache")
        model = recipe.build_model(found).eval()
        recipe.save(model, found, tmp_path / "saved")
        logits = recipe.predict(model, recipe.collate(found.eval[[0, 1, 2]], found)).detach().double()
        columns = recipe.from_saved(str(tmp_path / "saved")).prediction_columns(logits, found.eval)
        expected: list[Any] = logits[:, 0].tolist()
        if problem == "multi_label":
            expected = [[name for name in CLASSES if columns[f"probability_{name}"][row] > 0.5] for row in range(3)]
        assert columns["predicted"] == expected
    other = dataclasses.replace(recipe_of("regression", folder), problem="single_label")
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


class Fixed(nn.Module):
    """A model with these logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits)


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
    ("problem", "labels", "words"),
    [
        ("multi_label", [(0,), (1,), (0, 1), (1, 2)], r"^recipe\.metrics_shown=.* only rows of the class 'music'"),
        ("regression", [1.0, 2.0, 2.0, 2.0], r"^recipe\.metrics_shown=.*pearson is undefined.* number 2"),
    ],
)
def test_metrics_that_are_undefined(problem: str, labels: Any, words: str, folder: Path) -> None:
    shown = ["auc"] if problem == "multi_label" else None
    data = Given(labels, CLASSES if problem == "multi_label" else None)
    recipe = SequenceClassification(data, Pretrained(str(folder)), problem=problem, metrics_shown=shown)
    with pytest.raises(UserError, match=words):
        recipe.facts(Cache("unused"))


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
