"""Causal language modelling: predict the next token of plain text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from recipes.models.pretrained import NOT_CAUSAL
from recipes.tasks.generation import token_losses
from recipes.tasks.pretrained_recipe import at_least_fp32, check_label_smoothing
from recipes.tasks.row_metrics import OF_LOSS, row_metrics
from recipes.tasks.splits import DataSource, Splits
from recipes.tasks.transformer_recipe import Tokenised, TransformerRecipe, chunks, outputs, text_batch
from runner.data.cache import Cache, Progress, silent
from runner.data.layout import padded
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.data.table import Table
from runner.errors import UserError, require

#: `packing` -> what a row is, in the plural.
_UNITS = {"blocks": "blocks", "documents": "rows"}

#: Largest change of logits, as a share of the largest logit, when a later token changes. Rounding causes 1e-6.
_CAUSAL = 1e-4


@dataclass(frozen=True)
class Documents(Splits[Sequence[str]]):
    def content(self) -> Iterable[bytes]:
        for part in (self.train, self.eval):
            yield b"%d documents;" % len(part)
            for text in part:
                content = text.encode()
                yield b"%d:" % len(content) + content

    def train_texts(self) -> Sequence[str]:
        return self.train


@dataclass(frozen=True)
class CausalLanguageModel(TransformerRecipe[Documents]):
    """Every token of a row but the first is predicted from those before it.

    `block_size`: tokens of the longest row. `packing`: `blocks` joins all documents and cuts the result into blocks;
    `documents` gives each document its own rows.
    """

    task: ClassVar[str] = "causal language model"
    head: ClassVar[str] = "CausalLM"
    limits: ClassVar[Sequence[str]] = ("block_size",)
    least_tokens: ClassVar[int] = 2

    data: DataSource[Documents]
    block_size: int = 128
    packing: str = "blocks"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_smoothing(self.label_smoothing)
        require(self.packing in _UNITS, "recipe.packing", self.packing, f"use one of {', '.join(_UNITS)}")

    @property
    def metric_names(self) -> Sequence[str]:
        return ["perplexity", "loss"]

    @property
    def minimised(self) -> Sequence[str]:
        return ["perplexity", "loss"]

    def facts(self, cache: Cache) -> DataFacts:
        documents = self.data.read()
        digest = documents.digest
        prepared = self.tokenised(cache, documents, digest)
        rows = len(prepared.train), len(prepared.eval)
        facts = DataFacts(*rows, digest, documents.source, _UNITS[self.packing])
        if self.packing == "blocks":
            return facts
        parts = (prepared.train, prepared.eval)
        train, evaluation = (int(table.column("group").max(initial=-1)) + 1 for table in parts)
        return dataclasses.replace(facts, groups="documents", train_groups=train, eval_groups=evaluation)

    def tokenised_by(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "packing": self.packing}

    def tokenise(self, splits: Documents, tokenizer: Any, progress: Progress) -> Tokenised:
        tables = []
        for name, texts in (("train", splits.train), ("eval", splits.eval)):
            columns = packed(list(token_ids(tokenizer, texts, progress)), self.packing, self.block_size)
            if texts and not columns["input_ids"]:
                raise UserError(f"recipe.data.{name} has no row of two tokens, so nothing to predict: give more text")
            tables.append(columns)
        return Tokenised(tables[0], tables[1], {})

    def build_model(self, prepared: Prepared) -> nn.Module:
        return self.unpad(checked_causal(self.built(prepared)), prepared)

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        labels = padded(rows["input_ids"], IGNORED_LABEL, length)
        labels[:, 0] = IGNORED_LABEL  # there is no token before it
        return {**text_batch(rows, prepared.properties["pad_id"], length), "labels": labels}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, is_target = _losses(model, batch, self.label_smoothing)
        return losses.sum(), is_target.sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each row and its number of targets, fp64 of shape [rows, 2]."""
        losses, is_target = _losses(model, batch)
        return torch.stack([losses.double().sum(1), is_target.sum(1).double()], dim=1)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        """The mean loss over all targets, in nats, and its exponential, the perplexity."""
        loss_sum, targets = predictions.double().sum(0)
        loss = loss_sum / targets
        return {"perplexity": float(loss.exp()), "loss": float(loss)}

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        """Values of documents where they are known: their parts share a style."""
        groups = table.groups()
        if groups is not None:
            of_documents = torch.zeros((int(groups.max()) + 1, predictions.shape[1]), dtype=torch.float64)
            predictions = of_documents.index_add(0, torch.tensor(groups), predictions.double())
        return row_metrics(predictions, OF_LOSS)

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """Each row's document, if it has one; its tokens; the mean loss of all but the first; the perplexity."""
        groups = table.groups()
        losses = predictions[:, 0] / predictions[:, 1]
        return {
            **({} if groups is None else {"document": groups.tolist()}),
            "tokens": table.column("length").tolist(),
            "loss": losses.tolist(),
            "perplexity": losses.exp().tolist(),
        }


