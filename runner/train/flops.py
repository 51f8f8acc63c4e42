"""Floating-point operations for training a sample, and those that the device can do per second."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from runner.backends import Backend
from runner.backends.machine import BUSY, CoreWaits
from runner.cost.hardware import published_peak
from runner.data.recipe import Batch
from runner.errors import first_line
from runner.train.loop import Loop
from runner.train.precision import Precision
from runner.train.replica import Replica
from runner.train.tokens import token_width

#: Rows whose operations are counted. Three would determine a transformer, whose operations are a quadratic function of
#: the length; with more, a row whose targets are unusually long counts less.
_ROWS = 5
#: The first samples of a run, whose lengths stand for those of all.
_SEEN = 100_000

#: Seconds of multiplying matrices to measure a peak. The matrices grow until a product takes `_PRODUCT_S`.
_MEASURE_S, _PRODUCT_S = 0.15, 0.005
_SMALLEST, _LARGEST = 512, 4096

#: A kernel that torch's counter does not know.
_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))


@torch.no_grad()
def flops_per_sample(replica: Replica, rows: np.ndarray) -> float:
    """Operations to train a sample: forward and backward pass, the mean over these rows of the training table.

    Counts the operations of matrix products, convolutions and attention in forward passes of single rows without
    padding, as a function of a row's length. The backward pass takes twice as many: a product for the gradient of each
    of the two factors; once as many where the weights are frozen. What is computed again for gradient checkpointing is
    not counted. For transformers these are the 6 per token and weight of Kaplan et al. 2020, "Scaling laws for neural
    language models", with the 12 × layers × hidden size × length per token of attention in Chowdhery et al. 2022,
    "PaLM", appendix B; embeddings are looked up and count nothing.

    A collective if the forward pass is one. Changes the model to evaluation mode.
    """
    recipe, prepared, model = replica.recipe, replica.prepared, replica.model
    lengths = np.asarray(prepared.train.column("length"))
    by_length = np.argsort(lengths)
    chosen = by_length[np.linspace(0, len(by_length) - 1, _ROWS).round().astype(int)]
    known = lengths[chosen]
    frozen = {name for name, module in model.named_modules() if _is_frozen(module)}
    model.eval()
    counted = []
    for row, length in zip(chosen.tolist(), known.tolist(), strict=True):
        batch = _without_padding(recipe.collate(prepared.train[[row]], prepared, length), length)
        ((_, batch),) = replica.backend.feed([(np.array([row]), batch)])
        counter = FlopCounterMode(display=False, custom_mapping={_ATTENTION_ON_CPU: _attention_flops})
        # A compiled model hides its operations.
        with torch.compiler.set_stance("force_eager"), replica.precision.autocast(), counter:
            recipe.loss(model, batch)
        counted.append(_with_backward(counter, type(model).__name__, frozen))
    degree = min(2, len(set(known.tolist())) - 1)
    scale = max(float(known.max()), 1.0)  # keeps the powers of long lengths apart
    fit = np.polynomial.Polynomial.fit(known / scale, counted, degree, domain=[0, 1], window=[0, 1])
    return float(fit(lengths[rows] / scale).mean())


def measure_utilisation(loop: Loop, threads: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Measure the use of the devices: entries of `RunResult`, and warnings. A collective.

    `threads`: of all workers of a machine together.
    """
    backend = loop.backend
    memory = backend.all_gather_object(backend.peak_memory_bytes())  # before it is used to find out the rest
    known: dict[str, Any] = {"peak_memory_bytes": None if None in memory else tuple(memory)}
    # Without throughput there is nothing to compare; on torch_xla counting would compile programs for new shapes.
    if backend.compiles or not loop.meter.timed_seconds:
        return known, ()
    warnings: tuple[str, ...] = ()
    if backend.rank == 0 or loop.policy.collective_forward:
        seen = loop.order.ids(0, 0, min(loop.plan.samples_before(loop.optimizer_step), _SEEN))
        try:
            known["flops_per_sample"] = flops_per_sample(loop.replica, seen)
        except Exception as error:  # noqa: BLE001 - a figure must not cost the trained model, which is not saved yet
            warnings = (f"operations cannot be counted ({first_line(error)}): the utilization is not known",)
    peaks = backend.all_gather_object(peak_flops_per_s(backend, loop.replica.precision, threads))
    known["peak_flops_per_s"] = None if None in peaks else sum(peaks)
    return known, warnings


def _is_frozen(module: nn.Module) -> bool:
    weights = [] if any(True for _ in module.children()) else list(module.parameters())
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def _without_padding(batch: Batch, length: int) -> Batch:
    """A batch of one row of which the recipe pads every row to one length."""
    width = token_width(batch)
    if width is None or width <= length:
        return batch

    def per_token(tensor: Tensor) -> bool:
        return tensor.dim() == 2 and tensor.shape[1] == width and not tensor.is_floating_point()

    return {name: tensor[:, :length] if per_token(tensor) else tensor for name, tensor in batch.items()}


def _with_backward(counter: FlopCounterMode, model: str, frozen: set[str]) -> int:
    """The operations of forward and backward pass, from those that were counted in a forward pass."""
    by_module = {name.removeprefix(f"{model}."): sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return 3 * counter.get_total_flops() - sum(by_module.get(name, 0) for name in frozen)


def peak_flops_per_s(backend: Backend, precision: Precision, threads: int) -> float | None:
    """Operations per second that this worker's device can do in this precision: published or, if unknown, measured.

    None if other programs had the cores meanwhile. The workers of one machine share its processor: the first of them
    measures it with all their `threads`, and the others add 0.
    """
    if backend.device.type == "cuda":
        published = published_peak(torch.cuda.get_device_name(backend.device), precision.name)
        return published or _measured_peak(backend, precision)
    if backend.local_rank != 0:
        return 0.0
    own, waits = torch.get_num_threads(), CoreWaits()
    torch.set_num_threads(threads)
    peak = _measured_peak(backend, precision)
    torch.set_num_threads(own)
    return peak if (waits.share() or 0.0) < BUSY else None


def _measured_peak(backend: Backend, precision: Precision) -> float:
    """The rate of the fastest product: other processes can only slow it down."""
    size, ends = _SMALLEST // 2, time.perf_counter() + _MEASURE_S
    fastest = 0.0
    while fastest < _PRODUCT_S and size < _LARGEST:
        size *= 2
        a, b = (torch.ones(size, size, dtype=precision.product_dtype, device=backend.device) for _ in range(2))
        out = torch.empty_like(a)
        fastest = min(_seconds_of_product(backend, a, b, out) for _ in range(2))  # the first prepares the library
    while time.perf_counter() < ends:
        fastest = min(fastest, _seconds_of_product(backend, a, b, out))
    return 2.0 * size**3 / fastest


def _seconds_of_product(backend: Backend, a: Tensor, b: Tensor, out: Tensor) -> float:
    start = time.perf_counter()
    torch.mm(a, b, out=out)
    backend.synchronize()
    return time.perf_counter() - start
