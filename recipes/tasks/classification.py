"""Sequence classification: one label per text, or per pair of texts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.models.pretrained import Pretrained
from recipes.tasks.transformer_recipe import (
    ModelSource,
    TransformerRecipe,
    at_least_fp32,
    check_model,
    check_unchanged,
    evaluation_reader,
    outputs,
    text_batch,
    write_prepared,
)
from runner.data.cache import Cache, Progress
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.data.table import Table
from runner.errors import UserError, did_you_mean, require

#: Samples tokenised together, to bound memory: a tokenizer keeps far more of each than its token ids.
_CHUNK = 10_000

#: Special tokens of a text or pair, at most (RoBERTa has four): loading the tokenizer to count them takes seconds.
_MOST_SPECIAL = 8


@dataclass(frozen=True)
class LabelledText:
    """Texts and their classes, numbered from 0; `labels` is None for texts to predict for.

    `pairs`: the second text of each sample. `notes`: what was inferred when they were read, in sentences.
    """

    texts: list[str]
    labels: list[int] | None
    pairs: list[str] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation set. `source`: where they came from, for people.

    `names`: the names of the classes in the order of their numbers; None if they have only numbers.
    """

    train: LabelledText
    eval: LabelledText
    source: str
    names: Sequence[str] | None = None

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes, "0", "1", … if they have only numbers."""
        return tuple(self.names or map(str, range(max(self.train.labels or (0,)) + 1)))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.train.notes, *self.eval.notes)))

    @property
    def digest(self) -> str:
        """A hash over every text and label, in order."""
        content = [self.train.texts, self.train.labels, self.eval.texts, self.eval.labels]
        pairs = [part.pairs for part in (self.train, self.eval) if part.pairs is not None]
        return hashlib.sha256(json.dumps([*content, *pairs]).encode()).hexdigest()


class TextSource(Protocol):
    def read(self) -> Corpus:
        """Read and check the data. Raises UserError, and Unavailable for data that are not on this machine."""
        ...

    def read_part(
        self, part: Literal["train", "eval"], file: str | None = None, label_names: Sequence[str] | None = None
    ) -> LabelledText:
        """One part by itself, from `file` if given. `label_names`: of the classes; None reads no labels."""
        ...


class ClassifierSource(ModelSource, Protocol):
    def build_classifier(self, classes: int, vocabulary: int, pad_id: int) -> nn.Module:
        """A transformers model for sequence classification, in fp32."""
        ...

    def check_classes(self, classes: int) -> None:
        """Check that the model can have so many classes. Raises UserError."""
        return


def _of_classes(function: str, **settings: Any) -> Callable[[Tensor, Tensor], float]:
    """A metric of the predicted classes by its name in scikit-learn, in percent."""

    def metric(logits: Tensor, labels: Tensor) -> float:
        import sklearn.metrics

        return 100 * float(getattr(sklearn.metrics, function)(labels, logits.argmax(-1), **settings))

    return metric


def _auc(logits: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve in percent, of several classes the mean of each against the others; nan if undefined."""
    from sklearn.metrics import roc_auc_score

    classes = logits.shape[-1]
    if len(labels.unique()) < classes or not logits.isfinite().all():
        return math.nan
    if classes == 2:
        return 100 * float(roc_auc_score(labels, logits[:, 1] - logits[:, 0]))
    return 100 * float(roc_auc_score(labels, logits.double().softmax(-1), multi_class="ovr"))


def _loss(logits: Tensor, labels: Tensor) -> float:
    return float(cross_entropy(logits, labels))


#: Name in configuration and MLflow -> function of (logits [samples, classes], labels [samples]).
METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": _of_classes("accuracy_score"),
    "matthews": _of_classes("matthews_corrcoef"),
    "macro_f1": _of_classes("f1_score", average="macro", zero_division=0.0),
    "f1": _of_classes("f1_score", zero_division=0.0),
    "precision": _of_classes("precision_score", zero_division=0.0),
    "recall": _of_classes("recall_score", zero_division=0.0),
    "auc": _auc,
    "loss": _loss,
}

#: Metrics of class 1 against class 0, for two classes only.
_BINARY = ("f1", "precision", "recall")


