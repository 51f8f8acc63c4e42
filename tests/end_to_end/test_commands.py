"""The commands as processes: signals, torchrun, help."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import cli
from tests.processes import (
    BIN,
    TIMEOUT_S,
    children,
    left_of_session,
    output,
    processes_of_session,
    start,
    wait_for,
    wait_until,
)
from tests.runs import QUICK, TRACKED, only_folder, read, statuses

ENDLESS = ["-m", "runner", *TRACKED, "device=cpu2", "epochs=100000"]
METRICS = "outputs/acceptability/*/metrics.jsonl"


@pytest.fixture(autouse=True)
def default_sighup() -> Iterator[None]:
    """Under nohup the tests ignore SIGHUP, and every command that they start would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def assert_ended(root: Path, process: subprocess.Popen[bytes], status: str = "KILLED", code: int = 130) -> None:
    assert process.wait(timeout=TIMEOUT_S) == code, output(root)
    assert "Traceback" not in output(root)
    summary = read(only_folder(root), "summary.json")
    assert summary["status"] == status
    assert summary["samples_seen"] > 0
    assert statuses(root) == ["KILLED"]
    assert left_of_session(process.pid) == []


def wait_until_trained_and_tracked(root: Path, process: subprocess.Popen[bytes]) -> Path:
    """MLflow's store takes seconds to be made, for which a run that is interrupted does not wait."""
    metrics = wait_for(root, METRICS, process)
    wait_until(lambda: read(metrics.parent, "tracking.json")["run_id"], "MLflow does not know the run")
    return metrics


def test_ctrl_c(tmp_path: Path) -> None:
    """Exit code 130, KILLED in folder and store, no process left; until then no socket is open to the network."""
    process = start(tmp_path, *ENDLESS)
    wait_until_trained_and_tracked(tmp_path, process)
    assert listening_addresses(process.pid) <= {"0100007F", "00000000000000000000000001000000"}  # loopback
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert_ended(tmp_path, process)


def listening_addresses(session: int) -> set[str]:
    """Addresses, as in /proc/net, on which a process of the session accepts TCP connections."""
    sockets = {
        os.readlink(link)
        for pid in processes_of_session(session)
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink()
    }
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.long
def test_closed_terminal(tmp_path: Path) -> None:
    process = start(tmp_path, *ENDLESS)
    wait_until_trained_and_tracked(tmp_path, process)
    process.send_signal(signal.SIGHUP)
    assert_ended(tmp_path, process)


@pytest.mark.long
def test_nohup_and_sigterm(tmp_path: Path) -> None:
    """Under nohup a run trains on when its terminal is closed; SIGTERM, as of a scheduler, saves and ends it."""
    process = start(tmp_path, "nohup", str(BIN / "python"), *ENDLESS)
    metrics = wait_until_trained_and_tracked(tmp_path, process)
    os.killpg(process.pid, signal.SIGHUP)
    seen = metrics.stat().st_size
    wait_until(lambda: metrics.stat().st_size > seen or process.poll() is not None, "it does not train on")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert_ended(tmp_path, process, "PREEMPTED", 75)
    assert len(list(only_folder(tmp_path).glob("checkpoints/step-*"))) == 1


