"""A recipe whose loss is over labelled tokens, very unevenly spread over rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from recipes.tasks.classification import SequenceClassification
from recipes.tasks.problems import SingleLabel
from runner.data.cache import Cache
from runner.data.layout import padded
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.data.table import ROW, Table, write_table

#: Added to TINY of tests/replicas.py (or to `recipe=acceptability`): the same corpus and sizes, labels on tokens.
TOKENS = [
    "recipe._target_=tests.token_recipe.TokenLabels",
    "recipe.metrics_shown=[accuracy]",
    "trusted_packages=[tests]",
]


def token_labels(row: int, ids: Sequence[int]) -> list[int]:
    """Whether a token's id is odd: told for all tokens of one row in ten, for one token of five, for none of four."""
    told = range(len(ids)) if row % 10 == 0 else [row % len(ids)] if row % 2 else []
    return [int(token) % 2 if place in told else IGNORED_LABEL for place, token in enumerate(ids)]


@dataclass(frozen=True)
class TokenLabels(SequenceClassification):
    """Odd or even: one label for some of the tokens of a text, `IGNORED_LABEL` for the others."""

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        key = {"task": "tokens", "data": facts.digest, "max_length": self.max_length}
        return cache.get(key, lambda folder: self._tokenize(folder, facts))

    def _tokenize(self, folder: Path, facts: DataFacts) -> None:
        corpus = self.data.read()
        tokenizer = self.model.tokenizer(corpus.train.texts)
        for name, part in (("train", corpus.train), ("eval", corpus.eval)):
            ids = tokenizer(part.texts, truncation=True, max_length=self.max_length)["input_ids"]
            labels = [token_labels(row, tokens) for row, tokens in enumerate(ids)]
            columns = {
                "input_ids": ids,
                "labels": labels,
                "length": [len(row) for row in ids],
                "label_count": [sum(label != IGNORED_LABEL for label in row) for row in labels],
            }
            write_table(folder / name, columns)
        properties = {"vocabulary": len(tokenizer), "pad_id": tokenizer.pad_token_id}
        (folder / "properties.json").write_text(json.dumps(properties))
        tokenizer.save_pretrained(folder / "tokenizer")

    def build_model(self, prepared: Prepared) -> nn.Module:
        from transformers import BertForTokenClassification

        # The sizes are those of the model source, which builds a classifier of whole texts.
        config = self.built(prepared, num_labels=2).config
        module: nn.Module = BertForTokenClassification(config)
        return module

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        batch = super().collate({**rows, "label": [0] * len(rows[ROW])}, prepared, length)
        return {**batch, "labels": padded(rows["labels"], IGNORED_LABEL, length)}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, labels = _logits(model, batch).flatten(0, 1), batch["labels"].flatten()
        loss_sum = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        return loss_sum, (labels != IGNORED_LABEL).sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits, [rows, max_length, 2]: 0 after a row's end, since batches differ in length."""
        logits = _logits(model, batch) * batch["attention_mask"][..., None]
        return pad(logits, (0, 0, 0, self.max_length - logits.shape[1]))

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        labels = padded(table[range(len(table))]["labels"], IGNORED_LABEL, self.max_length)
        shown = labels != IGNORED_LABEL
        return {name: SingleLabel.metrics[name](predictions[shown], labels[shown]) for name in self.metric_names}


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits if logits.dtype is torch.float64 else logits.float()
