"""Compare the snapshots of two setups step by step, and describe the first mismatch beyond rounding."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.config.choices import PrecisionName
from runner.tools.verify.snapshot import Snapshot, Tensors


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that rounding may cause in one precision: of the loss, and of a tensor's L2 norm.

    `noise`: a gradient below this share of the model's largest gradient is rounding only. Attention key biases have
    such gradients: they shift all scores of a row alike, which a softmax ignores. AdamW divides a gradient by its size,
    so it moves such weights as fast as any other, at random.
    """

    loss: float
    gradient: float
    weight: float
    noise: float


#: Measured, with a margin (see benchmarks/results/equivalence.md). Mistakes are larger by far.
TOLERANCES = {
    PrecisionName.fp64: Tolerance(loss=1e-12, gradient=1e-10, weight=1e-12, noise=1e-14),
    PrecisionName.fp32: Tolerance(loss=1e-5, gradient=1e-3, weight=1e-5, noise=1e-6),
    PrecisionName.tf32: Tolerance(loss=1e-3, gradient=2e-1, weight=2e-2, noise=1e-4),
    PrecisionName.fp16: Tolerance(loss=1e-2, gradient=2e-1, weight=2e-2, noise=1e-4),
    PrecisionName.bf16: Tolerance(loss=5e-2, gradient=4e-1, weight=1e-1, noise=1e-4),
}

#: Of setups that must have the same bits.
_NONE = Tolerance(loss=0.0, gradient=0.0, weight=0.0, noise=0.0)

_LR_TOLERANCE = 1e-9

_KINDS = ("loss", "gradient", "weight")


@dataclass(frozen=True)
class Difference:
    """A difference of `what` (loss, gradient, weight): `share` is relative, `largest` the largest absolute one."""

    what: str
    step: int
    tensor: str
    share: float
    largest: float
    tolerance: float

    @property
    def beyond(self) -> bool:
        return not self.share <= self.tolerance  # NaN is beyond


@dataclass(frozen=True)
class Mismatch:
    """The first difference of two setups: the step, what differs, and a sentence."""

    step: int
    what: str
    sentence: str


