"""One measurement: a variant's processes on the link, and the numbers that they report."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.slow_link.network import ADDRESSES, Link
from benchmarks.slow_link.records import Row
from benchmarks.slow_link.speed import Moment, Speed, runner_moments, stalled_s, steady
from benchmarks.slow_link.variants import REPLICA_BATCH, Steps, Variant, steps_of
from benchmarks.slow_link.worlds import Process, run, world
from runner.folder.record import RunRecord

_HERE = Path(__file__).parent
_PROBE_PORT = "29399"


@dataclass(frozen=True)
class Material:
    """Files with CoLA's columns, `train` and `dev`; the `model`'s folder; `cache`: of tokenised data."""

    train: Path
    dev: Path
    model: Path
    cache: Path


def probe(link: Link, size: int) -> list[dict[str, float]]:
    """The link's rate and latency as each host measures it while both send `size` bytes. See `probe.py`."""
    with tempfile.TemporaryDirectory() as folder:
        roles = [Process(host, _probe(role, size), {}) for host, role in enumerate(("listen", "connect"))]
        run(link, roles, Path(folder))
        return [json.loads((Path(folder) / f"{host}.log").read_text()) for host in range(len(roles))]


def _probe(role: str, size: int) -> list[str]:
    return [sys.executable, str(_HERE / "probe.py"), role, ADDRESSES[0], _PROBE_PORT, str(size)]


def measure(link: Link, material: Material, variant: Variant, repetition: int, measured_steps: int) -> Row:
    """Run a variant once; the repetition's number is its seed, so that all variants see the same samples."""
    steps = steps_of(variant, measured_steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outputs = [folder / f"run{copy}" for copy in range(variant.copies)]
        processes = [
            process
            for copy, output in enumerate(outputs)
            for process in world(_command(material, variant, steps, repetition, output), variant.workers, copy)
        ]
        run(link, processes, folder)
        read = _read_runner if variant.program == "runner" else _read_peer
        rows = [read(output, variant, steps, (link.rate, repetition)) for output in outputs]
    # Independent worlds train on the sum of their samples.
    return dataclasses.replace(rows[0], samples_per_s=sum(row.samples_per_s for row in rows))


def _command(material: Material, variant: Variant, steps: Steps, seed: int, output: Path) -> list[str]:
    if variant.program == "accelerate":
        arguments = {"train": material.train, "model": material.model, "batch": REPLICA_BATCH, "steps": steps.total}
        named = [f"--{name}={value}" for name, value in {**arguments, "k": variant.k, "seed": seed}.items()]
        options = ["--local-sgd"] * variant.local_sgd + ["--fp16-gradients"] * (variant.compress == "fp16")
        return [sys.executable, str(_HERE / "peer.py"), *named, *options, f"--result={output}"]
    overrides = [
        "recipe=cola",
        f"recipe.data.train={material.train}",
        f"recipe.data.eval={material.dev}",
        f"recipe.model.name={material.model}",
        "batch=per_device",
        f"batch.micro_batch={REPLICA_BATCH}",
        # Sorting would pad both workers' rows to the longest of 32, and the one worker's to the longest of 16.
        "batch.length_sorted=false",
        "scaling=none",
        f"device={'cpu' if variant.workers == 1 else f'cpu{variant.workers}'}",
        f"max_steps={steps.total}",
        f"seed={seed}",
        "tracking=none",
        f"cache_dir={material.cache}",
        f"hydra.run.dir={output}",
    ]
    if variant.workers > 1:
        overrides.append(f"sync.k={variant.k}")
    if variant.overlap:
        overrides.append("sync.overlap=true")
    if variant.streaming:
        overrides.append("sync.fragments=auto")
    if variant.compress != "none":
        overrides.append(f"sync.compress={variant.compress}")
    if variant.delay is not None:
        overrides.append(f"sync.delay={variant.delay}")
    return [sys.executable, "-m", "runner", *overrides]


def _read_runner(folder: Path, variant: Variant, steps: Steps, key: tuple[str, int]) -> Row:
    record = RunRecord.read(folder)
    assert record is not None
    result = record.result
    metrics = folder / "metrics.jsonl"
    speed = steady(runner_moments(metrics, variant), variant, steps)
    times = result.synchronisations
    bytes_each = result.comm_bytes / times if times and result.comm_bytes is not None else None
    if variant.k > 1 or not times:
        stall = stalled_s(metrics, variant, speed)
    else:  # of averages in the backward pass only the sum is known
        assert result.comm_stall_s is not None
        assert result.optimizer_steps is not None
        stall = result.comm_stall_s / result.optimizer_steps
    return _row(variant, speed, key, bytes_each, stall)


def _read_peer(result: Path, variant: Variant, steps: Steps, key: tuple[str, int]) -> Row:
    said: dict[str, Any] = json.loads(result.read_text())
    speed = steady([Moment(step, seconds) for step, seconds in said["moments"]], variant, steps)
    if not variant.local_sgd:
        alone = variant.workers == 1
        share = 0.5 if variant.compress == "fp16" else 1.0
        return _row(variant, speed, key, None if alone else said["bytes_each"] * share, None)
    speed = dataclasses.replace(speed, closing_s=said["closing_s"])
    return _row(variant, speed, key, said["bytes_each"], said["sync_s"] / steps.total)


def _row(variant: Variant, speed: Speed, key: tuple[str, int], bytes_each: float | None, stall: float | None) -> Row:
    rate, repetition = key
    return Row(
        rate=rate,
        repetition=repetition,
        variant=variant.name,
        samples_per_s=variant.step_samples / speed.step_s,
        step_s=speed.step_s,
        measured_steps=speed.steps,
        sync_bytes=round(bytes_each) if bytes_each is not None else None,
        stall_s=stall,
        closing_s=speed.closing_s,
    )