@pytest.mark.long
def test_workers_end_with_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL, as when memory runs out, reaches the parent only: its workers must not train on."""
    with tempfile.TemporaryDirectory() as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        process = start(tmp_path, *ENDLESS)
        wait_for(tmp_path, METRICS, process)
        assert len(processes_of_session(process.pid)) > 2
        assert list(Path(temporary).glob(".runner-*"))
        process.kill()
        process.wait(timeout=TIMEOUT_S)
        assert left_of_session(process.pid) == []
        assert not list(Path(temporary).glob(".runner-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_signals_during_start_up(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """While libraries are being imported: no traceback from any process, and nothing left."""
    process = start(tmp_path, "-m", "runner", *QUICK)
    wait_until(lambda: len(processes_of_session(process.pid)) > 1, "the forkserver never starts")
    os.killpg(process.pid, number)
    assert process.wait(timeout=TIMEOUT_S) == code, output(tmp_path)
    assert "Traceback" not in output(tmp_path)
    assert left_of_session(process.pid) == []


def torchrun(root: Path, *overrides: str) -> tuple[int, str]:
    """The exit code and the output of `torchrun` with two processes."""
    process = start(root, str(BIN / "torchrun"), "--nproc-per-node=2", "-m", "runner", *TRACKED, *overrides)
    return process.wait(timeout=TIMEOUT_S), output(root)


@pytest.mark.long
def test_torchrun_leaves_one_folder_and_one_run(tmp_path: Path) -> None:
    """Two processes of torchrun join one run: rank 0 is the parent, the other never enters Hydra."""
    code, text = torchrun(tmp_path, "device=cpu2")
    assert code == 0, text
    summary = read(only_folder(tmp_path), "summary.json")
    assert (summary["status"], summary["setup"], summary["samples_seen"]) == ("FINISHED", "cpu2 · s0", 200)
    assert statuses(tmp_path) == ["FINISHED"]
    assert text.count("finished") == 1


@pytest.mark.long
def test_torchrun_starts_workers_again(tmp_path: Path) -> None:
    """In the same folder and MLflow run, from the newest checkpoint, with the store that it has kept."""
    arguments = [*TRACKED, "device=cpu2", "epochs=40", "checkpoint.every_steps=10"]
    process = start(
        tmp_path, str(BIN / "torchrun"), "--nproc-per-node=2", "--max-restarts=1", "-m", "runner", *arguments
    )
    wait_for(tmp_path, "outputs/*/*/checkpoints/step-*", process)
    os.kill(next(pid for pid in children(process.pid)), signal.SIGKILL)
    assert process.wait(timeout=TIMEOUT_S) == 0, output(tmp_path)
    summary = read(only_folder(tmp_path), "summary.json")
    assert (summary["status"], summary["optimizer_steps"]) == ("FINISHED", 200)
    assert len(summary["resumed_after"]) == 1
    assert statuses(tmp_path) == ["FINISHED"]


@pytest.mark.long
def test_torchrun_is_preempted_before_its_first_step(tmp_path: Path) -> None:
    """No worker ends alone while it prepares: all save the same step."""
    process = start(tmp_path, str(BIN / "torchrun"), "--nproc-per-node=2", *ENDLESS)
    metrics = wait_for(tmp_path, METRICS, process, empty=True)  # which is opened before the model is built
    for pid in children(process.pid):
        os.kill(pid, signal.SIGUSR1)
    assert process.wait(timeout=TIMEOUT_S) != 0
    assert read(metrics.parent, "summary.json")["status"] == "PREEMPTED", output(tmp_path)
    assert list(metrics.parent.glob("checkpoints/step-*"))


def test_torchrun_with_another_world_size(tmp_path: Path) -> None:
    """A setup of three workers in a world of two: one sentence from rank 0, nothing left behind."""
    code, text = torchrun(tmp_path, "device=cpu", "device.workers=3")
    assert code != 0
    assert text.count("device.workers=3") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["output.txt"]


def test_plan(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Batch sizes, learning rate, certificate, and the equivalent batches for 1, 2, 4 and 8 workers; no folder."""
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.run_tool("plan", [*QUICK, "batch.global_batch=96", "device=cpu2"]) == 0
    printed = capsys.readouterr().out
    for text in ("48", "0.001 × 1.414", "betas", "0.8, 0.998", "Certificate"):
        assert text in printed
    cells = [line.split() for line in printed.splitlines()]
    assert ["256", "256", "128", "64", "32"] in cells
    assert ["96", "96", "48", "24", "12"] in cells
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (["--cfg", "job", "--resolve"], ["lr: 0.001", "global_batch: 48"]),
        (["--info", "defaults-tree"], ["recipe: acceptability", "sync: periodic"]),
    ],
)
def test_hydra_shows_the_configuration(
    here: Path, options: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra's own options work, and leave nothing behind."""
    assert cli.main(options, 0.0) == 0
    printed = capsys.readouterr().out
    for text in texts:
        assert text in printed
    assert list(here.iterdir()) == []


def test_help(tmp_path: Path) -> None:
    """Groups, choices and settings; a pager that ends early is no error."""
    process = start(tmp_path, "sh", "-c", f"{BIN / 'runner'} --help; {BIN / 'runner'} --help | true")
    assert process.wait(timeout=TIMEOUT_S) == 0
    for text in ("device: auto, cpu, cpu2", "optimizer.lr=1e-4", "recipe: acceptability, causal_lm, chat, cola"):
        assert output(tmp_path).count(text) == 1
    assert "BrokenPipe" not in output(tmp_path)


def test_console_script_beside_a_module_of_its_name(tmp_path: Path) -> None:
    """The user's module is imported neither by the command nor by its workers."""
    (tmp_path / "runner.py").write_text("raise AssertionError")
    process = start(tmp_path, str(BIN / "runner"), *QUICK, "max_steps=1")
    assert process.wait(timeout=TIMEOUT_S) == 0, output(tmp_path)
    assert "Error" not in output(tmp_path)
