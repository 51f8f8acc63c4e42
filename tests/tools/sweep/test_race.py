"""Sweeps that race their setups."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from runner import cli
from runner.folder.metrics_log import MetricsReader
from runner.tools.compare.from_folders import read_folders
from runner.tools.sweep import race
from tests import runs
from tests.runs import read, stored_runs

pytestmark = pytest.mark.usefixtures("without_comparison")

#: The loss falls without end, the faster the larger the learning rate is. 8 optimizer steps: rungs at 1, 2 and 4.
LINE = ["recipe=linear", "batch.micro_batch=8", "device=cpu", "epochs=8"]
RACE = ["optimizer.lr=0.01,0.02,0.03,0.04", "decide.race=true"]


def sweep(*overrides: str) -> int:
    return cli.main(["-m", *LINE, *RACE, *overrides], time.time())


def ends(root: Path) -> dict[str, tuple[str, int]]:
    """Status and optimizer steps of each learning rate; there is one attempt at each job."""
    folders = [path.parent for path in runs.only_folder(root, "sweeps").glob("*/job.json")]
    found = {read(folder, "job.json")["shown"]: read(folder, "summary.json") for folder in folders}
    assert len(found) == len(folders)
    return {name: (summary["status"], summary["optimizer_steps"]) for name, summary in found.items()}


#: Ranks do not move: at the second rung the two best are left.
ENDED = {
    "optimizer.lr=0.01": ("STOPPED", 2),
    "optimizer.lr=0.02": ("STOPPED", 2),
    "optimizer.lr=0.03": ("FINISHED", 8),
    "optimizer.lr=0.04": ("FINISHED", 8),
}


def evaluations(folder: Path) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in MetricsReader(folder).read() if one.key == "eval/loss"]


def test_losers_stop_and_say_why(here: Path) -> None:
    """The winner ends as without a race, bit for bit; a loser goes on when asked to."""
    assert sweep() == 0
    assert ends(here) == ENDED
    folder = runs.only_folder(here, "sweeps")
    assert "place 4 of 4 by loss" in read(folder / "0", "summary.json")["error"]
    assert not (folder / "0" / "model").exists()
    left_out = {
        one.source: one.reason for one in read_folders([(name, folder / name) for name in "0123"], None).skipped
    }
    assert left_out.keys() == {"0", "1"}
    assert "place 4 of 4 by loss" in left_out["0"]
    assert read(folder / "3", "summary.json")["raced"] == 4
    family = stored_runs(here)
    assert sorted(run.info.status for run in family) == ["FINISHED", "FINISHED", "FINISHED", "KILLED", "KILLED"]
    assert sum("optimizer.lr=0.04 leads" in run.data.tags.get("stopped", "") for run in family) == 2

    assert cli.main([*LINE, "optimizer.lr=0.04", "tracking=none", "hydra.run.dir=alone"], time.time()) == 0
    assert evaluations(folder / "3") == evaluations(here / "alone")
    raced, alone = (load_file(one / "model" / "model.safetensors") for one in (folder / "3", here / "alone"))
    assert raced["weight"].equal(alone["weight"])

    assert cli.main([f"resume={folder / '0'}", "tracking=none"], time.time()) == 0
    assert read(folder / "0", "summary.json")["status"] == "FINISHED"


def test_an_interrupted_race_continues(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a look: what was trained is kept, also by a launcher that runs jobs in parallel; it stays a race."""
    with monkeypatch.context() as patch:

        def interrupted(values: object, constant: float) -> object:
            raise KeyboardInterrupt

        patch.setattr(race, "going_on", interrupted)
        assert sweep("tracking=none") == 130
    assert set(ends(here).values()) == {("STOPPED", 1)}
    folder = runs.only_folder(here, "sweeps")
    (folder / "3" / "summary.json").unlink()  # as if it had been killed after it had saved the rung
    resumed = f"resume_sweep={folder.name}"
    assert cli.main(["-m", *LINE, RACE[0], resumed, "tracking=none"], time.time()) == 2
    assert sweep("tracking=none", resumed, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2") == 0
    assert ends(here) == ENDED
    assert read(folder / "3", "summary.json")["resumed_after"] == [1, 1, 2, 4]
