"""Random streams: one seed gives the same numbers everywhere, and every worker has a seed of its own."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from runner.backends import Backend, TorchBackend
from runner.train.seeds import random_state, restore_random_state, set_seed, worker_seed
from tests.pool import WorkerPool
from tests.replicas import Weights, make_loop, weights_of


def draws() -> list[Any]:
    """The next numbers of every stream, of each kind that has a state of its own."""
    return [
        random.random(),
        random.gauss(0, 1),  # draws two and keeps one
        np.random.rand(3).tolist(),
        np.random.standard_normal(),  # the same
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(5).tolist(),
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**32 - 1])
def test_a_seed_makes_every_stream_repeatable(seed: int) -> None:
    """Python, NumPy and torch give the same numbers after the same seed, and others after another."""
    set_seed(seed)
    first = draws()
    second = draws()
    set_seed(seed)
    assert draws() == first
    set_seed(seed ^ 1)
    others = draws()
    assert all(a != b for a, b in zip(first[:-1], others[:-1], strict=True))  # a permutation of five may agree
    assert all(a != b for a, b in zip(first[:-1], second[:-1], strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_seed_makes_cuda_repeatable() -> None:
    """So do all GPUs."""
    found = []
    for seed in (3, 3, 4):
        set_seed(seed)
        found.append([torch.rand(5, device=f"cuda:{i}").tolist() for i in range(torch.cuda.device_count())])
    assert found[0] == found[1] != found[2]


def test_xla_is_never_loaded_for_it(tmp_path: Path) -> None:
    """Where torch_xla is installed and not in use, seeding does not import it."""
    (tmp_path / "torch_xla.py").write_text("raise ImportError('somebody imported it')")
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parent.parent)!r}]
from runner.train.seeds import set_seed
set_seed(0)
assert "torch_xla" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_have_seeds_of_their_own() -> None:
    """No two of many neighbouring seeds and ranks share a worker's seed, nor does one hit a seed that users choose."""
    grid = [(seed, rank) for seed in [*range(150), 1234, 2**31 - 2, 2**31 - 1] for rank in range(64)]
    seeds = [worker_seed(*place) for place in grid]
    assert len(set(seeds)) == len(grid)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert not {seed for seed, _ in grid} & set(seeds)
    assert seeds == [worker_seed(*place) for place in grid]


def test_known_worker_seeds() -> None:
    """Standard dropout of a published run can be had again: its seeds are those of NumPy's documented algorithm."""
    for seed, rank in ((0, 0), (0, 1), (1, 0), (42, 7)):
        assert worker_seed(seed, rank) == np.random.SeedSequence([seed, rank]).generate_state(1, np.uint32)[0]
    assert [worker_seed(0, 0), worker_seed(0, 1), worker_seed(1, 0)] == [2968811710, 3964924996, 1835504127]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_streams_go_on_where_their_state_was_taken(before: int, tmp_path: Path) -> None:
    """A state that went through a file brings back every stream, a half-used pair of normal numbers included."""
    set_seed(5)
    for _ in range(before):
        random.gauss(0, 1)
        np.random.standard_normal()
        torch.randn(17)
    torch.save(random_state(), tmp_path / "state.pt")
    expected = draws()
    set_seed(999)
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draws() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_goes_on_where_its_state_was_taken(tmp_path: Path) -> None:
    """The GPU's stream is the backend's to take and to put back."""
    backend = TorchBackend("cuda", 0, 1, 0, dist.FileStore(str(tmp_path / "store"), 1))
    state = backend.random_state()
    assert isinstance(state, torch.Tensor)
    expected = torch.rand(5, device=backend.device).tolist()
    backend.restore_random_state(state.cpu())  # as it comes out of a file
    assert torch.rand(5, device=backend.device).tolist() == expected
    backend.close()


def test_a_cpu_has_no_generator_beside_torchs(pool: WorkerPool) -> None:
    """On CPU workers the device's own state is None, and putting that back moves no stream."""
    assert pool.run(2, restore_nothing) == [True, True]


def restore_nothing(backend: Backend) -> bool:
    """Whether streams go on as ever after the device's state was taken and put back."""
    set_seed(5)
    expected = draws()
    set_seed(5)
    state = backend.random_state()
    backend.restore_random_state(state)
    return state is None and draws() == expected


def test_taking_a_state_draws_nothing() -> None:
    """Saving does not shift what follows."""
    set_seed(5)
    expected = draws()
    set_seed(5)
    random_state()
    assert draws() == expected


def train_on_augmented_text(backend: Backend, overrides: list[str], augment: bool) -> tuple[Weights, list[Any]]:
    """Train on tokens of which some are replaced at random while collating; weights, and the tokens as collated."""
    loop = make_loop(backend, [*overrides, "precision=fp32", "max_steps=4"])
    collate, seen = loop.recipe.collate, []

    def augmented(rows: Any, prepared: Any, length: int | None = None) -> Any:
        batch = collate(rows, prepared, length)
        tokens = batch["input_ids"]
        if augment:
            tokens.masked_fill_(torch.rand(tokens.shape) < 0.1, 1)
            tokens.masked_fill_(torch.from_numpy(np.random.rand(*tokens.shape) < 0.1), 1)
            tokens[:, random.randrange(tokens.shape[1])] = 1
        seen.append(tokens.tolist())
        return batch

    object.__setattr__(loop.recipe, "collate", augmented)
    loop.train()
    loop.policy.close()
    return weights_of(loop), seen


@pytest.mark.parametrize("workers", [1, 2])
def test_random_augmentation_is_repeatable(pool: WorkerPool, workers: int) -> None:
    """A recipe that draws while collating, in the worker itself, trains twice to the same bits with the same seed."""
    zero, again, one, without = (
        pool.run(workers, train_on_augmented_text, ["recipe.model.dropout=0.1", f"seed={seed}"], augment)
        for seed, augment in ((0, True), (0, True), (1, True), (0, False))
    )
    for (weights, seen), (same_weights, same_seen) in zip(zero, again, strict=True):
        assert seen == same_seen
        assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    for (weights, seen), (other_weights, other_seen) in zip([*zero, *zero], [*one, *without], strict=True):
        assert seen != other_seen
        assert any(not torch.equal(weights[name], other_weights[name]) for name in weights)
    assert [len(seen) for _, seen in zero] == [4] * workers


def test_workers_augment_independently(pool: WorkerPool) -> None:
    """The same sentence is changed in another way on another worker: their streams differ."""
    (_, a), (_, b) = pool.run(2, draw_in_collate)
    assert a != b


def draw_in_collate(backend: Backend) -> tuple[int, list[Any]]:
    """What a worker's streams give once its loop is built."""
    loop = make_loop(backend, [])
    loop.policy.close()
    return backend.rank, draws()