def token_ids(tokenizer: Any, texts: Sequence[str], progress: Progress = silent) -> Iterator[np.ndarray]:
    """The tokens of each text and then the end-of-text token; int32 of shape [tokens].

    A tokenizer without one (`eos`) ends texts with its separator (`sep`). Raises UserError if it has neither.
    """
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is None:
        raise UserError(
            "recipe.model has a tokenizer with neither an end-of-text token nor a separator, one of which has to end "
            "documents: set eos_token in its tokenizer_config.json"
        )
    for some in chunks(len(texts), progress):
        # verbose would warn of texts longer than the model's positions, but they are cut later.
        encoded = tokenizer(list(texts[some]), return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            # Some tokenizers add the end token themselves.
            yield np.asarray(ids if ids and ids[-1] == end else [*ids, end], dtype=np.int32)


def packed(documents: Sequence[np.ndarray], packing: str, block_size: int) -> dict[str, list[Any]]:
    """The columns of a table of these documents' tokens, with rows of at most `block_size` tokens.

    `blocks` joins the documents, so that only the last row may be shorter. `documents` cuts each one separately, and a
    column `group` numbers the documents that have rows, from 0.
    """
    groups: dict[str, list[int]] = {}
    if packing == "blocks":
        rows = _cut(np.concatenate([np.zeros(0, dtype=np.int32), *documents]), block_size)
    else:
        of_document = [pieces for document in documents if (pieces := _cut(document, block_size))]
        rows = [row for pieces in of_document for row in pieces]
        groups["group"] = [number for number, pieces in enumerate(of_document) for _ in pieces]
    lengths = [len(row) for row in rows]
    return {"input_ids": rows, "length": lengths, "label_count": [length - 1 for length in lengths], **groups}


def _cut(tokens: np.ndarray, block_size: int) -> list[np.ndarray]:
    """Pieces of `block_size` tokens; the last may be shorter, and is dropped if a single token, which has no target."""
    pieces = (tokens[start : start + block_size] for start in range(0, len(tokens), block_size))
    return [piece for piece in pieces if len(piece) > 1]


def checked_causal(model: nn.Module) -> nn.Module:
    """The model. Raises UserError for one that is not causal."""
    if sees_ahead(model):
        raise UserError(f"recipe.model is a {type(model).__name__}, which {NOT_CAUSAL}")
    return model


def _losses(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss of the next token at each position, [rows, length], 0 if that is no target; and whether it is one."""
    return token_losses(next_token_logits(model, batch), next_labels(batch), label_smoothing)


def next_labels(batch: Batch) -> Tensor:
    """The label of the next token at each position, [rows, length]: logits without the last would be a large copy."""
    return pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)


def next_token_logits(model: nn.Module, batch: Batch) -> Tensor:
    """[rows, length, vocabulary], in fp32 or fp64."""
    return at_least_fp32(outputs(model, batch, use_cache=False).logits)


@torch.no_grad()
def sees_ahead(model: nn.Module) -> bool:
    """Whether logits depend on later tokens, as in masked language models. The perplexity would mean nothing."""
    was_training = model.training
    model.eval()
    ids = torch.tensor([[0, 1, 0], [0, 1, 1]])
    logits = next_token_logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[:, :2]
    model.train(was_training)
    return bool((logits[0] - logits[1]).abs().max() > _CAUSAL * logits.abs().max())
