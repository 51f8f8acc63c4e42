"""`python -m runner.verify` as one types it: both setups with workers of their own, one verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from runner.cli import verify_main
from tests.replicas import TINY

VERIFY = [sys.executable, "-m", "runner.verify"]
EXACT = [*TINY, "equivalence=exact", "recipe.model.dropout=0.1"]


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "TMPDIR": str(root)}
    return subprocess.run([*VERIFY, *arguments], cwd=root, capture_output=True, text=True, env=environment, check=False)


def test_setups_that_are_the_same(tmp_path: Path) -> None:
    """Two workers against one accumulating worker: exit 0, the differences in a table and a file, nothing left over."""
    done = run(
        tmp_path, *EXACT, "--a", "device=cpu accumulation.steps=3", "--b", "device=cpu2", "--json", "report.json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Certificate: equivalent to a" in done.stdout
    assert "the same: no difference beyond rounding in 10 optimizer steps" in done.stdout
    assert done.stderr == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["finding"] is None
    assert report["steps"] == 10  # both runs end there
    assert report["certificate"]["level"] == "equivalent"
    assert [one["what"] for one in report["largest"]] == ["loss", "gradient", "weight"]
    assert all(0 <= one["share"] <= one["tolerance"] for one in report["largest"])
    assert report["largest"][2]["step"] > 0  # the weights were compared after they had moved
    assert not list(tmp_path.glob("runner-*"))


@pytest.mark.parametrize(
    ("b", "words"),
    [
        ("equivalence=standard device=cpu2", "different: loss, at optimizer step 1: a has the loss"),
        ("sync.k=4 device=cpu2", "different: loss, at optimizer step 3"),
        ("optimizer.lr=2e-3 schedule.warmup_share=0", "different: learning rate, at optimizer step 1"),
        ("recipe.model.hidden_size=32", "different: weight, before the first step: the models differ"),
    ],
)
def test_setups_that_are_not(tmp_path: Path, b: str, words: str) -> None:
    """Exit 3, and the first step and thing that differ."""
    done = run(tmp_path, *EXACT, "device=cpu", "--a", "", "--b", b, "--steps", "4")
    assert done.returncode == 3, done.stdout + done.stderr
    assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: --a, --b"),
        (["--a", "device=cpu"], "the following arguments are required: --b"),
        (["--a", "", "--b", "", "--steps", "0"], "--steps=0 is invalid"),
        (["--a", "", "--b", "", "--steps", "ten"], "argument --steps: invalid int value: 'ten'"),
        (["--a", "", "--b", "", "--step", "3"], "unrecognized arguments: --step"),
        (["--a", "", "--b", "", "-m"], "unrecognized arguments: -m"),
        (["--a", "device=cpu", "--b", "device=cpuu"], "setup b: device=cpuu is not a choice of the group 'device'"),
        (["--a", "optimizer.lr=x", "--b", ""], "setup a: optimizer.lr is wrong: 'x' is not a number"),
        (["--a", "seed=0,1", "--b", ""], "setup a: "),
        (["lr=3", "--a", "", "--b", ""], "setup a: there is no setting 'lr'"),
        (["--a", "'device=cpu", "--b", ""], "--a='device=cpu cannot be split into overrides"),
        (["--a", "", "--b", "", "--config-dir", "nowhere"], "--config-dir=nowhere is not a folder"),
        (["--a", "", "--b", "", "--json", "no/where.json"], "--json=no/where.json cannot be written"),
        (["--a", "compile=true", "--b", "", "equivalence=exact"], "setup a: compile=true cannot be"),
        (["--a", "device=cpu2 batch.global_batch=25", "--b", ""], "setup a: "),
    ],
)
def test_wrong_input(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence that names what is wrong, and exit code 2."""
    monkeypatch.setenv("COLUMNS", "300")
    assert verify_main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {sentence}")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_not_under_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert verify_main(["--a", "", "--b", ""]) == 2
    assert "call it without torchrun" in capsys.readouterr().err


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C in the middle ends all workers, with exit code 130 and no folder left."""
    command = [*VERIFY, "device=cpu2", "tracking=none", "equivalence=exact", "--a", "", "--b", "", "--steps", "800"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    for _ in range(1200):
        if list(tmp_path.glob("runner-verify-*/progress")):
            break
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not list(tmp_path.glob("runner-verify-*"))
    assert Path(tempfile.gettempdir()) != tmp_path