@dataclass(frozen=True)
class SequenceClassification(TransformerRecipe):
    """One label per text, or per pair of texts.

    `max_length`: tokens kept of a text, special tokens included; of a pair the longer text is truncated first.
    `padding`: `longest` pads to the longest row of a batch (or to the device's buckets), `max_length` always to that
    many tokens. `metrics_shown`: names from `METRICS`, or None for those that fit the number of classes; the loss is
    always added.
    """

    data: TextSource
    model: ClassifierSource
    max_length: int = 128
    metrics_shown: Sequence[str] | None = ("accuracy",)
    padding: str = "longest"

    def __post_init__(self) -> None:
        require(self.max_length >= 1, "recipe.max_length", self.max_length, "use at least 1 token")
        ok = self.padding in ("longest", "max_length")
        require(ok, "recipe.padding", self.padding, "use longest or max_length")
        shown = self.metrics_shown
        ok = shown is None or isinstance(shown, (list, tuple))
        require(ok, "recipe.metrics_shown", shown, "give a list, such as [accuracy], or null")
        for name in shown or ():
            ok = name in METRICS
            require(ok, "recipe.metrics_shown", shown, f"there is no metric '{name}'{did_you_mean(str(name), METRICS)}")

    @property
    def metric_names(self) -> Sequence[str]:
        return self._metric_names(classes=2)

    def metrics_of(self, facts: DataFacts) -> Sequence[str]:
        return self._metric_names(len(facts.label_names))

    def _metric_names(self, classes: int) -> list[str]:
        shown = self.metrics_shown
        if shown is None:
            shown = [name for name in METRICS if classes <= 2 or name not in (*_BINARY, "auc")]
        return [*dict.fromkeys([*shown, "loss"])]

    @property
    def minimised(self) -> Sequence[str]:
        return ["loss"]

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        self._check_metrics(corpus)
        self._check_length(corpus)
        self.model.check_classes(len(corpus.label_names))
        return DataFacts(
            len(corpus.train),
            len(corpus.eval),
            corpus.digest,
            corpus.source,
            label_names=corpus.label_names,
            notes=corpus.notes,
        )

    def _check_metrics(self, corpus: Corpus) -> None:
        names = corpus.label_names
        used = self._metric_names(len(names))
        for name in _BINARY:
            rule = f"{name} is for two classes, and these data have {len(names)}; use macro_f1, also as the metric"
            require(name not in used or len(names) == 2, "recipe.metrics_shown", self.metrics_shown, rule)
        missing = [] if corpus.eval.labels is None else sorted(set(range(len(names))) - set(corpus.eval.labels))
        if "auc" in used and missing:
            rule = f"auc is undefined, since recipe.data.eval has no row of the class '{names[missing[0]]}'"
            fix = "leave out auc, or use more rows"
            raise UserError(f"recipe.metrics_shown={self.metrics_shown or 'null'} is invalid: {rule}; {fix}")

    def check_model(self) -> None:
        check_model(self.model, "recipe.max_length", self.max_length)

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        key = {
            "task": "classification",
            "data": facts.digest,
            "tokenizer": self.model.tokenizer_identity(),
            "max_length": self.max_length,
            "label_names": facts.label_names,
        }
        return cache.get(key, lambda folder: self._tokenize(folder, facts, cache.progress))

    def _tokenize(self, folder: Path, facts: DataFacts, progress: Progress) -> None:
        corpus = self.data.read()
        check_unchanged(corpus.digest, facts.digest, facts.source)
        tokenizer = self._tokenizer(corpus)
        train, evaluation = (self._columns(tokenizer, part, progress) for part in (corpus.train, corpus.eval))
        for name, part, columns in (("train", corpus.train, train), ("eval", corpus.eval, evaluation)):
            if 0 in columns["length"]:
                text = part.texts[list(columns["length"]).index(0)]
                raise UserError(f"recipe.data.{name} has a text without a single token, {text!r}: remove it")
        lost = {
            name: [self._truncated(tokenizer, part, columns["length"]), len(part)]
            for name, part, columns in (("train", corpus.train, train), ("eval", corpus.eval, evaluation))
        }
        truncated = {"what": "texts", "setting": "recipe.max_length", "tokens": self.max_length, **lost}
        write_prepared(folder, train, evaluation, tokenizer, label_names=facts.label_names, truncated=truncated)

    def _tokenizer(self, corpus: Corpus) -> Any:
        return self.model.tokenizer([*corpus.train.texts, *(corpus.train.pairs or ())])

    def _check_length(self, corpus: Corpus) -> None:
        """Tokenizers truncate nothing at all if only special tokens fit."""
        if self.max_length <= _MOST_SPECIAL:
            special = self._tokenizer(corpus).num_special_tokens_to_add(pair=corpus.eval.pairs is not None)
            rule = f"the tokenizer adds {special} special tokens; use at least {special + 1} tokens"
            require(self.max_length > special, "recipe.max_length", self.max_length, rule)

    def _columns(self, tokenizer: Any, part: LabelledText, progress: Progress) -> dict[str, Sequence[Any]]:
        columns: dict[str, list[Any]] = {}
        for start in range(0, len(part), _CHUNK):
            progress(start, len(part))
            some = slice(start, start + _CHUNK)
            pairs = None if part.pairs is None else part.pairs[some]
            encoded = tokenizer(part.texts[some], pairs, truncation="longest_first", max_length=self.max_length)
            # The types of a single text would all be 0, which is the models' default.
            for name in ("input_ids",) if pairs is None else ("input_ids", "token_type_ids"):
                if name in encoded:
                    columns.setdefault(name, []).extend(np.asarray(row, dtype=np.int32) for row in encoded[name])
        progress(len(part), len(part))
        lengths = [len(row) for row in columns.get("input_ids", ())]
        labels = part.labels if part.labels is not None else [IGNORED_LABEL] * len(part)
        return {
            **columns,
            "label": labels,
            "length": lengths,
            "label_count": [int(part.labels is not None)] * len(part),
        }

    def _truncated(self, tokenizer: Any, part: LabelledText, lengths: Sequence[int]) -> int:
        """How many samples have more than `max_length` tokens. `lengths`: of the truncated ones."""
        full = [row for row, length in enumerate(lengths) if length == self.max_length]
        count = 0
        for start in range(0, len(full), _CHUNK):
            rows = full[start : start + _CHUNK]
            pairs = None if part.pairs is None else [part.pairs[row] for row in rows]
            encoded = tokenizer([part.texts[row] for row in rows], pairs, verbose=False)
            count += sum(len(ids) > self.max_length for ids in encoded["input_ids"])
        return count

    def build_model(self, prepared: Prepared) -> nn.Module:
        of = prepared.properties
        names = of["label_names"]
        model = self.model.build_classifier(len(names), of["vocabulary"], of["pad_id"])
        # For transformers' pipelines, and for runner.evaluate and runner.predict.
        config: Any = model.config
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
        return model

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        if self.padding == "max_length":
            length = self.max_length
        batch = text_batch(rows, prepared.properties["pad_id"], length)
        return {**batch, "labels": torch.as_tensor(rows["label"], dtype=torch.int64)}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        logits = at_least_fp32(outputs(model, batch).logits)
        loss_sum = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        return loss_sum, (labels != IGNORED_LABEL).sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits, [samples, classes]."""
        return at_least_fp32(outputs(model, batch).logits)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        labels = torch.tensor(table.column("label"))
        return {name: METRICS[name](predictions, labels) for name in self._metric_names(predictions.shape[-1])}

    def evaluation_data(self, model: Pretrained, file: str | None) -> Corpus:
        names = model.label_names()
        given = getattr(self.data, "label_names", None) or ()
        if all(name == f"LABEL_{number}" for number, name in enumerate(names)) and len(given) == len(names):
            names = tuple(given)  # the model has no names
        else:
            spelling = {name.casefold(): name for name in given}
            names = tuple(spelling.get(name.casefold(), name) for name in names)
        read_part = evaluation_reader(self.data, "read_part")
        part: LabelledText = read_part("eval", file, None if file is not None else names)
        source = file or getattr(self.data, "eval", None) or getattr(self.data, "hub_name", None) or str(self.data)
        return Corpus(LabelledText([], []), part, source, names)

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """For each text: the class that is most probable, the true one if it is known, and all probabilities."""
        corpus = self.data.read()
        part, names = corpus.eval, corpus.label_names
        shares = predictions.softmax(-1)
        return {
            "text": part.texts,
            **({} if part.pairs is None else {"pair": part.pairs}),
            "predicted": [names[number] for number in shares.argmax(-1)],
            **({} if part.labels is None else {"label": [names[number] for number in part.labels]}),
            **{f"probability_{name}": shares[:, number].tolist() for number, name in enumerate(names)},
        }
