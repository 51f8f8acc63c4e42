"""Functions that workers run in the XLA tests: the shipped loop, and the results to compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from runner.backends import Backend
from runner.train.ledger import as_json
from runner.train.loop import Loop
from tests.replicas import make_loop, weights_of
from tests.resumed import train_in_parts

#: 97 samples in global batches of 24: with two workers, one has no samples in the last step of an epoch.
TAIL = ["recipe.data.train_samples=97"]
EXACT = ["equivalence=exact", "recipe.model.dropout=0.1", "recipe.model.attention_dropout=0.1"]
STANDARD = ["recipe.model.dropout=0.1", "recipe.model.attention_dropout=0.1"]
SGD = ["optimizer=sgd", "optimizer.lr=0.05"]


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest number, or to 1e-3 for tensors that are rounding noise around 0.

    Such are the biases of attention keys: they change no output, so their gradient is rounding only.
    """
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))


def trained(backend: Backend, overrides: list[str]) -> dict[str, Any]:
    """Train to the end: losses and learning rates by step, logits and weights on the CPU, ledger, compilations."""
    logged: list[Any] = []
    loop = make_loop(backend, overrides, logged)
    loop.train()
    loop.finish()
    losses = {step: metrics["train/loss"] for step, metrics in logged if "train/loss" in metrics}
    result = {
        "losses": np.array([losses[step] for step in sorted(losses)]),
        "weights": {name: tensor.cpu() for name, tensor in weights_of(loop).items()},
        "logits": logits(loop),
        "metrics": loop.evaluator.metrics,
        "ledger": as_json(loop.ledger),
        "stats": loop.policy.stats(),
    }
    loop.policy.close()
    return result


def trained_in_two_parts(backend: Backend, overrides: list[str], stop: int) -> dict[str, torch.Tensor]:
    """Stop, rebuild everything, load the state and continue; the weights on the CPU."""
    result = train_in_parts(backend, overrides, [stop])
    assert isinstance(result, dict), result
    weights = result["weights"]
    return {name: tensor.cpu() for name, tensor in weights.items()}


def logits(loop: Loop) -> torch.Tensor:
    """Of the evaluation part, in sample order, as the shipped evaluation passes them to the recipe's metrics."""
    seen: list[torch.Tensor] = []
    recipe = loop.replica.recipe
    object.__setattr__(recipe, "metrics", lambda predictions, table: seen.append(predictions) or {})
    try:
        loop.replica.predictor.evaluate(loop.replica.prepared)
    finally:
        object.__delattr__(recipe, "metrics")
    return seen[0] if seen else torch.zeros(0)


def compiled_by_step(backend: Backend, overrides: list[str], steps: int) -> tuple[list[int], list[int], str | None]:
    """Compilations and tensors read back in each optimizer step, without evaluation; and the warning."""
    from torch_xla.debug import metrics

    def read_back() -> int:
        data = metrics.metric_data("TransferFromDeviceTime")
        return 0 if data is None else int(data[0])

    loop = make_loop(backend, overrides)
    loop._after_step = lambda: None  # type: ignore[method-assign]  # it logs, which reads
    compilations, reads = [], []
    for step in range(1, steps + 1):
        before, read_before = loop.compilations.total(), read_back()
        loop.train(until=step)
        after = loop.compilations.total()
        assert before is not None
        assert after is not None
        compilations.append(after.count - before.count)
        reads.append(read_back() - read_before)
    loop.policy.close()
    return compilations, reads, loop.compilations.warning()


def with_ragged_batches(backend: Backend, overrides: list[str]) -> tuple[int, str | None]:
    """Train with a recipe that pads batches to 16 different lengths; its compilations, and the warning."""
    loop = make_loop(backend, overrides)
    collate = loop.replica.recipe.collate
    calls = 0

    def ragged(rows: Any, prepared: Any, length: int | None = None) -> Any:
        nonlocal calls
        calls += 1
        return collate(rows, prepared, 14 + calls % 16)

    object.__setattr__(loop.replica.recipe, "collate", ragged)
    loop.train()
    total = loop.compilations.total()
    loop.policy.close()
    assert total is not None
    return total.count, loop.compilations.warning()
