"""What tasks on text have in common: a tokenizer makes rows of token ids of it, which are padded in batches."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from recipes.models.unpadded import UNPADDED_TYPES, unpad_layers
from recipes.tasks.pretrained_recipe import PretrainedRecipe, SplitsType
from runner.data.cache import Cache, Progress
from runner.data.layout import padded
from runner.data.recipe import Batch, Prepared
from runner.data.table import write_table
from runner.errors import require
from runner.kernels.unpadded import without_padding

#: Samples tokenised together: enough for all cores, and a bound on memory, since a tokenizer keeps far more of each
#: than its token ids.
_CHUNK = 1000

#: Special tokens of a text or pair, at most (RoBERTa has four): loading the tokenizer to count them takes seconds.
_MOST_SPECIAL = 8

_MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Tokenised:
    """The columns of both tables.

    `properties`: what is known of them. `files`: JSON by file name, next to the evaluation table, for what a table of
    integers cannot hold.
    """

    train: Mapping[str, Any]
    eval: Mapping[str, Any]
    properties: Mapping[str, Any]
    files: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TransformerRecipe(PretrainedRecipe[SplitsType]):
    """A task says what its samples become, what the loss is and what is predicted.

    `padding`: `none` has layers compute the tokens of a batch alone, if the model can; `longest` pads to the longest
    row of a batch, or to the device's buckets.
    """

    #: Settings that limit the tokens of a row, and what each is at least.
    limits: ClassVar[Sequence[str]] = ("max_length",)
    least_tokens: ClassVar[int] = 1
    #: Values of `padding`.
    paddings: ClassVar[Sequence[str]] = ("none", "longest")

    padding: str = field(default="longest", kw_only=True)

    def __post_init__(self) -> None:
        names = self.paddings
        require(self.padding in names, "recipe.padding", self.padding, f"use {', '.join(names[:-1])} or {names[-1]}")
        least = f"use at least {self.least_tokens} token{'s' * (self.least_tokens > 1)}"
        for name in self.limits:
            require(getattr(self, name) >= self.least_tokens, f"recipe.{name}", getattr(self, name), least)

    @property
    def notes(self) -> Sequence[str]:
        if self.padding != "none" or not self.computes_padding:
            return self.model.notes
        which = f"{self._model_type} models" if self._model_type else "this model"
        return [*self.model.notes, f"layers of {which} compute padding, too: recipe.padding=none has no effect"]

    @property
    def _model_type(self) -> str | None:
        return getattr(self.model, "model_type", None)  # a user's source may have none

    @property
    def can_unpad(self) -> bool:
        return self._model_type in UNPADDED_TYPES

    @property
    def computes_padding(self) -> bool:
        return self.padding != "none" or not self.can_unpad

    # --- data -------------------------------------------------------------------------------------------------------

    def tokenised(self, cache: Cache, splits: SplitsType, digest: str) -> Prepared:
        """The tables, for a task that knows only from them how many rows there are. The model is checked before."""
        self.check_model()
        return Prepared.load(self._entry(cache, digest, (), lambda: splits))

    def prepared_by(self) -> dict[str, Any]:
        return {"tokenizer": self.model.tokenizer_identity(), **self.tokenised_by()}

    def write(self, folder: Path, splits: SplitsType, progress: Progress) -> None:
        tokenizer = self.model.tokenizer(splits.train_texts())
        found = self.tokenise(splits, tokenizer, progress)
        write_table(folder / "train", found.train)
        write_table(folder / "eval", found.eval)
        for name, content in found.files.items():
            (folder / "eval" / name).write_text(json.dumps(content), encoding="utf-8")
        of_tokenizer = {"vocabulary": len(tokenizer), "pad_id": tokenizer.pad_token_id}
        (folder / "properties.json").write_text(json.dumps({**found.properties, **of_tokenizer}))
        tokenizer.save_pretrained(folder / "tokenizer")

    @abstractmethod
    def tokenised_by(self) -> dict[str, Any]:
        """The settings that the tables depend on, by name."""

    @abstractmethod
    def tokenise(self, splits: SplitsType, tokenizer: Any, progress: Progress) -> Tokenised:
        """Both tables. Raises UserError for samples that cannot be used."""

    # --- model ------------------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        self.model.check()
        self.model.check_head(self.head)
        self.check_positions(*self.limits)

    def check_positions(self, *settings: str) -> None:
        """Check that the model has positions for the tokens of these settings. Raises UserError."""
        limit = self.model.longest_input()
        for name in settings:
            tokens = getattr(self, name)
            rule = f"the model has {limit} positions; set it to at most {limit}"
            require(limit is None or tokens <= limit, f"recipe.{name}", tokens, rule)

    def build_model(self, prepared: Prepared) -> nn.Module:
        return self.unpad(self.built(prepared), prepared)

    def built(self, prepared: Prepared, **settings: Any) -> nn.Module:
        """The model for the tokenizer of the data. `settings` go into its configuration."""
        of = prepared.properties
        return self.model.build_model(self.head, of["vocabulary"], of["pad_id"], **settings)

    def unpad(self, model: nn.Module, prepared: Prepared) -> nn.Module:
        """The model that was built, made to compute no padding if that is wanted and possible."""
        if not self.computes_padding and not prepared.compiles:  # the number of tokens differs from batch to batch
            unpad_layers(model)
        return model

    def save_processor(self, prepared: Prepared, folder: Path) -> Path:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(prepared.folder / "tokenizer").save_pretrained(folder)
        return folder / "tokenizer_config.json"


def check_room(setting: str, tokens: int, tokenizer: Callable[[], Any], pair: bool = False) -> None:
    """Check that more than special tokens fit: otherwise tokenizers truncate nothing at all. Raises UserError."""
    if tokens <= _MOST_SPECIAL:
        special = tokenizer().num_special_tokens_to_add(pair=pair)
        rule = f"the tokenizer adds {special} special tokens; use at least {special + 1} tokens"
        require(tokens > special, setting, tokens, rule)


def chunks(samples: int, progress: Progress) -> Iterator[slice]:
    """The samples in parts that are tokenised together, with reports of progress."""
    for start in range(0, samples, _CHUNK):
        progress(start, samples)
        yield slice(start, start + _CHUNK)
    progress(samples, samples)


def count_truncated(
    tokenizer: Any,
    texts: Sequence[Any],
    lengths: Sequence[int],
    max_length: int,
    pairs: Sequence[str] | None = None,
    **settings: Any,
) -> int:
    """How many texts, or pairs, have more than `max_length` tokens. `lengths`: of the truncated ones."""
    full = [row for row, length in enumerate(lengths) if length == max_length]
    count = 0
    for start in range(0, len(full), _CHUNK):
        rows = full[start : start + _CHUNK]
        second = None if pairs is None else [pairs[row] for row in rows]
        encoded = tokenizer([texts[row] for row in rows], second, verbose=False, **settings)
        count += sum(len(ids) > max_length for ids in encoded["input_ids"])
    return count


def truncation(
    what: str, setting: str, tokens: int, train: tuple[int, int], evaluation: tuple[int, int]
) -> dict[str, Any]:
    """What `Recipe.prepare` says of truncated samples; the pairs are how many of how many."""
    return {"what": what, "setting": setting, "tokens": tokens, "train": train, "eval": evaluation}


def text_batch(rows: Mapping[str, Sequence[Any]], pad_id: int, length: int | None) -> Batch:
    """Token ids, the attention mask, and token types if the rows have any, each of shape [rows, tokens]."""
    lengths = torch.tensor([len(row) for row in rows["input_ids"]])
    input_ids = padded(rows["input_ids"], pad_id, length)
    # The mask comes from the lengths: the pad token may also occur in the text, as GPT-2's end of text does.
    batch = {"input_ids": input_ids, "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()}
    if "token_type_ids" in rows:
        batch["token_type_ids"] = padded(rows["token_type_ids"], 0, length)
    return batch


def outputs(model: nn.Module, batch: Batch, **settings: Any) -> Any:
    """The model's output for the tokens of a batch, whose padding has to follow the tokens of each row."""
    with without_padding(batch.get("attention_mask")):
        return model(**{name: batch[name] for name in _MODEL_INPUTS if name in batch}, **settings)
