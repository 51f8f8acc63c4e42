"""What all tests share: no network, a cache of their own, and the pool of workers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any library reads them: nothing here may reach for the Hub, and commands started by tests inherit both.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
for _name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(_name, None)

from tests.pool import WorkerPool  # noqa: E402 - after the environment
from tests.processes import end_started  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tokenised data of this test session only: a stale entry must not make a test pass."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["RUNNER_CACHE"] = str(folder)
    yield folder
    del os.environ["RUNNER_CACHE"]


@pytest.fixture(autouse=True)
def nobody_left_behind() -> Iterator[None]:
    """A command that a failed test has left must not slow down all that follow."""
    yield
    end_started()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    multiprocessing.set_forkserver_preload(["torch", "runner.launch.worker", "transformers.models.bert.modeling_bert"])
    pool = WorkerPool()
    yield pool
    pool.close()
