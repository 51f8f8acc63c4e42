"""Whole runs whose numbers or whose disk go wrong: a sentence, an exit code, and nothing that looks like a result."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from runner.tools.compare.from_mlflow import ExistingStore
from runner.train.checkpoint import saved_folders
from tests import processes
from tests.faulty_recipes import DISK, faulty, fill
from tests.runs import TRACKED, only_folder, read, run, store, stored_runs
from tests.tools.sweep.gated import GATED, hold, release

#: `python -m runner` that waits two seconds instead of 30 for a store at the end of a run.
IMPATIENT = """
import sys, time
from runner import cli
from runner.track import tracker
tracker._FINISH_TIMEOUT_S = 2.0
sys.exit(cli.main(sys.argv[1:], time.time()))
"""
#: The most that is printed about a fault, whatever fails.
MOST_LINES = 10


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def test_a_run_that_diverges(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FAILED with the step and the cause, in strict JSON; the store has every loss, and checkpoints stay finite."""
    given = ["device=cpu2", "optimizer.lr=1e10", "log_every=4", "checkpoint.every_steps=1"]
    assert run(*given, base=TRACKED) == cli.EXIT_FAILED
    errors = capsys.readouterr().err.splitlines()
    (error,) = [line for line in errors if line.startswith("error: ")]
    assert len(errors) <= MOST_LINES
    assert "optimizer step" in error
    assert "optimizer.lr" in error
    folder = only_folder(here)
    summary = strict((folder / "summary.json").read_text())
    assert (summary["status"], summary["diverged"], summary["user_error"]) == ("FAILED", True, False)
    assert f"error: {summary['error']}" == error
    assert not (folder / "model").exists()
    for name in ("ledger.json", "certificate.json", "tracking.json"):
        assert not (folder / name).exists() or strict((folder / name).read_text())
    losses = [m for m in map(strict, (folder / "metrics.jsonl").read_text().splitlines()) if m["key"] == "train/loss"]
    assert math.isnan(float(losses[-1]["value"]))
    (found,) = stored_runs(here)
    assert (found.info.status, found.data.tags["error"]) == ("FAILED", summary["error"])
    history = store(here).get_metric_history(found.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [loss["step"] for loss in losses]
    (compared,) = ExistingStore(None).read([found], None).runs
    assert compared.diverged == summary["error"]


def test_a_setting_that_changes_nothing_in_a_healthy_run(here: Path) -> None:
    """Nor is it part of the setup."""
    digests = set()
    losses = set()
    for number, steps in enumerate((1, 5)):
        folder = here / str(number)
        assert run(f"nonfinite_steps={steps}", f"hydra.run.dir={folder}", "device=cpu", "max_steps=3") == 0
        digests.add(read(folder, "summary.json")["setup_digest"])
        losses.add(read(folder, "summary.json")["train_loss"])
        assert (read(folder, "summary.json")["applied_steps"], read(folder, "summary.json")["skipped_steps"]) == (3, 0)
    assert len(digests) == len(losses) == 1


def test_fp16_that_skips_every_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*faulty("Overflows"), "device=cpu", "precision=fp16", "epochs=1") == cli.EXIT_FAILED
    assert "precision=bf16" in capsys.readouterr().err
    summary = read(only_folder(here), "summary.json")
    assert (summary["status"], summary["diverged"]) == ("FAILED", True)
    assert not (only_folder(here) / "model").exists()


