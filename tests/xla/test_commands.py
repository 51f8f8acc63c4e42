"""The commands on torch_xla: real worker processes, a real SQLite store, a real folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.processes import BIN, TIMEOUT_S, left_of_session, output, processes_of_session, start, wait_for
from tests.runs import QUICK, TRACKED, only_folder, read, statuses, stored_runs

TPU = ["device=tpu8", "device.workers=2", "sync.k=4"]


def complete(root: Path, *command: str) -> str:
    """Run a command that must succeed; its output."""
    code = start(root, *command, COLUMNS="200").wait(timeout=TIMEOUT_S)
    assert code == 0, output(root)
    return output(root)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run on two replicas was started."""
    root = tmp_path_factory.mktemp("finished")
    complete(root, "-m", "runner", *TRACKED, *TPU)
    return root


def test_banner(finished: Path) -> None:
    """A rehearsal on XLA's CPU device says so first; neither torch_xla nor gloo prints anything."""
    printed = output(finished)
    assert printed.lstrip().startswith("Rehearsal: tpu2")
    assert "compilations in " in printed
    assert "warning" not in printed.lower()
    assert "gloo" not in printed.lower()


def test_folder_and_store_are_those_of_any_run(finished: Path) -> None:
    """Summary, ledger, certificate, metrics and MLflow's run are complete, and include compilations."""
    folder, (run,) = only_folder(finished), stored_runs(finished)
    summary, certificate = read(folder, "summary.json"), read(folder, "certificate.json")
    assert (summary["status"], summary["rehearsed"], summary["setup"]) == ("FINISHED", True, "tpu2 · k=4 · s0")
    assert (summary["optimizer_steps"], summary["samples_seen"], summary["synchronisations"]) == (10, 200, 3)
    assert summary["compilations"]["count"] > 0
    assert summary["compilations"]["seconds"] > 0
    assert summary["warnings"] == []
    assert summary["samples_per_s"] > 0
    assert read(folder, "ledger.json")["sound"] is True
    assert certificate["level"] == "comparable"  # k = 4 is another sync policy
    (versions,) = [one for one in certificate["equal"] if one["name"] == "versions"]
    assert "torch_xla" in json.dumps(versions["value"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["device.executed_on"] == "xla"
    assert run.data.tags["device.rehearsed"] == "true"
    assert run.data.metrics["train/compile/count"] == pytest.approx(summary["compilations"]["count"], abs=2)
    assert run.data.metrics["train/compile/seconds"] > 0
    assert {"train/loss", "train/samples_seen", "train/comm/bytes", "eval/accuracy"} <= run.data.metrics.keys()


def test_model_loads_without_xla(finished: Path) -> None:
    folder = only_folder(finished) / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = AutoTokenizer.from_pretrained(folder)(["the dog sleeps"], return_tensors="pt")
    assert model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.shape == (1, 2)


def test_verify_of_a_cpu_and_a_tpu_setup(tmp_path: Path) -> None:
    """One plain CPU worker and two replicas on XLA in lockstep, dropout on: the same in every optimizer step."""
    exact = [*QUICK, "equivalence=exact", "recipe.model.dropout=0.1", "optimizer=sgd"]
    setups = ["--a", "device=cpu", "--b", "device=tpu8 device.workers=2", "--steps", "5"]
    assert "the same" in complete(tmp_path, "-m", "runner.verify", *exact, *setups)


def test_torchrun(tmp_path: Path) -> None:
    """As on several hosts: processes started by torchrun use the same backend."""
    complete(tmp_path, str(BIN / "torchrun"), "--nproc-per-node=2", "-m", "runner", *QUICK, *TPU)
    assert read(only_folder(tmp_path), "summary.json")["compilations"]["count"] > 0


@pytest.fixture
def running(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A run without end that has trained its first steps."""
    process = start(tmp_path, "-m", "runner", *TRACKED, *TPU, "epochs=100000", "launch.max_restarts=0")
    wait_for(tmp_path, "outputs/acceptability/*/metrics.jsonl", process)
    return process


def test_ctrl_c(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Exit code 130, KILLED in folder and store, no process left."""
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(timeout=TIMEOUT_S) == 130, output(tmp_path)
    assert "Traceback" not in output(tmp_path)
    assert read(only_folder(tmp_path), "summary.json")["status"] == "KILLED"
    assert statuses(tmp_path) == ["KILLED"]
    assert left_of_session(running.pid) == []


def test_killed_worker(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Exit code 1, FAILED in folder and store, no process left."""
    helpers = [pid for pid in processes_of_session(running.pid) if _parent(pid) == running.pid]
    workers = [pid for pid in processes_of_session(running.pid) if _parent(pid) in helpers]  # of the forkserver
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    assert running.wait(timeout=TIMEOUT_S) == 1, output(tmp_path)
    assert "signal 9" in output(tmp_path) or "failed" in output(tmp_path)
    assert read(only_folder(tmp_path), "summary.json")["status"] == "FAILED"
    assert statuses(tmp_path) == ["FAILED"]
    assert left_of_session(running.pid) == []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
