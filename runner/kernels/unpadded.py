"""The tokens of a batch one after the other, without its padding."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

#: In a batch on its way from the loader to the model: `TokenLayout.places` of its attention mask.
PLACES = "places of tokens"


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Where the tokens of a padded batch are.

    `places`: the number of each token's place in the flattened batch, by row and position; int64 [tokens].
    """

    places: Tensor
    rows: int
    length: int

    def unpadded(self, padded: Tensor) -> Tensor:
        """[rows, length, …] → [tokens, …]."""
        return padded.flatten(0, 1).index_select(0, self.places)

    def padded(self, tokens: Tensor) -> Tensor:
        """[tokens, …] → [rows, length, …], with zeros as padding."""
        together = tokens.new_zeros(self.rows * self.length, *tokens.shape[1:])
        return together.index_copy_(0, self.places, tokens).unflatten(0, (self.rows, self.length))

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row. A GPU is waited for."""
        numbers: list[int] = torch.bincount(self.places // self.length, minlength=self.rows).tolist()
        return numbers

    @functools.cached_property
    def starts(self) -> Tensor:
        """Tokens before each row, and before the end; int32 [rows + 1]. A GPU is not waited for."""
        first_places = torch.arange(self.rows + 1, device=self.places.device) * self.length
        return torch.searchsorted(self.places, first_places, out_int32=True)

    def row_and_position(self) -> tuple[Tensor, Tensor]:
        """The position of each token; int64 [tokens]."""
        return self.places // self.length, self.places % self.length


@dataclass
class _ForwardPass:
    places: Tensor | None
    layout: TokenLayout | None = None


_forward_pass: ContextVar[_ForwardPass | None] = ContextVar("forward pass without padding", default=None)
#: An attention mask on the device, and the places of its tokens.
_known: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("known places", default=None)


def with_places(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the places of its tokens to a batch, which the host knows: finding them on a GPU waits for it."""
    if "attention_mask" not in batch:
        return batch
    return {**batch, PLACES: _places_in(batch["attention_mask"])}


@contextlib.contextmanager
def known_places(batch: dict[str, Tensor]) -> Iterator[None]:
    """Take the places out of the batch, if it has some, and have `without_padding` use them for its attention mask."""
    places = batch.pop(PLACES, None)
    before = _known.set(None if places is None else (batch["attention_mask"], places))
    try:
        yield
    finally:
        _known.reset(before)


def _places_in(attention_mask: Tensor) -> Tensor:
    return attention_mask.flatten().nonzero()[:, 0]


@contextlib.contextmanager
def without_padding(attention_mask: Tensor | None = None) -> Iterator[None]:
    """A forward pass within it computes no padding, if the model can do that.

    `attention_mask`: the one that the model gets. A GPU is not waited for if it is that of the loader's batch.
    """
    mask, places = _known.get() or (None, None)
    before = _forward_pass.set(_ForwardPass(places if mask is attention_mask else None))
    try:
        yield
    finally:
        _forward_pass.reset(before)


def layout_of(attention_mask: Tensor) -> TokenLayout | None:
    """The layout that a model uses in a forward pass; None if it is to compute the batch as it is.

    `attention_mask`: [rows, length], not 0 where a token is; padding follows the tokens of a row.
    """
    forward_pass = _forward_pass.get()
    if forward_pass is None:
        return None
    if forward_pass.layout is None:
        places = forward_pass.places if forward_pass.places is not None else _places_in(attention_mask)
        if len(places) < attention_mask.numel():
            forward_pass.layout = TokenLayout(places, *attention_mask.shape)
    return forward_pass.layout


def current_layout() -> TokenLayout | None:
    """The layout of a model's layers which are running; None if they compute the batch as it is."""
    forward_pass = _forward_pass.get()
    return None if forward_pass is None else forward_pass.layout