@pytest.mark.long
def test_a_disk_that_fills_up(here: Path, small_disk: Path) -> None:
    """Training goes on to its end; the run in the store is FAILED with the reason, and can continue with free space."""
    (here / DISK).write_text(str(small_disk))
    folder = small_disk / "run"
    given = [*TRACKED, *faulty("FillsDisk"), f"hydra.run.dir={folder}", "checkpoint.every_steps=3", "device=cpu"]
    process = processes.start(here, "-m", "runner", *given)  # to see what workers print, too
    assert process.wait(timeout=processes.TIMEOUT_S) == cli.EXIT_FAILED, processes.output(here)
    printed = processes.output(here).splitlines()
    after_the_plan = printed[[line.startswith("Certificate: ") for line in printed].index(True) + 1 :]
    about_the_fault = [line for line in after_the_plan if not line.startswith("step ")]
    assert len(about_the_fault) <= MOST_LINES
    assert not any("Traceback" in line for line in about_the_fault)
    assert sum("metrics.jsonl" in line for line in about_the_fault) == 1
    assert [path.name for path in saved_folders(folder)] == ["step-00000006", "step-00000003"]
    (found,) = stored_runs(here)
    assert found.info.status == "FAILED"
    assert "No space left on device" in found.data.tags["error"]
    (small_disk / "fill").unlink()
    trust = "trusted_packages=[recipes,tests]"  # four steps are left, and the recipe would fill the disk in the eighth
    assert cli.main([f"resume={folder}", trust], time.time()) == 0
    assert [one.info.status for one in stored_runs(here)] == ["FINISHED"]


def test_a_folder_that_is_removed(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = here / "run"
    (here / DISK).write_text(str(folder))
    given = [*faulty("RemovesFolder"), f"hydra.run.dir={folder}", "device=cpu", "checkpoint=none"]
    assert run(*given, base=TRACKED) == cli.EXIT_FAILED
    errors = capfd.readouterr().err
    assert len(errors.splitlines()) <= MOST_LINES
    assert "Traceback" not in errors
    (found,) = stored_runs(here)
    assert found.info.status == "FAILED"
    assert "removed" in found.data.tags["error"]
    assert not folder.exists()


def test_a_folder_that_is_removed_and_used_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other run can start once the first one has ended, which it does with a sentence and leaves nothing."""
    given = [*GATED, "epochs=4", "log_every=1", f"hydra.run.dir={here / 'run'}", "checkpoint=none"]
    hold(here, 2)
    first = processes.start(here, "-m", "runner", *given)
    processes.wait_for_gate(here, 2, first)
    shutil.rmtree(here / "run")
    assert cli.main([*given, "seed=1"], time.time()) == cli.EXIT_USER_ERROR
    assert "hydra.run.dir=" in capsys.readouterr().err
    release(here, 2)
    assert first.wait(timeout=processes.TIMEOUT_S) == cli.EXIT_FAILED
    assert sum(line.startswith("error: ") and "removed" in line for line in processes.output(here).splitlines()) == 1
    assert not (here / "run").exists()
    assert cli.main([*given, "seed=1"], time.time()) == 0
    summary = read(here / "run", "summary.json")
    assert (summary["status"], summary["seed"]) == ("FINISHED", 1)


def test_a_model_without_room(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the numbers before the first step; a disk that is full already, before a folder is made."""
    given = [f"hydra.run.dir={small_disk / 'run'}", "device=cpu"]
    assert run(*given, "recipe.model.hidden_size=512", "recipe.model.feed_forward_size=1024") == cli.EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert " bytes" in line
    assert read(small_disk / "run", "summary.json")["error"] in line
    assert "train/loss" not in (small_disk / "run" / "metrics.jsonl").read_text()
    fill(small_disk)
    assert run(f"hydra.run.dir={small_disk / 'other'}", "device=cpu") == cli.EXIT_USER_ERROR
    assert not (small_disk / "other").exists()


@pytest.mark.long
def test_a_store_that_is_full(here: Path, small_disk: Path) -> None:
    """The run ends as it would without it, and says how to send the rest, in a few lines."""
    given = [*TRACKED, f"tracking.uri=sqlite:///{small_disk / 'mlflow.db'}", "max_steps=2", "device=cpu"]
    assert cli.main(given, time.time()) == 0
    fill(small_disk)
    process = processes.start(here, "-c", IMPATIENT, *given, f"hydra.run.dir={here / 'run'}")
    assert process.wait(timeout=processes.TIMEOUT_S) == 0, processes.output(here)
    lines = processes.output(here).splitlines()
    about_the_store = [line for line in lines if "MLflow" in line]
    assert len(about_the_store) == 2
    assert "database or disk is full" in about_the_store[0]
    assert "runner.track sync" in about_the_store[1]
    assert len(lines) < 20 + MOST_LINES
    assert read(here / "run", "summary.json")["status"] == "FINISHED"
