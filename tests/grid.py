"""Setups that must end alike: world sizes × accumulation, for two model shapes and two optimizers.

`python -m tests.grid [fp64|fp32]` prints the tables of benchmarks/results/equivalence.md;
tests/train/test_grid.py checks bounds.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

from runner.backends import Backend
from tests.pool import WorkerPool
from tests.replicas import make_loop, outcome

#: 500 samples in global batches of 96: five whole ones and a tail of 20, for nine epochs.
BASE = [
    "recipe=acceptability",
    "recipe.data.train_samples=500",
    "recipe.data.eval_samples=100",
    "recipe.model.hidden_size=32",
    "recipe.model.feed_forward_size=32",
    "recipe.model.layers=2",
    "recipe.model.heads=4",
    "recipe.model.dropout=0.1",
    "recipe.model.attention_dropout=0.1",
    "batch.global_batch=96",
    "scaling=none",
    "epochs=9",
    "equivalence=exact",
    "tracking=none",
]
SHAPES = ("bert", "gpt2")
OPTIMIZERS = {"sgd": ["optimizer=sgd", "optimizer.lr=0.05"], "adamw": ["optimizer=adamw", "optimizer.lr=1e-3"]}
SPLITS = [(workers, steps) for workers in (1, 2, 3, 4, 8) for steps in (1, 2, 4)]
#: Of these, what the tests train: each world size, with and without accumulation, even and uneven shares.
TESTED = [(1, 1), (2, 2), (3, 4), (8, 1)]


def overrides(shape: str, optimizer: str, precision: str, accumulation: int) -> list[str]:
    own = [f"recipe.model.shape={shape}", f"precision={precision}", f"accumulation.steps={accumulation}"]
    return [*BASE, *OPTIMIZERS[optimizer], *own]


def train(backend: Backend, settings: list[str]) -> dict[str, Any]:
    """Train to the end; weights, metrics, ledger digest, the loss of each step, and logits of the evaluation part."""
    logged: list[Any] = []
    loop = make_loop(backend, settings, logged)
    loop.train()
    loop.finish()
    loop.model.eval()
    recipe, prepared = loop.replica.recipe, loop.replica.prepared
    batch = recipe.collate(prepared.eval[list(range(len(prepared.eval)))], prepared)
    with torch.no_grad():
        logits = recipe.predict(loop.model, batch)
    digest = hashlib.sha256("".join(record.digest for record in loop.ledger.epochs).encode()).hexdigest()
    losses = [metrics["train/loss"] for _, metrics in logged if "train/loss" in metrics]
    loop.policy.close()
    return {**outcome(loop), "digest": digest, "losses": losses, "logits": logits, "steps": loop.optimizer_step}


def weight_differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """The largest absolute difference in each tensor."""
    assert a["weights"].keys() == b["weights"].keys()
    return {name: float((a["weights"][name] - b["weights"][name]).abs().max()) for name in a["weights"]}


def without_gradient(name: str) -> bool:
    """Attention key biases, which a softmax ignores. In GPT-2 they are the middle of a longer vector."""
    return name.endswith(("key.bias", "c_attn.bias"))


def loss_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a["losses"], b["losses"], strict=True))


def main(precision: str) -> None:
    pool = WorkerPool()
    worst: dict[str, dict[str, float]] = {shape: {} for shape in SHAPES}
    print("| model | optimizer | workers | accumulation | loss (relative) | logits | weights | key biases |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        for optimizer in OPTIMIZERS:
            one = pool.run(1, train, overrides(shape, optimizer, precision, 1))[0]
            for workers, steps in SPLITS[1:]:
                other = pool.run(workers, train, overrides(shape, optimizer, precision, steps))[0]
                weights = weight_differences(one, other)
                if optimizer == "adamw":
                    of = worst[shape]
                    of.update({name: max(value, of.get(name, 0.0)) for name, value in weights.items()})
                biases = max(value for name, value in weights.items() if without_gradient(name))
                rest = max(value for name, value in weights.items() if not without_gradient(name))
                logits = float((one["logits"] - other["logits"]).abs().max())
                assert one["digest"] == other["digest"]
                cells = f"{loss_difference(one, other):.1e} | {logits:.1e} | {rest:.1e} | {biases:.1e}"
                print(f"| {shape} | {optimizer} | {workers} | {steps} | {cells} |", flush=True)
    pool.close()
    print("\n| tensor, under AdamW | largest difference over all splits |\n| --- | --- |")
    for shape, tensors in worst.items():
        for name, value in sorted(tensors.items(), key=lambda one: -one[1]):
            print(f"| {shape}: {name} | {value:.1e} |")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fp64")
