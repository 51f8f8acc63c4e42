"""One run by the runner's command, and its row in `runs.csv`."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.sync_table.experiment import Experiment
from benchmarks.sync_table.rows import FAILED, FINISHED
from benchmarks.sync_table.setups import Job
from runner.track.card import git_commit

ROOT = Path(__file__).parents[2]
_GRACE_S = 30


def run_job(experiment: Experiment, job: Job, work: Path, lock: int) -> tuple[dict[str, Any], str]:
    """Train; the measured part of the row, and the last line of a failed run (empty otherwise).

    The run's folder stays in `work` without its model, which is 90 MB. `lock`: an open file that the run holds on to.
    """
    folder = work / "runs" / job.setup.name / f"s{job.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    overrides = [*experiment.overrides(job.setup), f"seed={job.seed}", f"hydra.run.dir={folder}"]
    log = folder.with_suffix(".log")
    code = _runner(overrides, log, lock)
    shutil.rmtree(folder / "model", ignore_errors=True)
    if code == 0:
        return {**measured(folder), **_now()}, ""
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return {"status": FAILED, **_now()}, f"exit code {code}: {' '.join(last)}"


def _runner(overrides: list[str], log: Path, lock: int) -> int:
    """The exit code of `python -m runner`, which is interrupted if this process is."""
    command = [sys.executable, "-m", "runner", *overrides]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, pass_fds=(lock,))
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
                process.kill()


def _now() -> dict[str, str]:
    return {"finished_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def measured(folder: Path) -> dict[str, Any]:
    """Results from a finished run's folder, by column."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    sync = summary.get("sync") or {}
    speed = summary["samples_per_s"]
    same = ("train_loss", "optimizer_steps", "samples_seen", "wall_s", "synchronisations", "comm_bytes", "comm_s")
    return {
        "status": FINISHED,
        "accuracy": summary["eval"]["accuracy"],
        "matthews": summary["eval"]["matthews"],
        "eval_loss": summary["eval"]["loss"],
        **{name: summary[name] for name in same},
        "samples_per_s": speed,
        "training_s": summary["samples_seen"] / speed if speed else None,
        "comm_stall_s": summary.get("comm_stall_s"),
        "drift_last": (sync.get("drift") or {}).get("last"),
        "cosine_mean": (sync.get("cosine") or {}).get("mean"),
        "lr": plan["lr"],
        "certificate": summary.get("certificate"),
        "machine": summary.get("machine"),
    }


def facts(experiment: Experiment, job: Job, majority: float) -> dict[str, Any]:
    """Columns that are known before a run starts."""
    setup = job.setup
    return {
        "setup": setup.name,
        "policy": setup.policy,
        "workers": setup.workers,
        "accumulation": setup.accumulation,
        "k": setup.k,
        "scaling": setup.scaling,
        "seed": job.seed,
        "base_lr": experiment.base_lr,
        "epochs": experiment.epochs,
        "majority": majority,
        "data": experiment.data_digest,
        "digest": experiment.digest(setup),
        "commit": commit(),
    }


def commit() -> str:
    """The runner's commit, with a plus sign if its files are not those of that commit."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--", "runner", "recipes", "conf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{(git_commit() or 'unknown')[:12]}{'+' if done.stdout.strip() else ''}"


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A `kill` of this process reaches the run as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
