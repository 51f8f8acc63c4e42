"""The noise of the gradient: how much the gradients of single samples differ, measured while training.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1: if g_b is the mean gradient of b
samples, E|g_b|² = |G|² + tr(Σ) / b. So two gradients of the same weights over b < B samples give unbiased estimates

    tr(Σ) ≈ (|g_b|² − |g_B|²) / (1/b − 1/B)        |G|² ≈ (B|g_B|² − b|g_b|²) / (B − b)

and their ratio, the noise scale, is a batch size in samples: far below it more samples make a step better, far above it
they hardly do. A ratio of averages is reported, for an average of ratios would be biased. Gradients count as they are
before clipping. Where a loss has several terms per sample, b counts a micro-batch with more terms than usual as more
samples: (terms ÷ mean terms of a sample)² ÷ samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.folder.record import NoiseScale
from runner.sync.telemetry import SyncRecord

#: The share of what is logged that comes from the newest measurement.
_NEWEST = 0.1


class GradientNoise:
    """Compares, every few optimizer steps, the gradient of a part of each worker's samples with the global one.

    The part is the worker's first micro-batch, or its whole share if it has only one.
    """

    def __init__(self, every_steps: int | None, backend: Backend, terms_per_sample: float) -> None:
        self._every, self._backend, self._terms_per_sample = every_steps, backend, terms_per_sample
        #: Entries for each step: |g_b|² and b of this worker's part, and |g_B|² and B of the global batch.
        self._pending: list[tuple[Tensor, float, Tensor, int]] = []
        self._in_flight: list[tuple[list[tuple[Tensor, float, Tensor, int]], Callable[[], list[float]]]] = []
        self._sums = [0.0] * 5
        self._count = 0
        self._recent: tuple[float, float] | None = None
        #: True if updates of local phases are compared, and not gradients.
        self._local = False

    def is_due(self, step: int) -> bool:
        """True if gradients are compared in optimizer step `step`, counted from 0."""
        return self._every is not None and step % self._every == 0

    def add(self, own: Tensor, terms: int, samples: int, global_square: Tensor, global_samples: int) -> None:
        """Note one step. `own`: |g|² of the mean gradient over this worker's part, of `samples` with `terms`."""
        size = (terms / self._terms_per_sample) ** 2 / samples if samples and terms else 0.0
        self._pending.append((own, size, global_square, global_samples))

    def reduce(self, wait: bool = True) -> dict[str, float]:
        """Take in the steps since the last call; what to log if there were any. A collective.

        `wait`: if false, they may be taken in by the next call.
        """
        if self._pending:
            pending, self._pending = self._pending, []
            numbers = [
                number
                for own, size, _, _ in pending
                for number in (own * size, torch.tensor(size), torch.tensor(float(size > 0)))
            ]
            self._in_flight.append((pending, self._backend.start_sum(numbers, async_op=not wait)))
        before = self._count
        while len(self._in_flight) > (0 if wait else 1):
            pending, result = self._in_flight.pop(0)
            sums = result()
            for at, (_, _, square, samples) in enumerate(pending):
                weighted, sizes, parts = sums[3 * at : 3 * at + 3]
                if parts:
                    self._take_in(weighted / sizes, sizes / parts, float(square), samples)
        return self._metrics() if self._count > before else {}

    def add_updates(self, record: SyncRecord, samples: int) -> dict[str, float]:
        """Take in the workers' updates over a local phase of `samples` samples; what to log."""
        if self._every is None:
            return {}
        weights, norms = record.updates.weights.cpu().double(), record.updates.norms.cpu().double()
        own, mean = float((weights * norms**2).sum()), float(record.updates.mean_norm) ** 2
        if not self._local:  # after a synchronous part, whose gradients have another unit
            self._local, self._sums, self._count, self._recent = True, [0.0] * 5, 0, None
        self._take_in(own, samples / max(int((weights > 0).sum()), 1), mean, samples)
        return self._metrics()

    def _take_in(self, small: float, size: float, big: float, global_size: float) -> None:
        if not (math.isfinite(small) and math.isfinite(big)) or global_size <= size:
            return  # an fp16 step that is skipped, or one worker with all samples
        trace = (small - big) / (1 / size - 1 / global_size)
        squared = (global_size * big - size * small) / (global_size - size)
        self._count += 1
        for at, value in enumerate((trace, squared, trace**2, squared**2, trace * squared)):
            self._sums[at] += value
        before = self._recent if self._recent is not None else (trace, squared)
        self._recent = tuple(  # type: ignore[assignment] # of two
            old + _NEWEST * (new - old) for old, new in zip(before, (trace, squared), strict=True)
        )

    def _metrics(self) -> dict[str, float]:
        """Recent averages, and their ratio where |G|² is above 0."""
        if self._recent is None:
            return {}
        trace, squared = self._recent
        known = {"noise/scale": trace / squared} if squared > 0 else {}
        return known if self._local else {"noise/trace": trace, "noise/squared_gradient": squared, **known}

    def result(self) -> NoiseScale | None:
        """Over the run; None if nothing was measured. The error is that of a ratio, by the delta method."""
        n = self._count
        if n == 0:
            return None
        trace, squared, traces2, squares2, products = (total / n for total in self._sums)
        shown = (None, None) if self._local else (trace, squared)
        errors = [
            math.sqrt(max(squares - mean**2, 0.0) / max(n - 1, 1))
            for mean, squares in ((trace, traces2), (squared, squares2))
        ]
        if n < 2 or trace <= 2 * errors[0] or squared <= 2 * errors[1]:
            return NoiseScale(None, None, trace=shown[0], squared_gradient=shown[1], measurements=n)
        scale = trace / squared
        residual = traces2 - 2 * scale * products + scale**2 * squares2  # of trace − scale × squared, whose mean is 0
        return NoiseScale(
            scale,
            math.sqrt(max(residual, 0.0) / (n - 1)) / squared,
            trace=shown[0],
            squared_gradient=shown[1],
            measurements=n,
        )

    def state_dict(self) -> dict[str, Any]:
        assert not self._pending, "reduce first: pending steps are not part of the state"
        return {"sums": list(self._sums), "count": self._count, "recent": self._recent, "local": self._local}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._count, self._recent = list(state["sums"]), state["count"], state["recent"]
        self._local = state["local"]


@torch.no_grad()
def squared_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """|g|² of the parameters' gradients, those of embeddings that have used rows only included."""
    gradients = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients)
    return torch.stack([norm.double() for norm in norms]).square().sum()
