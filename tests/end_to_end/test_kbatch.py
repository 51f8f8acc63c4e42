"""`sweep=kbatch` by the command line: Hydra runs the jobs that the grid foresees."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runner import cli
from runner.sweep import command
from tests.replicas import TINY


def test_own_lists_in_place_of_the_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two setups and one seed give two runs: one worker, and two workers that meet every other step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_compare", lambda *_: None)  # what runs come to is another test's business
    recipe = [override for override in TINY if not override.startswith("batch")]
    arguments = ["-m", *recipe, "sweep=kbatch", "device=cpu2", "setup=one,k2", "seed=0", "batch.micro_batch=8"]
    assert cli.main(arguments, time.time()) == 0
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    folders = sorted(path.parent for path in sweep.glob("*/plan.json"))
    plans = [json.loads((folder / "plan.json").read_text()) for folder in folders]
    assert [(plan["world_size"], plan["k"], plan["global_batch"]) for plan in plans] == [(1, 1, 8), (2, 2, 16)]
    for folder in folders:
        assert json.loads((folder / "summary.json").read_text())["status"] == "FINISHED"
