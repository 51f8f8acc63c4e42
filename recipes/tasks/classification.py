"""Sequence classification and regression: classes of, or a number for, each text or pair of texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from torch import Tensor, nn

from recipes.models.pretrained import Pretrained
from recipes.tasks.pretrained_recipe import (
    at_least_fp32,
    evaluation_reader,
    evaluation_source,
    saved_label_names,
    set_label_names,
)
from recipes.tasks.problem_recipe import ProblemRecipe
from recipes.tasks.problems import PROBLEMS, Labels, Problem
from recipes.tasks.splits import Splits
from recipes.tasks.transformer_recipe import (
    Tokenised,
    TransformerRecipe,
    check_room,
    chunks,
    count_truncated,
    outputs,
    text_batch,
    truncation,
)
from runner.data.cache import Cache, Progress
from runner.data.recipe import Batch, DataFacts, Prepared
from runner.data.table import Table
from runner.errors import UserError, require


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
class Corpus(Splits[LabelledText]):
    """`names`: of the classes in the order of their numbers; None if they have only numbers."""

    names: Sequence[str] | None = None

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes, "0", "1", … if they have only numbers; none if the labels are no classes."""
        labels: Any = self.train.labels or (0,)
        if self.names is not None or isinstance(labels[0], float):
            return tuple(self.names or ())
        numbers = itertools.chain.from_iterable(labels) if isinstance(labels[0], tuple) else labels
        return tuple(map(str, range(max(numbers, default=0) + 1)))

    def content(self) -> Iterable[bytes]:
        labelled = [self.train.texts, self.train.labels, self.eval.texts, self.eval.labels]
        pairs = [part.pairs for part in (self.train, self.eval) if part.pairs is not None]
        yield json.dumps([*labelled, *pairs]).encode()

    def train_texts(self) -> Sequence[str]:
        return [*self.train.texts, *(self.train.pairs or ())]


class TextSource(Protocol):
    def read(self) -> Corpus:
        """Read and check the data. Raises UserError, and Unavailable for data that are not on this machine."""
        ...

    def read_part(
        self, part: Literal["train", "eval"], file: str | None = None, label_names: Sequence[str] | None = None
    ) -> LabelledText:
        """One part by itself, from `file` if given. `label_names`: of the classes; None reads no labels."""
        ...


@dataclass(frozen=True)
class SequenceClassification(ProblemRecipe, TransformerRecipe[Corpus]):
    """Classes of, or a number for, each text or pair of texts.

    `problem`: `single_label` (one of several classes), `multi_label` (any number of them) or `regression` (a number).
    `max_length`: tokens kept of a text, special tokens included; of a pair the longer text is truncated first.
    `padding`: as in every task, or `max_length` to pad always to that many tokens. `metrics_shown`: of those of the
    problem, or None for those that fit the number of classes; the loss is always added.
    """

    task: ClassVar[str] = "sequence classification"
    head: ClassVar[str] = "SequenceClassification"
    paddings: ClassVar[Sequence[str]] = ("none", "longest", "max_length")

    data: TextSource
    max_length: int = 128
    metrics_shown: Sequence[str] | None = ("accuracy",)
    problem: str = "single_label"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"use one of {', '.join(PROBLEMS)}"
        require(self.problem in PROBLEMS, "recipe.problem", self.problem, rule)
        of_data = getattr(self.data, "problem", self.problem)
        rule = f"it must be recipe.problem={self.problem}; choose the recipe multi_label or text_regression instead"
        require(of_data == self.problem, "recipe.data.problem", of_data, rule)
        self.check_metrics_shown()
        self.check_label_smoothing()

    @property
    def targets(self) -> Problem:
        return PROBLEMS[self.problem]

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        self.check_metrics(corpus.label_names, corpus.eval.labels)
        check_room(
            "recipe.max_length",
            self.max_length,
            lambda: self.model.tokenizer(corpus.train_texts()),
            pair=corpus.eval.pairs is not None,
        )
        self.model.check_head(self.head, self.targets.outputs(corpus.label_names))
        return DataFacts(
            len(corpus.train),
            len(corpus.eval),
            corpus.digest,
            corpus.source,
            label_names=corpus.label_names,
            notes=corpus.notes,
            constant=self.targets.constant(corpus.eval.labels),
        )

    def tokenised_by(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "problem": self.problem}

    def tokenise(self, splits: Corpus, tokenizer: Any, progress: Progress) -> Tokenised:
        tables, lost = [], []
        for name, part in (("train", splits.train), ("eval", splits.eval)):
            columns = self._columns(tokenizer, part, splits.label_names, progress)
            lengths = list(columns["length"])
            if 0 in lengths:
                text = part.texts[lengths.index(0)]
                raise UserError(f"recipe.data.{name} has a text without a single token, {text!r}: remove it")
            lost.append((count_truncated(tokenizer, part.texts, lengths, self.max_length, part.pairs), len(part)))
            tables.append(columns)
        truncated = truncation("texts", "recipe.max_length", self.max_length, *lost)
        return Tokenised(tables[0], tables[1], {"label_names": splits.label_names, "truncated": truncated})

    def _columns(
        self, tokenizer: Any, part: LabelledText, names: Sequence[str], progress: Progress
    ) -> dict[str, Sequence[Any]]:
        columns: dict[str, list[Any]] = {}
        for some in chunks(len(part), progress):
            pairs = None if part.pairs is None else part.pairs[some]
            encoded = tokenizer(part.texts[some], pairs, truncation="longest_first", max_length=self.max_length)
            # The types of a single text would all be 0, which is the models' default.
            for name in ("input_ids",) if pairs is None else ("input_ids", "token_type_ids"):
                if name in encoded:
                    columns.setdefault(name, []).extend(np.asarray(row, dtype=np.int32) for row in encoded[name])
        lengths = [len(row) for row in columns.get("input_ids", ())]
        return {**columns, **self.targets.columns(part.labels, len(part), names), "length": lengths}

    def build_model(self, prepared: Prepared) -> nn.Module:
        names = prepared.properties["label_names"]
        model = self.built(prepared, num_labels=self.targets.outputs(names))
        config: Any = model.config
        config.problem_type = self.targets.problem_type
        if names:
            set_label_names(config, names)
        return self.unpad(model, prepared)

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        if self.padding == "max_length":
            length = self.max_length
        batch = text_batch(rows, prepared.properties["pad_id"], length)
        return {**batch, "labels": self.targets.tensor(rows["label"])}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.training_loss(at_least_fp32(outputs(model, batch).logits), batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits, [samples, classes], or [samples, 1] of numbers."""
        return at_least_fp32(outputs(model, batch).logits)

    def evaluation_data(self, model: Pretrained, file: str | None) -> Corpus:
        self.check_saved(model)
        names = () if self.problem == "regression" else saved_label_names(model, self.data)
        read_part = evaluation_reader(self.data, "read_part")
        part: LabelledText = read_part("eval", file, None if file is not None else names)
        source = evaluation_source(self.data, file)
        return Corpus(LabelledText([], []), part, source, names, notes=part.notes)

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """A row for each text: what is predicted, the label if it is known, and the probabilities of all classes."""
        corpus = self.data.read()
        part = corpus.eval
        return {
            "text": part.texts,
            **({} if part.pairs is None else {"pair": part.pairs}),
            **self.targets.predictions(predictions, part.labels, corpus.label_names),
        }
