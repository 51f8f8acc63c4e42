"""Sequence classification and regression: classes of, or a number for, each text or pair of texts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor, nn

from recipes.models.pretrained import Pretrained
from recipes.tasks.problems import PROBLEMS, Labels, Problem
from recipes.tasks.transformer_recipe import (
    ModelSource,
    TransformerRecipe,
    at_least_fp32,
    check_metrics_shown,
    check_model,
    check_padding,
    check_room,
    check_unchanged,
    count_truncated,
    evaluation_reader,
    evaluation_source,
    outputs,
    saved_label_names,
    set_label_names,
    text_batch,
    write_prepared,
)
from runner.data.cache import Cache, Progress
from runner.data.recipe import Batch, DataFacts, Prepared
from runner.data.table import Table
from runner.errors import UserError, require

#: Samples tokenised together, to bound memory: a tokenizer keeps far more of each than its token ids.
_CHUNK = 10_000


@dataclass(frozen=True)
class LabelledText:
    """Texts and their labels; `labels` is None for texts to predict for.

    `pairs`: the second text of each sample. `notes`: what was inferred when they were read, in sentences.
    """

    texts: list[str]
    labels: Labels | None
    pairs: list[str] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation set. `source`: where they came from, for people.

    `names`: the names of the classes in the order of their numbers; None if they have only numbers. `leak`: a note, if
    they share samples.
    """

    train: LabelledText
    eval: LabelledText
    source: str
    names: Sequence[str] | None = None
    leak: tuple[str, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes, "0", "1", … if they have only numbers; none if the labels are no classes."""
        labels: Any = self.train.labels or (0,)
        if self.names is not None or isinstance(labels[0], float):
            return tuple(self.names or ())
        numbers = itertools.chain.from_iterable(labels) if isinstance(labels[0], tuple) else labels
        return tuple(map(str, range(max(numbers, default=0) + 1)))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.leak, *self.train.notes, *self.eval.notes)))

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
        """A transformers model for sequence classification with `classes` logits, in fp32."""
        ...

    def check_classes(self, classes: int) -> None:
        """Check that the model can have this number of classes. Raises UserError."""
        return


@dataclass(frozen=True)
class SequenceClassification(TransformerRecipe):
    """Classes of, or a number for, each text or pair of texts.

    `problem`: `single_label` (one of several classes), `multi_label` (any number of them) or `regression` (a number).
    `max_length`: tokens kept of a text, special tokens included; of a pair the longer text is truncated first.
    `padding`: as in every task, or `max_length` to pad always to that many tokens. `metrics_shown`: of those of the
    problem, or None for those that fit the number of classes; the loss is always added.
    """

    data: TextSource
    model: ClassifierSource
    max_length: int = 128
    metrics_shown: Sequence[str] | None = ("accuracy",)
    padding: str = "longest"
    problem: str = "single_label"

    def __post_init__(self) -> None:
        require(self.max_length >= 1, "recipe.max_length", self.max_length, "use at least 1 token")
        check_padding(self.padding, "max_length")
        rule = f"use one of {', '.join(PROBLEMS)}"
        require(self.problem in PROBLEMS, "recipe.problem", self.problem, rule)
        of_data = getattr(self.data, "problem", self.problem)
        rule = f"it must be recipe.problem={self.problem}; choose the recipe multi_label or text_regression instead"
        require(of_data == self.problem, "recipe.data.problem", of_data, rule)
        check_metrics_shown(self.metrics_shown, self._problem.metrics, f" of recipe.problem={self.problem}")

    @property
    def _problem(self) -> Problem:
        return PROBLEMS[self.problem]

    @property
    def metric_names(self) -> Sequence[str]:
        return self._metric_names(classes=2)

    def metrics_of(self, facts: DataFacts) -> Sequence[str]:
        return self._metric_names(len(facts.label_names))

    def _metric_names(self, classes: int) -> list[str]:
        shown = self._problem.fitting(classes) if self.metrics_shown is None else self.metrics_shown
        return [*dict.fromkeys([*shown, "loss"])]

    @property
    def minimised(self) -> Sequence[str]:
        return self._problem.minimised

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        self._check_metrics(corpus)
        check_room(self.max_length, lambda: self._tokenizer(corpus), pair=corpus.eval.pairs is not None)
        self.model.check_classes(self._problem.outputs(corpus.label_names))
        return DataFacts(
            len(corpus.train),
            len(corpus.eval),
            corpus.digest,
            corpus.source,
            label_names=corpus.label_names,
            notes=corpus.notes,
            constant=self._problem.constant(corpus.eval.labels),
        )

    def _check_metrics(self, corpus: Corpus) -> None:
        names = corpus.label_names
        why = self._problem.undefined(self._metric_names(len(names)), names, corpus.eval.labels)
        require(why is None, "recipe.metrics_shown", self.metrics_shown, why or "")

    def check_model(self) -> None:
        check_model(self.model, "recipe.max_length", self.max_length)

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        key = {
            "task": self._problem.problem_type,
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
        train, evaluation = (
            self._columns(tokenizer, part, corpus.label_names, progress) for part in (corpus.train, corpus.eval)
        )
        for name, part, columns in (("train", corpus.train, train), ("eval", corpus.eval, evaluation)):
            if 0 in columns["length"]:
                text = part.texts[list(columns["length"]).index(0)]
                raise UserError(f"recipe.data.{name} has a text without a single token, {text!r}: remove it")
        lost = {
            name: [count_truncated(tokenizer, part.texts, columns["length"], self.max_length, part.pairs), len(part)]
            for name, part, columns in (("train", corpus.train, train), ("eval", corpus.eval, evaluation))
        }
        truncated = {"what": "texts", "setting": "recipe.max_length", "tokens": self.max_length, **lost}
        write_prepared(folder, train, evaluation, tokenizer, label_names=facts.label_names, truncated=truncated)

    def _tokenizer(self, corpus: Corpus) -> Any:
        return self.model.tokenizer([*corpus.train.texts, *(corpus.train.pairs or ())])

    def _columns(
        self, tokenizer: Any, part: LabelledText, names: Sequence[str], progress: Progress
    ) -> dict[str, Sequence[Any]]:
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
        return {**columns, **self._problem.columns(part.labels, len(part), names), "length": lengths}

    def build_model(self, prepared: Prepared) -> nn.Module:
        of = prepared.properties
        names = of["label_names"]
        model = self.model.build_classifier(self._problem.outputs(names), of["vocabulary"], of["pad_id"])
        config: Any = model.config
        config.problem_type = self._problem.problem_type
        if names:
            set_label_names(config, names)
        return self.unpad(model, prepared)

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        if self.padding == "max_length":
            length = self.max_length
        batch = text_batch(rows, prepared.properties["pad_id"], length)
        return {**batch, "labels": self._problem.tensor(rows["label"])}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._problem.loss(at_least_fp32(outputs(model, batch).logits), batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits, [samples, classes], or [samples, 1] of numbers."""
        return at_least_fp32(outputs(model, batch).logits)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        labels = self._problem.tensor(table[range(len(table))]["label"])
        shown = self._metric_names(predictions.shape[-1])
        return {name: self._problem.metrics[name](predictions, labels) for name in shown}

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        labels = self._problem.tensor(table[range(len(table))]["label"])
        shown = self._metric_names(predictions.shape[-1])
        found = self._problem.row_metrics(predictions, labels)
        return {name: values for name, values in found.items() if name in shown}

    def evaluation_data(self, model: Pretrained, file: str | None) -> Corpus:
        saved = model.problem_type()
        if saved not in (None, self._problem.problem_type):
            rule = (
                f"{model.name} was trained for {saved}, by its config.json; choose the recipe that it was trained with"
            )
            raise UserError(f"recipe.problem={self.problem} is invalid: {rule}")
        names = () if self.problem == "regression" else saved_label_names(model, self.data)
        read_part = evaluation_reader(self.data, "read_part")
        part: LabelledText = read_part("eval", file, None if file is not None else names)
        source = evaluation_source(self.data, file)
        return Corpus(LabelledText([], []), part, source, names)

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """A row for each text: what is predicted, the label if it is known, and the probabilities of all classes."""
        corpus = self.data.read()
        part = corpus.eval
        return {
            "text": part.texts,
            **({} if part.pairs is None else {"pair": part.pairs}),
            **self._problem.predictions(predictions, part.labels, corpus.label_names),
        }
