"""The places of tokens are found on the host: no forward pass has to wait for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.tasks.classification import SequenceClassification
from runner.backends import Backend
from runner.kernels.unpadded import known_places, layout_of, with_places, without_padding
from tests.pool import WorkerPool
from tests.replicas import make_loop

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
WAITING = {torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default}


class Waits(TorchDispatchMode):
    """Counts operations for whose result the host would wait."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in WAITING
        return func(*args, **(kwargs or {}))


class Watched(SequenceClassification):
    """Its forward passes, in training and in evaluation, and its batches."""

    waits, keys = Waits(), set[str]()

    def _watched(self, method: str, model: Any, batch: dict[str, Tensor]) -> Any:
        self.keys.update(batch)
        with self.waits:
            return getattr(super(), method)(model, batch)

    def loss(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self._watched("loss", model, batch)  # type: ignore[no-any-return]

    def predict(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return self._watched("predict", model, batch)  # type: ignore[no-any-return]


def watched(backend: Backend, overrides: list[str]) -> tuple[int, int, set[str]]:
    """Operations that wait, tokens that were padding, and the names in a batch, of a whole training."""
    recipe = ["recipe._target_=tests.kernels.test_unpadded.Watched", "trusted_packages=[tests]"]
    loop = make_loop(backend, [*recipe, *overrides])
    Watched.waits, Watched.keys = Waits(), set()  # the probe of exact dropout has batches of its own
    loop.train()
    loop.finish()
    return Watched.waits.count, loop.tokens.uneven, Watched.keys


@pytest.mark.parametrize("overrides", [[], ["equivalence=exact", "recipe.model.dropout=0.1"]], ids=["", "exact"])
def test_no_forward_pass_waits(pool: WorkerPool, overrides: list[str]) -> None:
    for waits, padding, names in pool.run(2, watched, overrides):
        assert (waits, padding) == (0, 0)
        assert names == {"input_ids", "attention_mask", "labels"}


def test_the_layout_is_that_of_the_mask() -> None:
    batch = with_places({"attention_mask": MASK})
    with Waits() as waits, known_places(batch), without_padding(batch["attention_mask"]):
        layout = layout_of(MASK.bool())  # models make another mask of it
    assert layout is not None
    assert (layout.places.tolist(), layout.rows, layout.length, waits.count) == ([0, 1, 3, 4, 5, 6], 3, 3, 0)


@pytest.mark.parametrize("given", [None, MASK.clone()], ids=["no mask", "another mask"])
def test_places_of_another_mask_are_not_used(given: Tensor | None) -> None:
    """A recipe with a collate of its own may give its model other masks than its batch has."""
    other = MASK.flip(0)
    batch = with_places({"attention_mask": MASK})
    with Waits() as waits, known_places(batch), without_padding(given):
        layout = layout_of(other)
    assert layout is not None
    assert (layout.places.tolist(), waits.count) == ([0, 3, 4, 5, 6, 7], 1)


def test_a_batch_without_a_mask_is_left_as_it_is() -> None:
    batch = with_places({"labels": MASK})
    with known_places(batch), without_padding():
        layout = layout_of(MASK)
    assert list(batch) == ["labels"]
    assert layout is not None
    assert len(layout.places) == 6
