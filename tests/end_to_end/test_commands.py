"""The commands as one types them: processes of their own, signals, torchrun, help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import alive_in_session, start, statuses, still_alive_in_session, wait_for
from tests.replicas import TINY

BIN = Path(sys.executable).parent
QUICK = [override for override in TINY if not override.startswith(("tracking", "precision"))]


@pytest.fixture(autouse=True)
def terminal_heard() -> Iterator[None]:
    """Tests that run under nohup ignore a closed terminal, and so would every command that they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_kills_the_run_and_leaves_nobody_behind(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM or a closed terminal in mid-training: exit code 130, KILLED in folder and store, nobody left."""
    process = start(tmp_path, str(BIN / "python"), "-m", "runner", *QUICK, "device=cpu2", "epochs=100000")
    metrics = wait_for(tmp_path, "outputs/acceptability/*/metrics.jsonl", process)
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # what a terminal does
    else:
        process.send_signal(number)  # what a scheduler does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    summary = json.loads((metrics.parent / "summary.json").read_text())
    assert summary["samples_seen"] > 0
    assert json.loads((metrics.parent / "summary.json").read_text())["status"] == "KILLED"
    assert statuses(tmp_path) == ["KILLED"]
    assert still_alive_in_session(process.pid) == []


def test_workers_end_with_a_command_that_is_killed_outright(tmp_path: Path) -> None:
    """SIGKILL, as when memory runs out, reaches the command alone: its workers do not train on for nobody."""
    process = start(tmp_path, str(BIN / "python"), "-m", "runner", *QUICK, "device=cpu2", "epochs=100000")
    wait_for(tmp_path, "outputs/acceptability/*/metrics.jsonl", process)
    assert len(alive_in_session(process.pid)) > 2
    process.kill()
    process.wait(timeout=60)
    assert still_alive_in_session(process.pid) == []


def test_nohup_is_heeded(tmp_path: Path) -> None:
    """A run that was told to outlive its terminal does: it trains on, and ends by itself."""
    process = start(tmp_path, "nohup", str(BIN / "python"), "-m", "runner", *QUICK, "device=cpu2", "epochs=150")
    wait_for(tmp_path, "outputs/acceptability/*/metrics.jsonl", process)
    os.killpg(process.pid, signal.SIGHUP)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert statuses(tmp_path) == ["FINISHED"]


def test_ctrl_c_stops_a_sweep(tmp_path: Path) -> None:
    """Ctrl-C in the second of three jobs: the first stays finished, the third never starts."""
    sweep = ["-m", "device=cpu", "max_steps=3,100000,4", "epochs=100000"]
    process = start(tmp_path, str(BIN / "python"), "-m", "runner", *QUICK, *sweep)
    wait_for(tmp_path, "outputs/sweeps/*/1/metrics.jsonl", process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert sorted(statuses(tmp_path)) == ["FINISHED", "KILLED", "KILLED"]  # the last is the sweep's own
    assert not list(tmp_path.glob("outputs/sweeps/*/2"))


def test_ctrl_c_before_anything_has_started(tmp_path: Path) -> None:
    """Ctrl-C while libraries are still being imported: no traceback from any process, nothing left behind."""
    process = start(tmp_path, str(BIN / "python"), "-m", "runner", *QUICK)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output


def test_torchrun_leaves_one_folder_and_one_run(tmp_path: Path) -> None:
    """Two processes of torchrun join into one run: rank 0 plays the parent, the other never enters Hydra."""
    done = subprocess.run(
        [str(BIN / "torchrun"), "--nproc-per-node=2", "-m", "runner", *QUICK, "device=cpu2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "outputs" / "acceptability").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["setup"], summary["samples_seen"]) == ("FINISHED", "cpu2 · s0", 200)
    assert statuses(tmp_path) == ["FINISHED"]
    assert done.stdout.count("finished") == 1


def test_torchrun_with_another_world_size_is_refused(tmp_path: Path) -> None:
    """A setup of three workers in a world of two: one sentence from rank 0, nothing left behind."""
    done = subprocess.run(
        [str(BIN / "torchrun"), "--nproc-per-node=2", "-m", "runner", *QUICK, "device=cpu", "device.workers=3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("device.workers=3 does not match the 2 processes") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["runner", "runner.plan"])
def test_the_plan_is_printed(tmp_path: Path, module: str) -> None:
    """Both commands show batch sizes, learning rate and the equivalent batches for 1, 2, 4 and 8 workers."""
    done = subprocess.run(
        [str(BIN / "python"), "-m", module, *QUICK, "batch.global_batch=96", "device=cpu2", "tracking=none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "140"},
    )
    assert done.returncode == 0, done.stderr
    for text in ("micro-batch 48 × accumulation 1 × 2 worker(s)", "base 0.001 × 2 = linear rule", "Certificate"):
        assert text in done.stdout
    cells = [line.split() for line in done.stdout.splitlines()]
    assert ["256", "256", "128", "64", "32"] in cells
    assert ["96", "96", "48", "24", "12"] in cells
    assert (module == "runner.plan") == (list(tmp_path.iterdir()) == [])


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (["--help"], ["device: auto, cpu, cpu2", "optimizer.lr=1e-4", "recipe: acceptability, causal_lm, cola"]),
        (["--cfg", "job", "--resolve"], ["lr: 0.001", "global_batch: 48"]),
        (["--info", "defaults-tree"], ["recipe: acceptability", "sync: periodic"]),
    ],
)
def test_hydra_shows_the_configuration(tmp_path: Path, options: list[str], texts: list[str]) -> None:
    """The console script answers Hydra's own questions, and leaves nothing behind."""
    done = subprocess.run(
        [str(BIN / "runner"), *options], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for text in texts:
        assert text in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_workers_listen_nowhere_but_on_loopback(tmp_path: Path) -> None:
    """While two workers train, no process of the run has a socket open to the network."""
    process = start(tmp_path, str(BIN / "python"), "-m", "runner", *QUICK, "device=cpu2", "epochs=100000")
    try:
        wait_for(tmp_path, "outputs/acceptability/*/metrics.jsonl", process)
        mine = {
            os.readlink(link)
            for pid in alive_in_session(process.pid)
            for link in Path(f"/proc/{pid}/fd").iterdir()
            if link.is_symlink()
        }
        listening = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                    listening.append(fields[1].split(":")[0])
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert set(listening) <= loopback
