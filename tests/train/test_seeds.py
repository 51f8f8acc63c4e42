"""Random generators: seeds, states, and the streams of workers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from runner.backends import Backend, TorchBackend, World
from runner.train.seeds import random_state, restore_random_state, set_seed, worker_seed
from tests.pool import WorkerPool
from tests.replicas import Weights, make_loop, weights_of


def draws() -> list[Any]:
    """The next numbers of every generator, including those that draw two numbers and keep one."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
    ]


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_a_seed_makes_every_generator_repeatable(seed: int) -> None:
    set_seed(seed)
    first, second = draws(), draws()
    set_seed(seed)
    random_state()  # taking a state draws nothing
    assert draws() == first
    set_seed(seed ^ 1)
    assert all(a not in (b, c) for a, b, c in zip(draws(), first, second, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(tmp_path: Path) -> None:
    """`set_seed` seeds all GPUs; the backend takes and restores the state of its own."""
    found = []
    for seed in (3, 3, 4):
        set_seed(seed)
        found.append([torch.rand(5, device=f"cuda:{i}").tolist() for i in range(torch.cuda.device_count())])
    assert found[0] == found[1] != found[2]
    backend = TorchBackend("cuda", World(0, 1, 0, 1, dist.FileStore(str(tmp_path / "store"), 1)))
    state = backend.random_state()
    assert isinstance(state, torch.Tensor)
    expected = torch.rand(5, device=backend.device).tolist()
    backend.restore_random_state(state.cpu())  # as loaded from a file
    assert torch.rand(5, device=backend.device).tolist() == expected
    backend.close()


def test_worker_seeds() -> None:
    """Distinct for neighbouring seeds and ranks and from user seeds; recorded values keep old runs repeatable."""
    grid = [(seed, rank) for seed in [*range(150), 1234, 2**31 - 1] for rank in range(64)]
    seeds = {worker_seed(*place) for place in grid}
    assert len(seeds) == len(grid)
    assert not {seed for seed, _ in grid} & seeds
    assert [worker_seed(0, 0), worker_seed(0, 1), worker_seed(1, 0)] == [2968811710, 3964924996, 1835504127]


@pytest.mark.parametrize("before", [0, 1])
def test_generators_continue_from_a_saved_state(before: int, tmp_path: Path) -> None:
    """Also from the middle of a pair of normal numbers."""
    set_seed(5)
    for _ in range(before):
        draws()
    torch.save(random_state(), tmp_path / "state.pt")
    expected = draws()
    set_seed(999)
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draws() == expected


def train_on_augmented_text(backend: Backend, seed: int, augment: bool) -> tuple[Weights, list[Any], list[Any]]:
    """Replace tokens at random while collating; weights, collated tokens, and what the generators draw before."""
    settings = ["recipe.model.dropout=0.1", "precision=fp32", "max_steps=2", f"seed={seed}"]
    loop = make_loop(backend, settings)
    state = random_state()
    drawn = draws()
    restore_random_state(state)
    collate, seen = loop.replica.recipe.collate, []

    def augmented(rows: Any, prepared: Any, length: int | None = None) -> Any:
        batch = collate(rows, prepared, length)
        tokens = batch["input_ids"]
        if augment:
            tokens.masked_fill_(torch.rand(tokens.shape) < 0.1, 1)
            tokens.masked_fill_(torch.from_numpy(np.random.rand(*tokens.shape) < 0.1), 1)
            tokens[:, random.randrange(tokens.shape[1])] = 1
        seen.append(tokens.tolist())
        return batch

    object.__setattr__(loop.replica.recipe, "collate", augmented)
    loop.train()
    loop.policy.close()
    return weights_of(loop), seen, drawn


def test_random_augmentation_is_repeatable(pool: WorkerPool) -> None:
    """A recipe that draws while collating trains twice to the same bits, and differently on each worker."""
    zero, again, one, without = (
        pool.run(2, train_on_augmented_text, seed, augment)
        for seed, augment in ((0, True), (0, True), (1, True), (0, False))
    )
    for (weights, seen, _), (same_weights, same_seen, _) in zip(zero, again, strict=True):
        assert seen == same_seen
        assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    for (weights, seen, _), (other_weights, other_seen, _) in zip([*zero, *zero], [*one, *without], strict=True):
        assert seen != other_seen
        assert any(not torch.equal(weights[name], other_weights[name]) for name in weights)
    assert all(a != b for a, b in zip(zero[0][2], zero[1][2], strict=True))
