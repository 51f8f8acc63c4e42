"""Differences between training on XLA's CPU device and on plain CPU workers.

`python -m tests.xla.agreement` prints the table of docs/tpu.md.
"""

from __future__ import annotations

import tempfile

import numpy as np

from tests.pool import WorkerPool
from tests.xla.work import EXACT, SGD, TAIL, max_difference, trained

ADAMW = ["optimizer=adamw"]

#: Title, XLA replicas, settings of both, settings of the replicas, CPU workers to compare with.
CASES = [
    ("fp32, SGD", 1, [*SGD, "precision=fp32"], [], 1),
    ("fp32, SGD", 2, [*SGD, "precision=fp32"], [], 1),
    ("fp32, SGD, 2 micro-batches", 2, [*SGD, "precision=fp32"], ["accumulation.steps=2"], 1),
    ("fp32, SGD, GPT-2 shape", 1, [*SGD, "precision=fp32", "recipe.model.shape=gpt2"], [], 1),
    ("fp32, SGD, k = 4", 2, [*SGD, "precision=fp32", "sync.k=4"], [], 2),
    ("fp32, AdamW", 2, [*ADAMW, "precision=fp32"], [], 1),
    ("fp64, SGD", 2, [*SGD, "precision=fp64"], [], 1),
    ("fp64, AdamW", 2, [*ADAMW, "precision=fp64"], [], 1),
    ("bf16, SGD", 1, [*SGD, "precision=bf16"], [], 1),
]

if __name__ == "__main__":
    cpu, xla = WorkerPool(), WorkerPool("xla", timeout_s=300)
    print("| training | XLA replicas | CPU workers | losses | logits | weights | ledger |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as cache:
        for title, replicas, common, further, workers in CASES:
            settings = [*common, *EXACT, *TAIL, f"cache_dir={cache}"]
            theirs = cpu.run(workers, trained, settings)[0]
            ours = xla.run(replicas, trained, [*settings, *further])[0]
            losses = float(np.abs(ours["losses"] / theirs["losses"] - 1).max())
            weights = max(max_difference(weight, theirs["weights"][name]) for name, weight in ours["weights"].items())
            row = [f"{share:.1e}" for share in (losses, max_difference(ours["logits"], theirs["logits"]), weights)]
            same = "same" if ours["ledger"] == theirs["ledger"] else "OTHER"
            print("|", " | ".join([title, str(replicas), str(workers), *row, same]), "|", flush=True)
    cpu.close()
    xla.close()
