"""Sequence to sequence: an encoder reads a text, and a decoder writes another, as in translation and summaries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from recipes.tasks.generation import TextGeneration, texts_file
from recipes.tasks.pretrained_recipe import at_least_fp32
from recipes.tasks.splits import DataSource, Splits
from recipes.tasks.transformer_recipe import Tokenised, check_room, chunks, outputs, text_batch, truncation
from runner.data.cache import Cache, Progress
from runner.data.layout import padded
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.errors import require

#: What is read and what is written: its column, its setting and its name in reports.
_SIDES = (("input_ids", "max_source_length", "sources"), ("target_ids", "max_target_length", "targets"))


@dataclass(frozen=True)
class TextPairs:
    """Texts to read and to write; `targets` is None for texts to predict for."""

    sources: Sequence[str]
    targets: Sequence[str] | None

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class PairCorpus(Splits[TextPairs]):
    def content(self) -> Iterable[bytes]:
        yield json.dumps([[part.sources, part.targets] for part in (self.train, self.eval)]).encode()

    def train_texts(self) -> Sequence[str]:
        return [*self.train.sources, *(self.train.targets or ())]


@dataclass(frozen=True)
class SequenceToSequence(TextGeneration[PairCorpus]):
    """The tokens of the target are predicted from those of the source and from the target's earlier ones.

    `max_source_length`, `max_target_length`: tokens kept, special tokens included. `source_prefix`: before every
    source, such as "summarize: " for T5.
    """

    task: ClassVar[str] = "sequence to sequence"
    head: ClassVar[str] = "Seq2SeqLM"
    limits: ClassVar[Sequence[str]] = ("max_source_length", "max_target_length")

    data: DataSource[PairCorpus]
    max_source_length: int = 512
    max_target_length: int = 128
    source_prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = isinstance(self.source_prefix, str)
        require(ok, "recipe.source_prefix", self.source_prefix, "give a text, such as 'summarize: '")

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        for name in self.limits:
            tokens = getattr(self, name)
            check_room(f"recipe.{name}", tokens, lambda: self.model.tokenizer(corpus.train_texts()))
        return DataFacts(len(corpus.train), len(corpus.eval), corpus.digest, corpus.source, notes=corpus.notes)

    def check_model(self) -> None:
        super().check_model()
        if self.generate:
            self.check_positions("max_new_tokens")

    def tokenised_by(self) -> dict[str, Any]:
        lengths = [self.max_source_length, self.max_target_length]
        return {"lengths": lengths, "source_prefix": self.source_prefix}

    def tokenise(self, splits: PairCorpus, tokenizer: Any, progress: Progress) -> Tokenised:
        (train, cut), (evaluation, cut_of_eval) = (
            self._columns(tokenizer, part, progress) for part in (splits.train, splits.eval)
        )
        report = [
            truncation(
                *(what, f"recipe.{setting}", getattr(self, setting)),
                (cut[column], len(splits.train)),
                (cut_of_eval[column], len(splits.eval)),
            )
            for column, setting, what in _SIDES
        ]
        targets = splits.eval.targets if splits.eval.targets is not None else [None] * len(splits.eval)
        texts = list(zip(splits.eval.sources, targets, strict=True))
        return Tokenised(train, evaluation, {"truncated": report}, texts_file(texts))

    def _columns(
        self, tokenizer: Any, part: TextPairs, progress: Progress
    ) -> tuple[dict[str, list[Any]], dict[str, int]]:
        """The columns of a table, and how many rows of which column are truncated."""
        columns: dict[str, list[Any]] = {"input_ids": [], "target_ids": []}
        truncated = dict.fromkeys(columns, 0)
        for some in chunks(len(part), progress):
            sources = [self.source_prefix + text for text in part.sources[some]]
            # Decoders begin with the targets, of which an unknown one is empty.
            targets = part.targets[some] if part.targets is not None else [""] * len(sources)
            given = ({"text": sources}, {"text_target": list(targets)})
            for (name, setting, _), texts in zip(_SIDES, given, strict=True):
                limit = getattr(self, setting)
                encoded = tokenizer(**texts, verbose=False)["input_ids"]
                truncated[name] += sum(len(ids) > limit for ids in encoded)
                if any(len(ids) > limit for ids in encoded):
                    encoded = tokenizer(**texts, truncation=True, max_length=limit)["input_ids"]
                columns[name] += encoded
        counts = [len(ids) if part.targets is not None else 0 for ids in columns["target_ids"]]
        lengths = [len(ids) for ids in columns["input_ids"]]
        columns |= {"length": lengths, "label_count": counts}
        return columns, truncated

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
