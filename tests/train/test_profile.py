"""A profile has the recorded steps of each worker, and changes nothing else."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from runner.backends import Backend
from runner.train.build import build_loop
from runner.train.hooks import Hooks
from runner.train.profile import FOLDER, Profiler
from tests.pool import WorkerPool
from tests.replicas import Weights, tiny_job, train, weights_of
from tests.sync.reference import SGD, largest_difference


def train_profiled(backend: Backend, overrides: list[str], folder: Path) -> Weights:
    job = tiny_job(overrides, backend.world_size)
    profiler = Profiler(job.config.profile, folder, backend)
    loop = build_loop(job, backend, Hooks(after_step=[profiler]))
    with profiler:
        loop.train()
        loop.finish()
    loop.policy.close()
    return weights_of(loop)


@pytest.mark.parametrize(("skip", "workers"), [(3, 2), (1, 1)])
def test_a_trace_and_a_table_for_each_worker(pool: WorkerPool, tmp_path: Path, skip: int, workers: int) -> None:
    overrides = [*SGD, "accumulation.steps=2"]
    profile = ["profile.steps=4", f"profile.skip={skip}"]
    weights = pool.run(workers, train_profiled, [*overrides, *profile], tmp_path)[0]
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
