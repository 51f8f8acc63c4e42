"""What one worker can do at most: the model's matrix products on real tokens, and the optimizer's step, by themselves.

On a CPU each product of forward and backward pass is measured at its own size, in the variants' precision and with
their number of threads. On a GPU the limit is one large product: the share of that limit is the model FLOPs
utilisation against a measured peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SECONDS, _LEAST = 0.25, 3
_LARGE = 8192


def median_s(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    work()
    found: list[float] = []
    while len(found) < _LEAST or sum(found) < _SECONDS:
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _linear_s(rows: int, inputs: int, outputs: int, number: Callable[..., Tensor]) -> float:
    """Forward pass, gradient of the inputs and gradient of the weights."""
    x, weights, gradient = number(rows, inputs), number(outputs, inputs), number(rows, outputs)
    products: list[Callable[[], object]] = [
        lambda: torch.nn.functional.linear(x, weights),
        lambda: gradient @ weights,
        lambda: gradient.T @ x,
    ]
    return sum(map(median_s, products))


def _attention_s(rows: int, heads: int, length: int, size: int, number: Callable[..., Tensor]) -> float:
    """Scores and weighted values of one layer; the backward pass has two products for each of them."""
    one, other, scores = (number(rows * heads, length, width) for width in (size, size, length))
    return 3 * (median_s(lambda: one @ other.transpose(1, 2)) + median_s(lambda: scores @ other))


def _optimizer_s(weights: list[list[int]], device: str) -> float:
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in weights]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return median_s(torch.optim.AdamW(parameters, lr=1e-5, fused=True).step)


def flops(shapes: dict[str, Any], tokens: float, squares: float) -> float:
    """Floating-point operations that a sample needs, three times those of its forward pass.

    `tokens`, `squares`: means of a sample's tokens and of their square.
    """
    linear = sum(2 * (tokens if per == "token" else 1) * wide * high for per, wide, high in shapes["linears"])
    layers, heads, size, causal = shapes["attention"]
    return 3 * float(linear + layers * 4 * squares * heads * size * (0.5 if causal else 1))


def measured(shapes: dict[str, Any], lengths: list[int], batch: int, precision: str, device: str) -> dict[str, float]:
    """The limit of one worker with `batch` samples per step, which have these lengths."""
    tokens = statistics.fmean(lengths)
    squares = statistics.fmean(length**2 for length in lengths)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32

    def number(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(kind)

    each = flops(shapes, tokens, squares)
    if device == "cuda":
        one = number(_LARGE, _LARGE)
        seconds, optimizer = each * batch * median_s(lambda: one @ one) / (2 * _LARGE**3), 0.0
    else:
        layers, heads, size, causal = shapes["attention"]
        rows = {"token": round(tokens * batch), "sample": batch}
        seconds = sum(
            times * _linear_s(rows[per], inputs, outputs, number)
            for (per, inputs, outputs), times in Counter(map(tuple, shapes["linears"])).items()
        )
        attention = _attention_s(batch, heads, round(squares**0.5), size, number)
        seconds += layers * attention * (0.5 if causal else 1)
        optimizer = _optimizer_s(shapes["weights"], device)
    return {
        "samples_per_s": batch / (seconds + optimizer),
        "gflops": each * batch / seconds / 1e9,
        "optimizer_s": optimizer,
        "gflop_per_sample": each / 1e9,
        "tokens_per_sample": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True, help="as many of the rows are trained on")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    rows = json.loads(chosen.rows.read_text(encoding="utf-8"))[: chosen.samples]
    lengths = [len(row["input_ids"]) for row in rows]
    shapes = json.loads(chosen.shapes.read_text(encoding="utf-8"))
    found = measured(shapes, lengths, chosen.batch, chosen.precision, chosen.device)
    chosen.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
