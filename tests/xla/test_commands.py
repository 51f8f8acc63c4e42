"""The commands on torch_xla, as one types them: real worker processes, a real SQLite store, a real folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.processes import alive_in_session, start, statuses, still_alive_in_session, wait_for
from tests.replicas import TINY

QUICK = [override for override in TINY if not override.startswith(("tracking", "precision"))]
TPU = ["device=tpu8", "device.workers=2", "sync.k=4"]
ENVIRONMENT = {**os.environ, "COLUMNS": "200"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def folder_of(root: Path) -> Path:
    (folder,) = (root / "outputs" / "acceptability").iterdir()
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def only_run(root: Path) -> Run:
    client = MlflowClient(f"sqlite:///{root / 'outputs' / 'mlflow.db'}")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which a run on two replicas was started, and what it printed."""
    root = tmp_path_factory.mktemp("finished")
    done = subprocess.run(
        command("runner", *QUICK, *TPU), cwd=root, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return root, done.stdout


def test_the_banner_says_where_it_runs(finished: tuple[Path, str]) -> None:
    """A rehearsal on XLA's CPU device is called so, and nothing of torch_xla or gloo talks in between."""
    _, said = finished
    assert said.lstrip().startswith("Rehearsal: tpu2 is not here, so its 2 worker(s) run on XLA's CPU device")
    assert "compilations in " in said
    assert "warning" not in said.lower()
    assert "gloo" not in said.lower()


def test_folder_and_store_are_those_of_any_run(finished: tuple[Path, str]) -> None:
    """Summary, ledger, certificate, metrics and MLflow's run: complete, and with what was compiled."""
    root, _ = finished
    folder, run = folder_of(root), only_run(root)
    summary, certificate = read(folder, "summary.json"), read(folder, "certificate.json")
    assert (summary["status"], summary["rehearsed"], summary["setup"]) == ("FINISHED", True, "tpu2 · k=4 · s0")
    assert (summary["optimizer_steps"], summary["samples_seen"], summary["synchronisations"]) == (10, 200, 3)
    assert summary["compilations"]["count"] > 0
    assert summary["compilations"]["seconds"] > 0
    assert summary["warnings"] == []
    assert summary["samples_per_s"] > 0
    assert read(folder, "ledger.json")["sound"] is True
    assert certificate["level"] == "comparable"  # k = 4 is another sync policy
    assert run.info.status == "FINISHED"
    assert run.data.tags["device.executed_on"] == "xla"
    assert run.data.tags["device.rehearsed"] == "true"
    assert run.data.metrics["compile/count"] == pytest.approx(summary["compilations"]["count"], abs=2)
    assert run.data.metrics["compile/seconds"] > 0
    assert {"train/loss", "train/samples_seen", "comm/bytes", "eval/accuracy"} <= run.data.metrics.keys()


def test_versions_name_torch_xla(finished: tuple[Path, str]) -> None:
    """A result depends on it, so the certificate compares it."""
    certificate = read(folder_of(finished[0]), "certificate.json")
    (versions,) = [one for one in certificate["equal"] if one["name"] == "versions"]
    assert "torch_xla" in json.dumps(versions["value"])


def test_the_model_was_saved_through_the_cpu(finished: tuple[Path, str]) -> None:
    """`from_pretrained` reads it where there is no XLA."""
    folder = folder_of(finished[0]) / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = AutoTokenizer.from_pretrained(folder)(["the dog sleeps"], return_tensors="pt")
    assert model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.shape == (1, 2)


def test_verify_finds_a_cpu_run_and_a_tpu_run_to_be_the_same(tmp_path: Path) -> None:
    """One plain CPU worker and two replicas on XLA in lockstep, dropout on: the same in every optimizer step."""
    exact = [*QUICK, "tracking=none", "equivalence=exact", "recipe.model.dropout=0.1", "optimizer=sgd"]
    done = subprocess.run(
        command("runner.verify", *exact, "--a", "device=cpu", "--b", "device=tpu8 device.workers=2", "--steps", "5"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same: no difference beyond rounding in 5 optimizer steps" in done.stdout


def test_torchrun_starts_it_as_well(tmp_path: Path) -> None:
    """The way onto several hosts: processes that torchrun has started take the same backend."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "runner", *QUICK, "tracking=none", *TPU],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(folder_of(tmp_path), "summary.json")["compilations"]["count"] > 0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on until it is ended, and has come to its first steps."""
    process = start(tmp_path, *command("runner", *QUICK, *TPU, "epochs=100000"))
    try:
        wait_for(tmp_path, "outputs/acceptability/*/metrics.jsonl", process)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_ctrl_c(running: subprocess.Popen[str], tmp_path: Path) -> None:
    """Exit 130, the run KILLED, its books closed, and no process left."""
    os.killpg(running.pid, signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert read(folder_of(tmp_path), "summary.json")["status"] == "KILLED"
    assert statuses(tmp_path) == ["KILLED"]
    assert still_alive_in_session(running.pid) == []


def test_a_worker_that_dies(running: subprocess.Popen[str], tmp_path: Path) -> None:
    """Exit 1 with the signal it died of, the run FAILED, and no process left."""
    helpers = [pid for pid in alive_in_session(running.pid) if _parent(pid) == running.pid]
    workers = [pid for pid in alive_in_session(running.pid) if _parent(pid) in helpers]  # forked by the forkserver
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1, said
    assert "ended with signal 9" in said or "failed" in said, said
    assert read(folder_of(tmp_path), "summary.json")["status"] == "FAILED"
    assert statuses(tmp_path) == ["FAILED"]
    assert still_alive_in_session(running.pid) == []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
