"""One run by the runner's command, and its row."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.long_runs import commit
from benchmarks.sync_frontier.rows import FAILED, FINISHED
from runner.folder.record import RunRecord

ROOT = Path(__file__).parents[2]
#: Exit codes of a run that was interrupted, or asked to make room.
_INTERRUPTED = (130, 143)


class TrainingTask(Protocol):
    """A task and its metric."""

    @property
    def metric(self) -> str: ...


class TrainingJob(Protocol):
    """One run; its overrides lack data, model and folder."""

    @property
    def overrides(self) -> list[str]: ...

    @property
    def task(self) -> TrainingTask: ...


@dataclass(frozen=True)
class Material:
    """Files of the data, and the model's folder."""

    train: Path
    dev: Path
    model: Path

    def with_more_held_out(self, one_in: int, folder: Path) -> Material:
        """Every `one_in`-th line of the training data is evaluated instead. The new files are in `folder`."""
        lines, dev_lines = (
            [line for line in path.read_text("utf-8").split("\n") if line] for path in (self.train, self.dev)
        )
        held_out = lines[::one_in]
        del lines[::one_in]
        train, dev = folder / "train.tsv", folder / "dev.tsv"
        for path, part in ((train, lines), (dev, [*held_out, *dev_lines])):
            path.write_text("".join(f"{line}\n" for line in part), encoding="utf-8")
        return Material(train, dev, self.model)

    @property
    def overrides(self) -> list[str]:
        files = [f"recipe.data.train={self.train}", f"recipe.data.eval={self.dev}"]
        return [*files, f"recipe.model.name={self.model}"]


def run_job(job: TrainingJob, material: Material) -> tuple[dict[str, Any], str]:
    """Train. The measured part of the row, and the last line of a run that failed (empty otherwise)."""
    ended = {"commit": commit()}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "run"
        command = [sys.executable, "-m", "runner", *job.overrides, *material.overrides, f"hydra.run.dir={folder}"]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=ROOT, check=False, **output)
        ended["finished_at"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        if done.returncode == 0:
            return {**ended, **_measured(folder, job.task.metric)}, ""
        if done.returncode in _INTERRUPTED:
            raise KeyboardInterrupt
    last = done.stdout.strip().splitlines()[-1:]
    return {**ended, "status": FAILED}, f"exit code {done.returncode}: {' '.join(last)}"


def _measured(folder: Path, metric: str) -> dict[str, Any]:
    record = RunRecord.read(folder)
    assert record is not None
    result, sync = record.result, record.result.sync or {}
    names = ("train_loss", "optimizer_steps", "samples_seen", "samples_per_s", "synchronisations", "comm_bytes")
    return {
        "status": FINISHED,
        "metric": result.eval[metric],
        "eval_loss": result.eval.get("loss"),
        **{name: getattr(result, name) for name in (*names, "comm_stall_s", "machine")},
        **{name: getattr(record, name) for name in ("wall_s", "certificate")},
        "drift_mean": (sync.get("drift") or {}).get("mean"),
        "fragments": sync.get("fragments"),
        "delay": sync.get("delay"),
    }
