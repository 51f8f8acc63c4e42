"""Fixtures of all tests: no network, a cache for this session, one thread per worker, and the pool of workers."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before any library reads them; commands started by tests inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
_WANDB = [name for name in os.environ if name.startswith("WANDB_")]
for _name in (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    *_WANDB,
):
    os.environ.pop(_name, None)

from runner.launch import local  # noqa: E402 - after the environment
from runner.launch.local import start_forkserver  # noqa: E402
from runner.track import delivery  # noqa: E402
from runner.track.store import make_database  # noqa: E402
from tests.pool import WorkerPool  # noqa: E402
from tests.processes import kill_started  # noqa: E402

# A session runs hundreds of workers: what most of them would import, their forkserver imports once.
local.PRELOADED += [
    *local.PRELOADED_FOR_SEVERAL,
    *("datasets", "peft", "torchmetrics", "recipes.tasks.classification", "recipes.models.pretrained"),
    *("transformers.models.bert.modeling_bert", "tests.replicas"),
]


@pytest.fixture(scope="session", autouse=True)
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MLflow takes a second and a hundred migrations to make a database: runs get copies of one that it has made."""
    made = tmp_path_factory.mktemp("mlflow") / "mlflow.db"

    def copy(path: Path) -> None:
        if not path.exists():
            make_database(made)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(made, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "make_database", copy)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tokenised data of this test session only: a stale entry must not make a test pass."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["RUNNER_CACHE"] = str(folder)
    yield folder
    del os.environ["RUNNER_CACHE"]


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_worker() -> Iterator[None]:
    """Two threads make a tiny model up to ten times slower where several tests share the cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.run.job.threads_per_worker", lambda workers, given=None: given or 1)
        patch.setattr("runner.measure.store.threads_per_worker", lambda workers, given=None: given or 1)
        patch.setattr("runner.tools.verify.command.threads_per_worker", lambda workers, given=None: given or 1)
        patch.setattr("runner.tools.evaluate.command.threads_per_worker", lambda workers, given=None: given or 1)
        yield


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Kill what a failed test has left running, which would slow down all later ones."""
    yield
    kill_started()


@pytest.fixture(autouse=True)
def no_log_handlers() -> None:
    """Remove the handlers that Hydra has installed for a sweep in this process: they write to a closed stream."""
    for handler in logging.root.handlers[:]:
        if type(handler) in (logging.StreamHandler, logging.FileHandler):
            logging.root.removeHandler(handler)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def without_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps end without the comparison of their runs, which takes seconds."""
    monkeypatch.setattr("runner.tools.sweep.command._compare", lambda *_: None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for four megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=False).returncode != 0:
        pytest.skip("this container may not mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    # The one of all runs in this process: whoever starts it decides what is imported in it.
    start_forkserver(several_jobs=True)
    pool = WorkerPool()
    yield pool
    pool.close()
