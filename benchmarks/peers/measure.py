"""One measurement: a variant's processes, and the numbers that they leave."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.peers import peer
from benchmarks.peers.cells import EVERY, LIMIT, OURS, TASKS, Cell, parse
from benchmarks.peers.material import Material
from benchmarks.peers.records import Row
from runner.backends.machine import available_cores
from runner.track.card import git_commit

ROOT = Path(__file__).parents[2]
_SCRIPTS = {"accelerate": "with_accelerate", "trainer": "with_trainer", "trainer_grouped": "with_trainer"}
#: Seconds between two looks at the memory, which take 10 ms.
_LOOK_S = 0.5
_LAST_LOSSES = 5


class RunFailed(Exception):
    """A measured command failed; the message is the end of its output."""


def measure(material: Material, cell: Cell, repetition: int, device: str) -> Row:
    """Run a variant once. The repetition's number is its seed, so that all variants see the same samples."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        commands = [_command(material, cell, repetition, device, out)]
        if cell.variant == LIMIT:  # workers do not talk to each other
            commands = [[*commands[0], f"--out={out}{worker}"] for worker in range(cell.workers)]
        start = time.time()
        wall, peak = _run(commands, material.work, cell.workers, out.with_suffix(".log"))
        row = Row(device, repetition, cell, 0.0, wall_s=wall, peak_mb=peak, commit=(git_commit() or "")[:12])
        if cell.variant == LIMIT:
            found = [json.loads(Path(f"{out}{worker}").read_text()) for worker in range(cell.workers)]
            speed = sum(one.pop("samples_per_s") for one in found)
            return dataclasses.replace(row, samples_per_s=speed, details=found[0])
        moments, losses = _runner_notes(out) if cell.variant.startswith(OURS) else peer.read(out)
    return dataclasses.replace(
        row,
        samples_per_s=steady(moments, cell),
        first_step_s=dict(moments)[1] - start,
        losses=(losses[0], statistics.fmean(losses[-_LAST_LOSSES:])),
    )


def steady(moments: Sequence[tuple[int, float]], cell: Cell) -> float:
    """Samples per second from the end of step `cell.skipped` to the end of the last one."""
    times = dict(moments)
    steps = cell.steps - cell.skipped
    return TASKS[cell.task].batch * steps / (times[cell.steps] - times[cell.skipped])


def _runner_notes(folder: Path) -> tuple[list[tuple[int, float]], list[float]]:
    """As `peer.read`, from a run's `metrics.jsonl`: losses are logged right after step 1, 11, 21, … and the last."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [line for line in lines if line["key"] == "train/loss"]
    last = rows[-1]["step"]
    logged = [(row["step"], row["timestamp"] / 1000) for row in rows if row["step"] % EVERY == 1 or row["step"] == last]
    return logged, [row["value"] for row in rows]


def _command(material: Material, cell: Cell, seed: int, device: str, out: Path) -> list[str]:
    task, variant = TASKS[cell.task], parse(cell.variant)
    if variant.program == OURS:
        kind = "gpu" if device == "cuda" else "cpu"
        overrides = [
            *material.overrides(task),
            f"device={kind}{cell.workers if cell.workers > 1 else ''}",
            f"precision={cell.precision}",
            f"optimizer.lr={task.lr}",
            f"schedule.warmup_share={peer.WARMUP_SHARE}",
            f"max_steps={cell.steps}",
            f"seed={seed}",
            f"hydra.run.dir={out}",
        ]
        return [sys.executable, "-m", "runner", *overrides, *(["compile=true"] if variant.compile else [])]
    values = {
        "rows": material.rows(task, seed),
        "batch": task.batch // cell.workers,
        "precision": cell.precision,
        "device": device,
    }
    if variant.program == LIMIT:
        values |= {"shapes": material.shapes(task), "samples": task.steps * task.batch}
        return [sys.executable, "-m", "benchmarks.peers.limit", *_named(values)]
    values |= {"task": task.name, "model": material.model(task), "lr": task.lr, "steps": cell.steps, "seed": seed}
    flags = {"compile": variant.compile, "flash": variant.flash, "grouped": variant.program == "trainer_grouped"}
    launch = ["-m"]
    if cell.workers > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell.workers}", "-m"]
    script = f"benchmarks.peers.{_SCRIPTS.get(variant.program, variant.program)}"
    chosen = [f"--{name}" for name, on in flags.items() if on]
    return [sys.executable, *launch, script, *_named({**values, "out": out}), *chosen]


def _named(values: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _run(commands: Sequence[Sequence[str]], work: Path, workers: int, log: Path) -> tuple[float, float]:
    """Seconds until all of them have ended, and their peak memory in MB. Raises RunFailed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    threads = str(max(1, available_cores() // workers))
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    start, peak = time.perf_counter(), 0.0
    started: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as file:
            for command in commands:
                started.append(
                    subprocess.Popen(
                        command, cwd=work, env=environment, stdout=file, stderr=file, start_new_session=True
                    )
                )
        for process in started:
            while process.returncode is None:
                try:
                    process.wait(_LOOK_S)
                except subprocess.TimeoutExpired:
                    peak = max(peak, sum(map(_memory_mb, started)))
        seconds = time.perf_counter() - start
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for process in started:
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise RunFailed(f"{' '.join(map(str, process.args))}\nexit code {process.returncode}\n{tail}")
    return seconds, peak


def _memory_mb(process: subprocess.Popen[bytes]) -> float:
    """Of a process and all that it started; a page that several of them share counts as one."""
    total = 0
    try:
        root = psutil.Process(process.pid)
        for one in [root, *root.children(recursive=True)]:
            total += one.memory_full_info().pss
    except psutil.NoSuchProcess:  # it ended meanwhile
        pass
    return total / 1e6
