"""Run variants of a command in turns and compare their summaries."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_once(overrides: Sequence[str], files: Sequence[str] = ()) -> dict[str, Any]:
    """The `summary.json` of `python -m runner` with these overrides, in a new folder; and other JSON `files` of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "runner", *overrides, "hydra.run.dir=run"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        run = Path(folder) / "run"
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
        others = {name: json.loads((run / name).read_text()) for name in files}
        return {**summary, **others, "steady_samples_per_s": steady_speed(run / "metrics.jsonl")}


def steady_speed(metrics: Path) -> float | None:
    """Samples per second over the second half of a run, after imports and initialisation."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seen = [(row["timestamp"], row["value"]) for row in rows if row["key"] == "train/samples_seen"]
    half = [point for point in seen if point[1] >= seen[-1][1] / 2]
    # All steps of one reduction carry its time, so samples are counted from the end of the first one.
    start = max(samples for stamp, samples in half if stamp == half[0][0])
    seconds = (half[-1][0] - half[0][0]) / 1000
    return (half[-1][1] - start) / seconds if seconds else None


def interleaved(variants: Mapping[str, Sequence[str]], repetitions: int) -> dict[str, list[dict[str, Any]]]:
    """Each variant's summaries; interleaved, so that a slow phase of the machine affects all of them."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, overrides in variants.items():
            found[name].append(run_once(overrides))
    return found


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def report(found: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> None:
    """Print `key` of each variant, and its ratio to the first variant, repetition by repetition."""
    base_name, base = next(iter(found.items()))
    print(f"| variant | {key}: median (range) of {len(base)} | ratio to {base_name} |\n| --- | --- | --- |")
    for name, summaries in found.items():
        values = [summary[key] for summary in summaries]
        ratios = [value / reference[key] for value, reference in zip(values, base, strict=True)]
        print(f"| {name} | {spread(values)} | {spread(ratios)} |")
