"""What is counted as padding: by hand, and in the shipped loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from runner.backends import Backend
from runner.data.loader import FILLER
from runner.train.tokens import Tokens, over_all_workers, token_width, tokens_of
from tests.pool import WorkerPool
from tests.replicas import make_loop

LENGTHS = np.array([3, 5, 2, 8])


def batch(rows: int, width: int) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(rows, width, dtype=torch.int64), "labels": torch.zeros(rows, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [
        ([0, 1, 2], 5, Tokens(10, uneven=5)),
        ([0, 1, 2], 9, Tokens(10, uneven=5, beyond=12)),
        ([0, 1, FILLER], 5, Tokens(8, uneven=2, fillers=5)),
        ([FILLER], 2, Tokens(fillers=2)),
        ([3], 6, Tokens(6)),  # cut off by the recipe
    ],
)
def test_each_token_is_counted_once(rows: list[int], width: int, expected: Tokens) -> None:
    """A sample's own tokens and three kinds of padding add up to the batch's area."""
    counted = tokens_of(batch(len(rows), width), np.array(rows), LENGTHS)
    assert counted == expected
    assert counted.of_samples + counted.uneven + counted.beyond + counted.fillers == len(rows) * width


def test_the_share_of_padding() -> None:
    """Of all tokens that were fed; sums are by kind."""
    assert Tokens(6, 1, 2, 3).padding_share == 0.5
    assert Tokens(1, 2, 3, 4) + Tokens(10, 20, 30, 40) == Tokens(11, 22, 33, 44)


def test_only_whole_numbers_in_rows_and_columns_are_tokens() -> None:
    """Labels of rows, images and the inputs of a linear layer have no width; of several tensors the widest counts."""
    assert token_width({"inputs": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.int64)}) is None
    assert token_width({"pixels": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}) is None
    assert token_width({**batch(2, 5), "decoder_ids": torch.zeros(2, 7, dtype=torch.int32)}) == 7
    assert tokens_of({"inputs": torch.zeros(4, 8)}, np.arange(4), LENGTHS) == Tokens()


def counted_and_fed(backend: Backend, overrides: list[str]) -> tuple[Tokens | None, list[int], int]:
    """Train; tokens over all workers, the area of each batch that this worker's model was given, the data's tokens."""
    loop = make_loop(backend, overrides)
    areas: list[int] = []
    loss = loop.recipe.loss

    def noted(model, batch):  # type: ignore[no-untyped-def]  # stands in for a method of whatever recipe this is
        areas.append(batch["input_ids"].numel())
        return loss(model, batch)

    object.__setattr__(loop.recipe, "loss", noted)
    loop.train()
    loop.finish()
    loop.policy.close()
    return over_all_workers(loop.tokens, backend), areas, int(loop.prepared.train.column("length").sum())


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_loop_counts_what_it_feeds(pool: WorkerPool, workers: int) -> None:
    """Over all workers: each sample's tokens once an epoch, and with padding the area of every batch there was.

    With 8 workers 4 have no sample in the last global batch of an epoch, and feed a filler.
    """
    results = pool.run(workers, counted_and_fed, [])
    (total,) = {result[0] for result in results}
    assert total is not None
    assert total.of_samples == 2 * results[0][2]
    assert sum(sum(areas) for _, areas, _ in results) == total.of_samples + total.uneven + total.fillers
    assert total.beyond == 0
    assert (total.fillers > 0) == (workers == 8)


def test_a_fixed_width_is_padding_beyond_the_longest(pool: WorkerPool) -> None:
    """Rows of at most 16 tokens padded to 32."""
    total, areas, _ = pool.run(1, counted_and_fed, ["++recipe.padding=max_length"])[0]
    assert total is not None
    assert sum(areas) == 2 * 100 * 32
    assert total.beyond >= 2 * 100 * 16
    assert total.padding_share > 0.5


def test_what_has_no_tokens_has_no_padding(pool: WorkerPool) -> None:
    """Nothing is said of a model that is fed numbers."""
    assert pool.run(1, tokens_of_linear) == [None]


def tokens_of_linear(backend: Backend) -> Tokens | None:
    batch = {"inputs": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.int64)}
    return over_all_workers(tokens_of(batch, np.arange(4), LENGTHS), backend)
