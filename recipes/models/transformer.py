"""What recipes that fine-tune a transformers model do alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.data.padding import padded
from runner.data.recipe import Batch, Prepared
from runner.errors import UserError

#: What a model is given of a batch.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class ModelSource(Protocol):
    """Where a model and its tokenizer come from.

    A source may have `notes`: what is to be known of its model beside the results, a sentence each.
    """

    @property
    def has_dropout(self) -> bool:
        """Whether training drops units at all; True where that is not known."""
        ...

    def check(self) -> None:
        """Refuse a model that cannot be had. Raises UserError, Unavailable if it is not here."""
        ...

    def longest_input(self) -> int | None:
        """Tokens that the model has positions for; None if that is not known before it is loaded."""
        ...

    def tokenizer_identity(self) -> str:
        """Changes whenever the tokenizer does, apart from the texts it is made from."""
        ...

    def tokenizer(self, texts: Sequence[str]) -> Any:
        """A transformers tokenizer with a pad token; `texts`: the training part, for vocabularies made from it."""
        ...


def notes_of(model: ModelSource) -> list[str]:
    """What is to be known of a run with this model beside its results, a sentence each."""
    return list(getattr(model, "notes", ()))


def check_model(model: ModelSource, setting: str, tokens: int) -> None:
    """Refuse a model that cannot be had, or that has no positions for rows of so many tokens. Raises UserError."""
    model.check()
    limit = model.longest_input()
    if limit is not None and tokens > limit:
        raise UserError(
            f"{setting}={tokens} is more than the {limit} positions of the model: set {setting}={limit} or less"
        )


def text_batch(rows: Mapping[str, Sequence[Any]], pad_id: int, length: int | None) -> Batch:
    """Tokens, their types if the rows have any, and which of them are none, each of shape [rows, tokens]."""
    lengths = torch.tensor([len(row) for row in rows["input_ids"]])
    input_ids = padded(rows["input_ids"], pad_id, length)
    # The mask follows the lengths: a model's pad token may also be a token of the text (GPT-2's end of text is).
    batch = {"input_ids": input_ids, "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()}
    if "token_type_ids" in rows:
        batch["token_type_ids"] = padded(rows["token_type_ids"], 0, length)
    return batch


def outputs(model: nn.Module, batch: Batch, **settings: Any) -> Any:
    """What the model makes of a batch's tokens."""
    return model(**{name: batch[name] for name in _INPUTS if name in batch}, **settings)


def widened(scores: Tensor) -> Tensor:
    """Losses and metrics of scores in reduced precision are taken in fp32; fp64 stays."""
    return scores if scores.dtype is torch.float64 else scores.float()


def save(model: nn.Module, prepared: Prepared, folder: Path) -> None:
    """Leave weights and tokenizer in `folder`, loadable by `from_pretrained`."""
    from transformers import AutoTokenizer

    model.save_pretrained(folder)  # type: ignore[operator]  # model sources build transformers models
    AutoTokenizer.from_pretrained(prepared.folder / "tokenizer").save_pretrained(folder)
