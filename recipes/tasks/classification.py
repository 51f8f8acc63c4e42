"""Classify sequences: a labelled text source, a model source, and what a batch, a loss and a metric are for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.models.transformer import ModelSource, check_model, notes_of, outputs, save, text_batch, widened
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.data.table import Table, write_table
from runner.errors import UserError, did_you_mean

#: How batches are padded; transformers' names.
_PADDINGS = ("longest", "max_length")

#: Samples that are tokenised together: a tokenizer keeps far more of each than the numbers that are stored.
_AT_ONCE = 10_000


@dataclass(frozen=True)
class LabelledText:
    """One part of a data set: texts and their classes, numbered from 0. `pairs`: the second text of each sample."""

    texts: list[str]
    labels: list[int]
    pairs: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation part. `source`: where they came from, in words."""

    train: LabelledText
    eval: LabelledText
    source: str

    def __post_init__(self) -> None:
        assert (self.train.pairs is None) == (self.eval.pairs is None)

    @property
    def classes(self) -> int:
        return max(self.train.labels) + 1

    @property
    def digest(self) -> str:
        """A hash over every text and label, in order."""
        content = [self.train.texts, self.train.labels, self.eval.texts, self.eval.labels]
        pairs = [part.pairs for part in (self.train, self.eval) if part.pairs is not None]
        return hashlib.sha256(json.dumps([*content, *pairs]).encode()).hexdigest()


class TextSource(Protocol):
    """Where labelled texts come from.

    A source that knows the size of data which are not here may have a method `expected_sizes`: samples to train on and
    to evaluate, and who says so, tuple[int, int, str], or None.
    """

    def read(self) -> Corpus:
        """Read and check the data. Raises UserError, Unavailable for data that are not here."""
        ...


class ClassifierSource(ModelSource, Protocol):
    def build_classifier(self, classes: int, vocabulary: int, pad_id: int) -> nn.Module:
        """A transformers model for sequence classification, in fp32."""
        ...


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    from sklearn.metrics import accuracy_score

    return 100 * float(accuracy_score(labels, logits.argmax(-1)))


def _matthews(logits: Tensor, labels: Tensor) -> float:
    from sklearn.metrics import matthews_corrcoef

    return 100 * float(matthews_corrcoef(labels, logits.argmax(-1)))


def _macro_f1(logits: Tensor, labels: Tensor) -> float:
    from sklearn.metrics import f1_score

    return 100 * float(f1_score(labels, logits.argmax(-1), average="macro", zero_division=0.0))


def _loss(logits: Tensor, labels: Tensor) -> float:
    return float(cross_entropy(logits, labels))


#: Name in configuration and MLflow -> function of (logits [samples, classes], labels [samples]).
METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": _accuracy,
    "matthews": _matthews,
    "macro_f1": _macro_f1,
    "loss": _loss,
}


