"""A profile has the recorded steps of each worker, and changes nothing else."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from runner.backends import Backend
from runner.config.schema import Profile
from runner.train.profile import FOLDER, profiled
from tests.pool import WorkerPool
from tests.replicas import Weights, make_loop, train, weights_of
from tests.sync.reference import SGD, largest_difference


def train_profiled(backend: Backend, overrides: list[str], folder: Path, settings: Profile) -> Weights:
    loop = make_loop(backend, overrides)
    with profiled(settings, loop, folder):
        loop.train()
        loop.finish()
    loop.policy.close()
    return weights_of(loop)


@pytest.mark.parametrize(("skip", "workers"), [(3, 2), (1, 1)])
def test_a_trace_and_a_table_for_each_worker(pool: WorkerPool, tmp_path: Path, skip: int, workers: int) -> None:
    overrides = [*SGD, "accumulation.steps=2"]
    weights = pool.run(workers, train_profiled, overrides, tmp_path, Profile(steps=4, skip=skip))[0]
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {
        f"worker-{rank}.{suffix}" for rank in range(workers) for suffix in ("json.gz", "txt")
    }
    for rank in range(workers):
        with gzip.open(tmp_path / FOLDER / f"worker-{rank}.json.gz", "rt") as file:
            names = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
        assert (names["forward"], names["optimizer"]) == (8, 4)
        assert names["aten::addmm"]
        assert "aten::" in (tmp_path / FOLDER / f"worker-{rank}.txt").read_text()
    assert largest_difference(weights, pool.run(workers, train, overrides)[0]["weights"]) == 0


def test_none_by_default(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, train_profiled, [*SGD, "max_steps=2"], tmp_path, Profile())
    assert not list(tmp_path.iterdir())
