"""One real sweep of two setups and two seeds, with its MLflow store, for all tests of this package."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from filelock import FileLock

from runner import cli
from runner.tools.compare.from_folders import run_folders


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder in which the sweep was started. Tests only read it, or copy it; all processes of pytest share it."""
    own = tmp_path_factory.getbasetemp()
    root = (own if worker_id == "master" else own.parent) / "sweep"
    with FileLock(f"{root}.lock"):
        if not root.exists():
            root.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(root)
                arguments = ["-m", "recipe=linear", "batch.micro_batch=4", "device=cpu,cpu2", "seed=0,1"]
                assert cli.main(arguments, time.time()) == 0
    return root


@pytest.fixture
def sweep_folder(sweep: Path) -> Path:
    (folder,) = (sweep / "outputs" / "sweeps").iterdir()
    return folder


@pytest.fixture
def jobs(sweep_folder: Path, tmp_path: Path) -> list[Path]:
    """A copy of the sweep's four run folders, which a test may change."""
    copy = tmp_path / "copy"
    shutil.copytree(sweep_folder, copy, ignore=shutil.ignore_patterns("model", "compare"))
    return run_folders(copy)
