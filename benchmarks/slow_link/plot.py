"""The speed against one worker, over k."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot

from benchmarks.slow_link.records import Row
from benchmarks.slow_link.table import ratios
from benchmarks.slow_link.variants import KS

#: Label, the name of a variant with k for its number, the name at k = 1, and the look.
_LINES = (
    ("runner, overlap and bf16", "runner_k{k}_overlap_bf16", "runner_k1_bf16", "C0o-"),
    ("runner, streaming in bf16", "runner_k{k}_streaming_bf16", "runner_k1_bf16", "C3o-"),
    ("runner, streaming in int8", "runner_k{k}_streaming_int8", None, "C6d-"),
    ("runner, blocking fp32", "runner_k{k}", "runner_k1", "C1s-"),
    ("Accelerate: LocalSGD, DDP at k = 1", "accelerate_local_sgd_k{k}", "accelerate_ddp", "C2^--"),
)


def draw(rows: Sequence[Row], rate: str, path: Path) -> None:
    """Medians with their range, one line per sync policy. Points that were not measured are omitted."""
    figure, axes = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
    for label, pattern, first, look in _LINES:
        names = [(k, first if k == 1 else pattern.format(k=k)) for k in KS]
        found = [(k, ratios(rows, name)) for k, name in names if name is not None]
        points = [(k, values) for k, values in found if values]
        if not points:
            continue
        middle = [statistics.median(values) for _, values in points]
        below = [m - min(values) for m, (_, values) in zip(middle, points, strict=True)]
        above = [max(values) - m for m, (_, values) in zip(middle, points, strict=True)]
        axes.errorbar([k for k, _ in points], middle, yerr=[below, above], fmt=look, capsize=3, label=label)
    for level, words in ((1, "one worker"), (2, "twice one worker")):
        axes.axhline(level, color="0.5", linewidth=0.8, linestyle=":")
        axes.annotate(words, (KS[-1], level), xytext=(0, 3), textcoords="offset points", ha="right", color="0.4")
    axes.set_xscale("log", base=2, subs=[])
    axes.set_xticks(KS, [str(k) for k in KS])
    axes.set_xlim(KS[0] / 1.2, KS[-1] * 1.2)
    axes.set_xlabel("k, optimizer steps between two synchronisations")
    axes.set_ylabel("samples/s against one worker")
    axes.set_ylim(0, 2.15)
    axes.set_title(f"Two workers at {rate}: MiniLM on CoLA, 16 samples a worker and step", fontsize=10)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
