"""Real runs, made once by the runner itself: a sweep of two setups and two seeds, with its store."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner import cli

#: Enough for every file of a run's folder, and quick.
SWEEP = ["-m", "recipe=linear", "batch.micro_batch=4", "device=cpu,cpu2", "seed=0,1"]


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the sweep was started. Tests only read it, or copy it."""
    root = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert cli.main(SWEEP, time.time()) == 0
    return root


@pytest.fixture
def sweep_folder(sweep: Path) -> Path:
    (folder,) = (sweep / "outputs" / "sweeps").iterdir()
    return folder
