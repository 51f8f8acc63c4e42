"""Counting padding: by hand, and in the loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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
        ([0, 1, 2], 9, Tokens(10, uneven=5, beyond=12)),
        ([0, 1, FILLER], 5, Tokens(8, uneven=2, fillers=5)),
        ([FILLER], 2, Tokens(fillers=2)),
        ([3], 6, Tokens(6)),  # truncated by the recipe
    ],
)
def test_each_token_is_counted_once(rows: list[int], width: int, expected: Tokens) -> None:
    assert tokens_of(batch(len(rows), width), np.array(rows), LENGTHS) == expected


def test_sum_and_padding_share() -> None:
    assert Tokens(6, 1, 2, 3).padding_share == 0.5
    assert Tokens(1, 2, 3, 4) + Tokens(10, 20, 30, 40) == Tokens(11, 22, 33, 44)


def test_only_2d_integer_tensors_have_tokens() -> None:
    assert token_width({"inputs": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.int64)}) is None
    assert token_width({"pixels": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}) is None
    assert token_width({**batch(2, 5), "decoder_ids": torch.zeros(2, 7, dtype=torch.int32)}) == 5
    assert token_width({"ids": torch.zeros(2, 5, dtype=torch.int64), "more": torch.zeros(2, 7).int()}) == 7
    assert tokens_of({"inputs": torch.zeros(4, 8)}, np.arange(4), LENGTHS) == Tokens()


def counted_and_computed(backend: Backend, overrides: list[str]) -> tuple[Tokens | None, int, int]:
    """Train; tokens over all workers, those that this worker's layers computed, and the data's tokens."""
    loop = make_loop(backend, overrides)
    layer: Any = loop.model
    areas: list[int] = []

    def measured(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            areas.append(math.prod(args[0].shape[:2]))

    layer.bert.encoder.layer[0].intermediate.register_forward_pre_hook(measured)
    loop.train()
    loop.finish()
    loop.policy.close()
    return over_all_workers(loop.tokens, backend), sum(areas), int(loop.replica.prepared.train.column("length").sum())


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("padding", ["none", "longest"])
def test_the_loop_counts_what_the_model_computes(pool: WorkerPool, workers: int, padding: str) -> None:
    """With 8 workers, 4 have no sample in the last batch of an epoch and run a filler."""
    results = pool.run(workers, counted_and_computed, [f"recipe.padding={padding}"])
    (total,) = {result[0] for result in results}
    assert total is not None
    assert total.of_samples == 2 * results[0][2]
    assert sum(area for _, area, _ in results) == total.of_samples + total.uneven + total.fillers
    assert total.beyond == 0
    assert (total.fillers > 0) == (workers == 8)
    assert (total.uneven > 0) == (padding == "longest")


def test_a_fixed_width_is_padding_beyond_the_longest(pool: WorkerPool) -> None:
    """Rows of at most 16 tokens, padded to 32."""
    total, area, _ = pool.run(1, counted_and_computed, ["++recipe.padding=max_length"])[0]
    assert total is not None
    assert area == 2 * 100 * 32
    assert total.beyond >= 2 * 100 * 16
