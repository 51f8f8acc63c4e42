"""Find out, before training, whether a model's samples can be computed exactly."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.exact.dropout import ExactDropout, not_exact
from runner.exact.stream import sample_keys
from runner.recipe import Batch, Prepared, Recipe

#: What a sample's outputs may differ by, beside others and alone, relative to the largest of them. Rounding gives
#: 1e-6 in fp32; a mask that moved gives some 10%.
_TOLERANCE = 1e-3


@torch.no_grad()
def check_model(recipe: Recipe, prepared: Prepared, model: nn.Module, device: torch.device) -> None:
    """Run three samples together and each with itself, dropout on. Raises UserError if a sample's outputs differ.

    That finds what no list of functions would: randomness from elsewhere, and samples that influence each other.
    """
    lengths = np.asarray(prepared.train.column("length"))
    by_length = np.argsort(lengths, kind="stable")
    # Of different lengths, so that padding is at work.
    ids = np.unique(by_length[[0, len(by_length) // 2, -1]])
    was_training = model.training
    model.train()
    try:
        together = _predict(recipe, prepared, model, ids, device)
        # Twice, since of a single row batch normalisation makes an error of its own.
        alone = torch.cat([_predict(recipe, prepared, model, ids[[i, i]], device)[:1] for i in range(len(ids))])
    finally:
        model.train(was_training)
    largest = float(together.abs().max())
    difference = float((together - alone).abs().max())
    if not difference <= _TOLERANCE * largest:
        raise not_exact(
            "a sample's outputs depend on the others of its micro-batch, or on padding, as batch normalisation makes "
            f"them (they differ by {difference:.2g} of {largest:.2g})"
        )


def _predict(recipe: Recipe, prepared: Prepared, model: nn.Module, ids: np.ndarray, device: torch.device) -> Tensor:
    batch: Batch = recipe.collate(prepared.train[ids.tolist()], prepared)
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    with _Watched(sample_keys(0, 0, ids).to(device)):
        return recipe.predict(model, on_device).double()


class _Watched(ExactDropout):
    """Refuses every function that draws random numbers of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _generators()
        result = super().__torch_function__(func, types, args, kwargs)
        self._compare(before, getattr(func, "__name__", str(func)))
        return result

    def __enter__(self) -> Any:
        self._at_start = _generators()
        return super().__enter__()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None:
            self._compare(self._at_start, "its forward pass")

    def _compare(self, before: list[Any], who: str) -> None:
        if _generators() != before:
            raise not_exact(f"{who} draws random numbers that depend on what was drawn before")


def _generators() -> list[Any]:
    """The state of every generator that a model can draw from, comparable."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy_state: Any = np.random.get_state()
    return [
        random.getstate(),
        (numpy_state[1].tobytes(), numpy_state[2:]),
        *(state.numpy().tobytes() for state in (torch.get_rng_state(), *cuda)),
    ]
