"""Sequence to sequence: an encoder reads a text, and a decoder writes another, as in translation and summaries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recipes.models.pretrained import Pretrained
from recipes.tasks.generation import TextGeneration, write_texts
from recipes.tasks.transformer_recipe import (
    ModelSource,
    at_least_fp32,
    check_model,
    check_unchanged,
    evaluation_reader,
    outputs,
    text_batch,
    write_prepared,
)
from runner.data.cache import Cache, Progress
from runner.data.layout import padded
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.errors import require

#: Texts tokenised together: enough for all cores, few enough for the memory of long lists.
_CHUNK = 1000

#: Special tokens of a text, at most: loading the tokenizer to count them takes seconds.
_MOST_SPECIAL = 8


@dataclass(frozen=True)
class TextPairs:
    """Texts to read and to write; `targets` is None for texts to predict for."""

    sources: Sequence[str]
    targets: Sequence[str] | None

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class PairCorpus:
    """Training and evaluation set. `source`: where they came from, for people; `notes`: on them, in sentences."""

    train: TextPairs
    eval: TextPairs
    source: str
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A hash over every text of both sets, in order."""
        content = [[part.sources, part.targets] for part in (self.train, self.eval)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class PairSource(Protocol):
    def read(self) -> PairCorpus:
        """Read and check the data. Raises UserError, Unavailable."""
        ...

    def read_evaluation(self, file: str | None = None) -> PairCorpus:
        """The same without the training set. `file`: with its sources as the evaluation set, and no targets."""
        ...


class Seq2SeqModelSource(ModelSource, Protocol):
    def check_seq2seq(self) -> None:
        """Check that the model has an encoder and a decoder. Raises UserError."""
        ...

    def build_seq2seq_model(self, vocabulary: int, pad_id: int) -> nn.Module:
        """A transformers model for sequence-to-sequence language modelling, in fp32."""
        ...


@dataclass(frozen=True)
class SequenceToSequence(TextGeneration):
    """The tokens of the target are predicted from those of the source and from the target's earlier ones.

    `max_source_length`, `max_target_length`: tokens kept, special tokens included. `source_prefix`: before every
    source, such as "summarize: " for T5.
    """

    data: PairSource = field(kw_only=False)
    model: Seq2SeqModelSource = field(kw_only=False)
    max_source_length: int = 512
    max_target_length: int = 128
    source_prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_source_length", "max_target_length"):
            require(getattr(self, name) >= 1, f"recipe.{name}", getattr(self, name), "use at least 1 token")
        ok = isinstance(self.source_prefix, str)
        require(ok, "recipe.source_prefix", self.source_prefix, "give a text, such as 'summarize: '")

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        if min(self.max_source_length, self.max_target_length) <= _MOST_SPECIAL:
            self._check_lengths(self._tokenizer(corpus))
        return DataFacts(len(corpus.train), len(corpus.eval), corpus.digest, corpus.source, notes=corpus.notes)

    def check_model(self) -> None:
        for name in ("max_source_length", "max_target_length", *(["max_new_tokens"] if self.generate else [])):
            check_model(self.model, f"recipe.{name}", getattr(self, name))
        self.model.check_seq2seq()

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        key = {
            "task": "sequence to sequence",
            "data": facts.digest,
            "tokenizer": self.model.tokenizer_identity(),
            "lengths": [self.max_source_length, self.max_target_length],
            "source_prefix": self.source_prefix,
        }
        return cache.get(key, lambda folder: self._tokenize(folder, facts, cache.progress))

    def _tokenize(self, folder: Path, facts: DataFacts, progress: Progress) -> None:
        corpus = self.data.read()
        check_unchanged(corpus.digest, facts.digest, facts.source)
        tokenizer = self._tokenizer(corpus)
        (train, cut), (evaluation, cut_of_eval) = (
            self._columns(tokenizer, part, progress) for part in (corpus.train, corpus.eval)
        )
        report = [
            {"what": what, "setting": f"recipe.{setting}", "tokens": getattr(self, setting)}
            | {"train": [cut[column], len(corpus.train)], "eval": [cut_of_eval[column], len(corpus.eval)]}
            for column, what, setting in (
                ("input_ids", "sources", "max_source_length"),
                ("target_ids", "targets", "max_target_length"),
            )
        ]
        write_prepared(folder, train, evaluation, tokenizer, truncated=report)
        targets = corpus.eval.targets if corpus.eval.targets is not None else [None] * len(corpus.eval)
        write_texts(folder / "eval", list(zip(corpus.eval.sources, targets, strict=True)))

    def _tokenizer(self, corpus: PairCorpus) -> Any:
        return self.model.tokenizer([*corpus.train.sources, *(corpus.train.targets or ())])

    def _check_lengths(self, tokenizer: Any) -> None:
        """Tokenizers truncate nothing at all if only special tokens fit."""
        for name in ("max_source_length", "max_target_length"):
            special, limit = tokenizer.num_special_tokens_to_add(pair=False), getattr(self, name)
            rule = f"the tokenizer adds {special} special tokens; use at least {special + 1} tokens"
            require(limit > special, f"recipe.{name}", limit, rule)

    def _columns(
        self, tokenizer: Any, part: TextPairs, progress: Progress
    ) -> tuple[dict[str, list[Any]], dict[str, int]]:
        """The columns of a table, and how many rows of which column are truncated."""
        columns: dict[str, list[Any]] = {"input_ids": [], "target_ids": []}
        truncated = dict.fromkeys(columns, 0)
        for start in range(0, len(part), _CHUNK):
            progress(start, len(part))
            some = slice(start, start + _CHUNK)
            sources = [self.source_prefix + text for text in part.sources[some]]
            # Decoders begin with the targets, of which an unknown one is empty.
            targets = part.targets[some] if part.targets is not None else [""] * len(sources)
            for name, limit, texts in (
                ("input_ids", self.max_source_length, {"text": sources}),
                ("target_ids", self.max_target_length, {"text_target": list(targets)}),
            ):
                encoded = tokenizer(**texts, verbose=False)["input_ids"]
                truncated[name] += sum(len(ids) > limit for ids in encoded)
                if any(len(ids) > limit for ids in encoded):
                    encoded = tokenizer(**texts, truncation=True, max_length=limit)["input_ids"]
                columns[name] += encoded
        progress(len(part), len(part))
        counts = [len(ids) if part.targets is not None else 0 for ids in columns["target_ids"]]
        lengths = [len(ids) for ids in columns["input_ids"]]
        columns |= {"length": lengths, "label_count": counts}
        return columns, truncated

    def build_model(self, prepared: Prepared) -> nn.Module:
        return self.model.build_seq2seq_model(prepared.properties["vocabulary"], prepared.properties["pad_id"])

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        # Encoder and decoder are padded separately. `length` is the encoder's.
        target_length = self.max_target_length if prepared.compiles else None
        targets = padded(rows["target_ids"], IGNORED_LABEL, target_length)
        unknown = torch.as_tensor(rows["label_count"], dtype=torch.int64)[:, None] == 0
        return {
            **text_batch(rows, prepared.properties["pad_id"], length),
            # The decoder's input is made of them in rows without targets, too.
            "targets": targets,
            "labels": targets.masked_fill(unknown, IGNORED_LABEL),
        }

    def scored(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        # Given labels, every model shifts them as it was pretrained. Its own loss, the mean of the batch, is not used.
        logits = outputs(model, batch, labels=batch["targets"], use_cache=False).logits
        return at_least_fp32(logits), batch["labels"]

    def generation_inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def evaluation_data(self, model: Pretrained, file: str | None) -> PairCorpus:
        corpus: PairCorpus = evaluation_reader(self.data, "read_evaluation")(file)
        return corpus
