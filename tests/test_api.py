"""The commands as functions: results as objects, errors as exceptions, and a process that is left as it was."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from runner.api import compare, plan, run, sweep
from runner.errors import UserError
from tests.runs import QUICK, read


def state() -> Any:
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
    loggers = list(logging.root.handlers), logging.root.level
    return dict(os.environ), sys.argv, loggers, GlobalHydra.instance().hydra, [signal.getsignal(one) for one in numbers]


def test_run_and_resume(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = state()
    finished = run(*QUICK, "device=cpu2", "hydra.run.dir=mine", quiet=True)
    assert state() == before
    assert capfd.readouterr().out == ""
    summary = read(here / "mine", "summary.json")
    assert (finished.folder, finished.summary["status"]) == (Path("mine"), "FINISHED")
    assert (finished.result.optimizer_steps, dict(finished.result.eval)) == (10, summary["eval"])
    with pytest.raises(UserError, match="already holds a run"):
        run(*QUICK, "hydra.run.dir=mine", quiet=True)
    with pytest.raises(UserError, match="lear_rate"):
        run(*QUICK, "lear_rate=1")
    with pytest.raises(UserError, match="--help"):
        run("--help")
    assert state() == before
    assert [path.name for path in here.iterdir()] == ["mine"]


def test_an_interrupted_run_does_not_end_the_next(here: Path) -> None:
    def interrupt() -> None:
        while not Path("first/metrics.jsonl").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(*QUICK, "device=cpu", "epochs=1000", "hydra.run.dir=first", quiet=True)
    assert read(here / "first", "summary.json")["status"] == "PREEMPTED"
    assert run(*QUICK, "device=cpu", "hydra.run.dir=second", quiet=True).summary["status"] == "FINISHED"


def test_plan(here: Path) -> None:
    found = plan(*QUICK, "device=gpu4", "sync.k=4")
    assert (found.plan.world_size, found.certificate.level) == (4, "comparable")
    assert list(here.iterdir()) == []


def test_sweep_and_compare(here: Path) -> None:
    before = state()
    runs = sweep(*QUICK, "device=cpu", "seed=0,1", "accumulation.steps=1,2")
    assert state() == before
    assert sorted(zip(runs["accumulation_steps"], runs["seed"], strict=True)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    setups = compare(*runs["source"], margin=5)
    assert list(setups["seeds"]) == ["0 1", "0 1"]
    assert setups["verdict"].notna().sum() == 1
    with pytest.raises(UserError, match="nowhere"):
        compare("nowhere")


@pytest.mark.long
def test_from_a_script(tmp_path: Path) -> None:
    """In an own process, whose main module the workers import."""
    script = tmp_path / "mine.py"
    script.write_text(
        "from runner.api import run\n"
        "if __name__ == '__main__':\n"
        f"    print('steps', run(*{QUICK!r}, 'device=cpu2', quiet=True).result.optimizer_steps)\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "steps 10\n"), done.stderr