@dataclass(frozen=True)
class SequenceClassification:
    """One label per text, or per pair of texts.

    `max_length`: tokens kept of a text, special tokens included; of a pair the longer text is cut first. `padding`:
    `longest` pads a batch to its longest row, or where the core says, `max_length` to that many tokens always.
    `metrics_shown`: names from `METRICS`; the loss is always added.
    """

    data: TextSource
    model: ClassifierSource
    max_length: int = 128
    metrics_shown: Sequence[str] = field(default=("accuracy",))
    padding: str = "longest"

    def __post_init__(self) -> None:
        if not isinstance(self.max_length, int) or self.max_length < 1:
            raise UserError(f"recipe.max_length={self.max_length} cannot be: it must be at least 1 token")
        if self.padding not in _PADDINGS:
            raise UserError(f"recipe.padding={self.padding} is no padding{did_you_mean(str(self.padding), _PADDINGS)}")
        shown = self.metrics_shown
        if not isinstance(shown, (list, tuple)) or not all(isinstance(name, str) for name in shown):
            raise UserError(f"recipe.metrics_shown={shown} cannot be: give a list of names, such as [accuracy]")
        for name in self.metrics_shown:
            if name not in METRICS:
                raise UserError(f"recipe.metrics_shown has no metric '{name}'{did_you_mean(name, METRICS)}")

    @property
    def metric_names(self) -> Sequence[str]:
        return [*dict.fromkeys([*self.metrics_shown, "loss"])]

    @property
    def minimised(self) -> Sequence[str]:
        return ["loss"]

    @property
    def has_dropout(self) -> bool:
        return self.model.has_dropout

    @property
    def notes(self) -> Sequence[str]:
        """What is to be known of a run beside its results, a sentence each."""
        return notes_of(self.model)

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        return DataFacts(len(corpus.train), len(corpus.eval), corpus.digest, corpus.source)

    def expected_facts(self) -> DataFacts | None:
        """What `runner.plan` can say without the data."""
        sizes: tuple[int, int, str] | None = getattr(self.data, "expected_sizes", lambda: None)()
        return None if sizes is None else DataFacts(sizes[0], sizes[1], "not read", sizes[2], estimated=True)

    def check_model(self) -> None:
        check_model(self.model, "recipe.max_length", self.max_length)

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        key = {
            "task": "classification",
            "data": facts.digest,
            "tokenizer": self.model.tokenizer_identity(),
            "max_length": self.max_length,
        }
        return cache.get(key, lambda folder: self._tokenize(folder, facts))

    def _tokenize(self, folder: Path, facts: DataFacts) -> None:
        corpus = self.data.read()
        if corpus.digest != facts.digest:
            # The entry is named by the facts: other content under that name would mislead every later run.
            raise UserError(f"the data ({facts.source}) changed after the run was planned: start it again")
        tokenizer = self.model.tokenizer([*corpus.train.texts, *(corpus.train.pairs or ())])
        special = tokenizer.num_special_tokens_to_add(pair=corpus.train.pairs is not None)
        if self.max_length <= special:  # tokenizers would then cut nothing at all
            raise UserError(
                f"recipe.max_length={self.max_length} leaves no room for text beside the tokenizer's {special} special "
                f"tokens: set recipe.max_length={special + 1} or more"
            )
        for name, part in (("train", corpus.train), ("eval", corpus.eval)):
            tokens = _tokenized(tokenizer, part, self.max_length)
            ids = tokens["input_ids"]
            lengths = [len(row) for row in ids]
            if 0 in lengths:
                row = lengths.index(0)
                raise UserError(
                    f"the data ({facts.source}) have a text that comes to no token, {part.texts[row]!r}, row {row} of "
                    f"the {name} part: leave it out"
                )
            columns: dict[str, Sequence[Any]] = {
                **tokens,
                "label": part.labels,
                "length": lengths,
                "label_count": [1] * len(ids),
            }
            write_table(folder / name, columns)
        properties = {
            "classes": corpus.classes,
            "vocabulary": len(tokenizer),
            "pad_id": tokenizer.pad_token_id,
        }
        (folder / "properties.json").write_text(json.dumps(properties))
        tokenizer.save_pretrained(folder / "tokenizer")

    def build_model(self, prepared: Prepared) -> nn.Module:
        of = prepared.properties
        return self.model.build_classifier(of["classes"], of["vocabulary"], of["pad_id"])

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        if self.padding == "max_length":
            length = self.max_length
        batch = text_batch(rows, prepared.properties["pad_id"], length)
        return {**batch, "labels": torch.as_tensor(rows["label"], dtype=torch.int64)}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        loss_sum = cross_entropy(
            widened(outputs(model, batch).logits), labels, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return loss_sum, (labels != IGNORED_LABEL).sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits, [samples, classes]."""
        return widened(outputs(model, batch).logits)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        labels = torch.tensor(table.column("label"))
        return {name: METRICS[name](predictions, labels) for name in self.metric_names}

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        save(model, prepared, folder)


def _tokenized(tokenizer: Any, part: LabelledText, max_length: int) -> dict[str, list[np.ndarray]]:
    """Tokens of each sample, and for pairs their types where the tokenizer makes any; rows of int32.

    A text by itself has no types: all would be 0, which is what models take for granted.
    """
    made: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(part), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        pairs = None if part.pairs is None else part.pairs[some]
        encoded = tokenizer(part.texts[some], pairs, truncation="longest_first", max_length=max_length)
        for name in ("input_ids",) if pairs is None else ("input_ids", "token_type_ids"):
            if name in encoded:
                made.setdefault(name, []).extend(np.asarray(row, dtype=np.int32) for row in encoded[name])
    return made