@dataclass
class SnapshotComparison:
    """The largest differences so far, and in how many steps each kind was compared.

    `set_aside`: differences of weights whose gradient is rounding only, by name. They are reported, not judged.
    """

    tolerance: Tolerance
    steps: int = 0
    compared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))
    largest: dict[str, Difference] = field(default_factory=dict)
    set_aside: dict[str, float] = field(default_factory=dict)
    _sizes: dict[str, float] = field(default_factory=dict)  # the largest norm so far, by tensor
    _peaks: Tensors = field(default_factory=dict)  # the largest gradient so far, by element
    _peak: float = 0.0  # the largest gradient so far of all elements

    @staticmethod
    def of(*precisions: PrecisionName, bits: bool = False) -> SnapshotComparison:
        """Compare with the tolerance of the coarsest precision; with `bits` without any."""
        coarsest = max((TOLERANCES[name] for name in precisions), key=lambda one: one.loss)
        return SnapshotComparison(_NONE if bits else coarsest)

    @property
    def of_bits(self) -> bool:
        """Return whether nothing may differ, not even the sign of a zero."""
        return self.tolerance is _NONE

    def add(self, a: Snapshot, b: Snapshot) -> Mismatch | None:
        """Compare the next step of both setups."""
        assert a.step == b.step, (a.step, b.step)
        self.steps = a.step
        return (
            _samples(a, b)
            or self._lr_and_loss(a, b)
            or self._gradients(a, b)
            or _replicas(a, b)
            or self._tensors("weight", a.step, a.weights, b.weights)
        )

    def as_json(self) -> dict[str, Any]:
        tolerance = {kind: getattr(self.tolerance, kind) for kind in _KINDS}
        return {
            "steps": self.steps,
            "compared": self.compared,
            "tolerance": tolerance,
            "of_bits": self.of_bits,
            "largest": [_finite(dataclasses.asdict(self.largest[what])) for what in _KINDS if what in self.largest],
            "without_gradient": _finite(self.set_aside),
        }

    def _lr_and_loss(self, a: Snapshot, b: Snapshot) -> Mismatch | None:
        if a.lr is None or b.lr is None or a.loss is None or b.loss is None:
            return None  # the start or the end, which have weights only
        if not math.isclose(a.lr, b.lr, rel_tol=_LR_TOLERANCE):
            ratio = f", {b.lr / a.lr:.4g} times as much" if a.lr and b.lr else ""
            return Mismatch(a.step, "learning rate", f"a has the learning rate {a.lr:.6g} and b {b.lr:.6g}{ratio}")
        if a.skipped != b.skipped:
            return Mismatch(a.step, "step", f"the loss scaler skipped the step in {'a' if a.skipped else 'b'} only")
        losses = (torch.tensor(loss, dtype=torch.float64) for loss in (a.loss, b.loss))
        difference = self._difference("loss", a.step, "", *losses)
        self._keep("loss", [difference])
        if not difference.beyond:
            return None
        rule = f"relative difference {difference.share:.2g}, tolerance {self.tolerance.loss:.0e}"
        sentence = f"a has the loss {a.loss!r} and b {b.loss!r}: {'other bits' if self.of_bits else rule}"
        return Mismatch(a.step, "loss", sentence)

    def _gradients(self, a: Snapshot, b: Snapshot) -> Mismatch | None:
        if a.skipped:
            return None  # in both, and gradients that are not finite entered no update
        for side in (a.gradients, b.gradients):
            for name, gradient in side.items():
                size = gradient.abs()
                self._peaks[name] = torch.maximum(size, self._peaks[name]) if name in self._peaks else size
                self._peak = max(self._peak, _largest(size))
        if a.gradients_of != b.gradients_of:
            return None
        return self._tensors("gradient", a.step, a.gradients, b.gradients)

    def _tensors(self, what: str, step: int, of_a: Tensors, of_b: Tensors) -> Mismatch | None:
        if not of_a or not of_b:
            return None  # one of them is not synchronised in this step
        shapes_a, shapes_b = ({name: list(t.shape) for name, t in side.items()} for side in (of_a, of_b))
        for name in {**of_a, **of_b}:
            if shapes_a.get(name) != shapes_b.get(name):
                sentence = (
                    f"the models differ: the shape of {name} is {shapes_a.get(name)} in a, {shapes_b.get(name)} in b"
                )
                return Mismatch(step, what, sentence)
        differences = [self._difference(what, step, name, of_a[name], of_b[name]) for name in of_a]
        self._keep(what, differences)
        beyond = [difference for difference in differences if difference.beyond]
        if not beyond:
            return None
        first, worst = beyond[0], max(beyond, key=lambda d: d.share)
        how, others = f"differ by {first.share:.2g} of their norm, tolerance {first.tolerance:.0e}", ""
        if len(beyond) > 1:
            others = f"; {len(beyond)} of {len(differences)} tensors differ, {worst.tensor} most ({worst.share:.2g})"
        if self.of_bits:
            how = "have other bits"
        largest = f"(largest absolute difference {first.largest:.2g})"
        return Mismatch(step, what, f"the {what}s of {first.tensor} {how} {largest}{others}")

    def _difference(self, what: str, step: int, name: str, a: Tensor, b: Tensor) -> Difference:
        size = self._size(f"{what} {name}", max(_norm(a), _norm(b)))
        delta = a.double() - b.double()
        whole = Difference(what, step, name, _norm(delta) / size, _largest(delta), getattr(self.tolerance, what))
        if self.of_bits and not _same_bits(a, b):
            return dataclasses.replace(whole, share=whole.share or math.ulp(0.0))  # zeros of other signs
        rounding = self._is_rounding(name) if whole.beyond else None
        if rounding is None or not rounding.any():
            return whole
        if what == "weight":
            self.set_aside[name] = max(_largest(delta[rounding]), self.set_aside.get(name, 0.0))
        rest = delta[~rounding]
        return dataclasses.replace(whole, share=_norm(rest) / size, largest=_largest(rest))

    def _is_rounding(self, name: str) -> Tensor | None:
        """The elements of a tensor that have had a gradient, but none above rounding."""
        if name not in self._peaks:
            return None
        peak = self._peaks[name]
        return (peak > 0) & (peak <= self.tolerance.noise * self._peak)

    def _size(self, what: str, now: float) -> float:
        """The largest size so far: a sum that has become small keeps the rounding of its terms."""
        self._sizes[what] = max(now, self._sizes.get(what, 0.0))
        return self._sizes[what] or 1.0

    def _keep(self, what: str, differences: list[Difference]) -> None:
        self.compared[what] += 1
        for difference in differences:
            kept = self.largest.get(what)
            if kept is None or not difference.share <= kept.share:
                self.largest[what] = difference


def _samples(a: Snapshot, b: Snapshot) -> Mismatch | None:
    if a.samples == b.samples:
        return None
    of_a, of_b = Counter(a.samples), Counter(b.samples)
    counts = f"a trains on {len(a.samples)} samples and b on {len(b.samples)}"
    only = f"{(of_a - of_b).total()} of them are only in a, {(of_b - of_a).total()} only in b"
    return Mismatch(a.step, "samples", f"{counts}: {only}")


def _replicas(a: Snapshot, b: Snapshot) -> Mismatch | None:
    for name, side in (("a", a), ("b", b)):
        if side.replicas is not None:
            return Mismatch(side.step, "replicas", f"the workers of {name} are not equal: {side.replicas}")
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """`nan` and `inf` as text, since JSON has no such numbers."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
