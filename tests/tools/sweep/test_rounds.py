"""Sweeps that add seeds until their setups are decided."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner import cli
from runner.config.arguments import HydraOptions
from runner.errors import UserError
from runner.tools.compare.design import Design
from runner.tools.sweep import slots
from runner.tools.sweep.preflight import prepare_sweep
from tests import runs
from tests.replicas import TINY
from tests.runs import read

#: Two setups that are the same but for rounding, judged by a loss.
SAME = [
    *(*TINY, "precision=fp32", "epochs=1", "device=cpu", "evaluation.metric=loss", "evaluation.goal=min"),
    *("accumulation.steps=1,2", "seed=auto", "decide.min_seeds=2", "decide.max_seeds=3"),
]


def sweep(*overrides: str) -> int:
    return cli.main(["-m", *SAME, *overrides], time.time())


def jobs(root: Path) -> list[str]:
    """Seed and setup of each finished run, in the order of its start."""
    folder = runs.only_folder(root, "sweeps")
    found = sorted(folder.glob("*/job.json"), key=lambda path: read(path.parent, "job.json")["started_at"])
    return [read(path.parent, "summary.json")["setup"] for path in found]


def test_a_decided_sweep_stops(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After the first look; resuming it adds nothing, and other looks are refused."""
    assert sweep("decide.margin=0.01") == 0
    assert "4 to 6 jobs, until 2 setups are decided" in capfd.readouterr().out.replace("\n", "")
    assert len(jobs(here)) == 4
    folder = runs.only_folder(here, "sweeps")
    assert sweep("decide.margin=0.01", f"resume_sweep={folder.name}") == 0
    assert len(jobs(here)) == 4
    capfd.readouterr()
    assert sweep("decide.margin=0.01", "decide.max_seeds=4", f"resume_sweep={folder.name}") == 2
    assert "decide.*" in capfd.readouterr().err
    # The looks are known wherever the runs are compared.
    assert cli.run_tool("compare", [str(folder), "--no-log"]) == 0


def test_an_undecided_sweep_adds_seeds_to_the_last(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both setups get a further seed in each round, on Hydra's launcher."""
    assert sweep("decide.margin=1e-12", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2") == 0
    assert len(jobs(here)) == 6
    assert "not decidable with 3 of at most 3 seeds" in " ".join(capfd.readouterr().out.split())


def test_what_is_asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate has a default margin. Settings of Hydra are of no setup; the jobs of the first round can run at once."""
    monkeypatch.setattr(slots, "available_cores", lambda: 6)
    launcher = ["hydra/launcher=joblib"]
    request = prepare_sweep(
        HydraOptions(["-m", *TINY, "device=cpu", "accumulation.steps=1,2", "seed=auto", *launcher]), 0.0
    )
    assert request.design == Design(4, 20, 1)
    assert [setup[-1] for setup in request.setups] == ["accumulation.steps=1", "accumulation.steps=2"]
    assert request.launcher.at_once == 6
    assert request.predicted_s is None
    with pytest.raises(UserError, match=r"decide\.baseline=gpu is invalid: the setups are cpu, cpu · acc=2"):
        prepare_sweep(HydraOptions(["-m", *SAME, "decide.margin=1", "decide.baseline=gpu"]), 0.0)


def test_a_sweep_ends_in_time(here: Path) -> None:
    assert sweep("decide.margin=1e-12", "decide.max_minutes=0.001") == 0
    assert len(jobs(here)) == 4
