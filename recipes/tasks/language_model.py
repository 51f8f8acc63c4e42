"""Predict the next token: a source of documents, a model source, and perplexity over all tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from recipes.models.transformer import ModelSource, check_model, notes_of, outputs, save, text_batch, widened
from recipes.tasks.packing import PACKINGS, Size, expected_rows, packed, size_of, token_ids
from runner.data.cache import Cache
from runner.data.padding import padded
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.data.table import Table, write_table
from runner.errors import Unavailable, UserError, did_you_mean

_SEES_AHEAD = (
    "sees the tokens it is to predict: give a model that reads from left to right, such as recipe.model.name=gpt2"
)

#: What logits may differ by, as a share of the largest, when a later token is another one. Rounding gives 1e-6.
_CAUSAL = 1e-4


@dataclass(frozen=True)
class Documents:
    """Training and evaluation part, in order. `source`: where they came from, in words."""

    train: Sequence[str]
    eval: Sequence[str]
    source: str

    @property
    def digest(self) -> str:
        """A hash over every document of both parts, in order."""
        digest = hashlib.sha256()
        for part in (self.train, self.eval):
            digest.update(b"%d documents;" % len(part))
            for text in part:
                content = text.encode()
                digest.update(b"%d:" % len(content) + content)
        return digest.hexdigest()


@dataclass(frozen=True)
class ExpectedText:
    """What is known of text that is not here. `source`: how, in words."""

    train: Size
    eval: Size
    source: str


class DocumentSource(Protocol):
    def read(self) -> Documents:
        """Read and check the data; no part is empty. Raises UserError, and Unavailable for data that are not here."""
        ...

    def expected(self) -> ExpectedText | None:
        """What is known of data that are not here; None if that is nothing."""
        ...


class LanguageModelSource(ModelSource, Protocol):
    def sees_both_ways(self) -> bool:
        """Whether it is known, before the model is loaded, that it sees the tokens it would have to predict."""
        ...

    def build_language_model(self, vocabulary: int, pad_id: int) -> nn.Module:
        """A transformers model for causal language modelling, in fp32."""
        ...


@dataclass(frozen=True)
class CausalLanguageModel:
    """Every token of a row but its first is predicted from those before it.

    `block_size`: tokens of the longest row. `packing`: `blocks` joins all documents and cuts the whole into blocks;
    `documents` gives each document rows of its own.
    """

    data: DocumentSource
    model: LanguageModelSource
    block_size: int = 128
    packing: str = "blocks"

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise UserError(f"recipe.packing={self.packing} is no packing{did_you_mean(self.packing, PACKINGS)}")
        if self.block_size < 2:
            raise UserError(
                f"recipe.block_size={self.block_size} cannot be: it must be at least 2 tokens, the second of which is "
                "predicted from the first"
            )

    @property
    def metric_names(self) -> Sequence[str]:
        return ["perplexity", "loss"]

    @property
    def minimised(self) -> Sequence[str]:
        return ["perplexity", "loss"]

    @property
    def has_dropout(self) -> bool:
        return self.model.has_dropout

    @property
    def notes(self) -> Sequence[str]:
        return notes_of(self.model)

    def facts(self, cache: Cache) -> DataFacts:
        documents = self.data.read()
        self.check_model()  # before anything is tokenised, which only then tells how many rows there are
        digest = documents.digest  # a hash over all texts
        prepared = Prepared.load(self._entry(cache, digest, lambda: documents))
        rows = len(prepared.train), len(prepared.eval)
        groups = (_last_group(prepared.train) + 1, _last_group(prepared.eval) + 1) if self._grouped else None
        return self._facts(rows, groups, digest, documents.source)

    def expected_facts(self) -> DataFacts | None:
        """What `runner.plan` can say without data, or without the tokenizer that cuts them."""
        try:
            documents = self.data.read()
        except Unavailable:
            digest, known = "not read", self.data.expected()
        else:
            source = f"{documents.source}, and tokens from the number of bytes"
            digest = documents.digest
            known = ExpectedText(size_of(documents.train), size_of(documents.eval), source)
        if known is None:
            return None
        train, evaluation = known.train, known.eval
        rows = self._expected_rows(train), self._expected_rows(evaluation)
        groups = (train.documents, evaluation.documents) if self._grouped else None
        return self._facts(rows, groups, digest, known.source, estimated=True)

    @property
    def _grouped(self) -> bool:
        return self.packing == "documents"

    def _expected_rows(self, size: Size) -> int:
        return expected_rows(size, self.packing, self.block_size)

    def _facts(
        self, rows: tuple[int, int], groups: tuple[int, int] | None, digest: str, source: str, estimated: bool = False
    ) -> DataFacts:
        facts = DataFacts(*rows, digest, source, PACKINGS[self.packing], estimated=estimated)
        if groups is None:
            return facts
        return dataclasses.replace(facts, groups="documents", train_groups=groups[0], eval_groups=groups[1])

    def check_model(self) -> None:
        check_model(self.model, "recipe.block_size", self.block_size)
        if self.model.sees_both_ways():
            raise UserError(f"recipe.model {_SEES_AHEAD}")

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        return self._entry(cache, facts.digest, self.data.read)

    def _entry(self, cache: Cache, digest: str, read: Callable[[], Documents]) -> Path:
        key = {
            "task": "causal language model",
            "data": digest,
            "tokenizer": self.model.tokenizer_identity(),
            "block_size": self.block_size,
            "packing": self.packing,
        }
        return cache.get(key, lambda folder: self._tokenize(folder, read(), digest))

    def _tokenize(self, folder: Path, documents: Documents, digest: str) -> None:
        if documents.digest != digest:
            # The entry is named by the facts: other content under that name would mislead every later run.
            raise UserError(f"the data ({documents.source}) changed after the run was planned: start it again")
        tokenizer = self.model.tokenizer(documents.train)
        for name, texts in (("train", documents.train), ("eval", documents.eval)):
            columns = packed(list(token_ids(tokenizer, texts)), self.packing, self.block_size)
            if not columns["input_ids"]:
                raise UserError(
                    f"recipe.data.{name} has no row of two tokens, so that there is nothing to predict: give more text"
                )
            write_table(folder / name, columns)
        properties = {"vocabulary": len(tokenizer), "pad_id": tokenizer.pad_token_id}
        (folder / "properties.json").write_text(json.dumps(properties))
        tokenizer.save_pretrained(folder / "tokenizer")

    def build_model(self, prepared: Prepared) -> nn.Module:
        of = prepared.properties
        model = self.model.build_language_model(of["vocabulary"], of["pad_id"])
        if sees_ahead(model):
            raise UserError(f"recipe.model is a {type(model).__name__}, which {_SEES_AHEAD}")
        return model

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        labels = padded(rows["input_ids"], IGNORED_LABEL, length)
        labels[:, 0] = IGNORED_LABEL  # nothing stands before it
        return {**text_batch(rows, prepared.properties["pad_id"], length), "labels": labels}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, is_target = _losses(model, batch)
        return losses.sum(), is_target.sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each row and how many targets it has, fp64 of shape [rows, 2]."""
        losses, is_target = _losses(model, batch)
        return torch.stack([losses.double().sum(1), is_target.sum(1).double()], dim=1)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        """The loss of a target in nats, over all targets and not a mean over rows; perplexity is its exponential."""
        loss_sum, targets = predictions.double().sum(0)
        loss = loss_sum / targets
        return {"perplexity": float(loss.exp()), "loss": float(loss)}

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        save(model, prepared, folder)


def _last_group(table: Table) -> int:
    return int(table.column("group")[-1])


def _losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """At each place, [rows, length]: the loss of the next token, 0 where that is no target; and whether it is one."""
    # It is the labels that are shifted: logits without their last place would be a copy, rows × length × vocabulary.
    labels = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    logits = _logits(model, batch)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return losses.view_as(labels), labels != IGNORED_LABEL


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    """[rows, length, vocabulary], in fp32 or fp64."""
    # Nothing is generated, so that keys and values need not be kept.
    return widened(outputs(model, batch, use_cache=False).logits)


@torch.no_grad()
def sees_ahead(model: nn.Module) -> bool:
    """Whether logits depend on later tokens, as those of a model made to fill gaps do.

    Its perplexity would come near 1 and mean nothing.
    """
    was_training = model.training
    model.eval()
    ids = torch.tensor([[0, 1, 0], [0, 1, 1]])
    logits = _logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[:, :2]
    model.train(was_training)
    return bool((logits[0] - logits[1]).abs().max() > _CAUSAL * logits.abs().max())
