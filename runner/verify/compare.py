"""Compare two setups' snapshots, step after step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.config.choices import PrecisionName
from runner.verify.snapshot import Snapshot, Tensors


@dataclass(frozen=True)
class Tolerance:
    """What rounding may do in one precision, as shares: of the loss, and of a tensor's L2 norm."""

    loss: float
    gradient: float
    weight: float


#: From measurement, with room to spare (docs/equivalence.md has the figures). Mistakes are larger by far.
TOLERANCES = {
    PrecisionName.fp64: Tolerance(loss=1e-12, gradient=1e-10, weight=1e-12),
    PrecisionName.fp32: Tolerance(loss=1e-5, gradient=1e-3, weight=1e-5),
    PrecisionName.tf32: Tolerance(loss=1e-3, gradient=2e-1, weight=2e-2),
    PrecisionName.fp16: Tolerance(loss=1e-2, gradient=2e-1, weight=2e-2),
    PrecisionName.bf16: Tolerance(loss=5e-2, gradient=4e-1, weight=1e-1),
}

#: A gradient below this share of the model's largest one is nothing but rounding: attention key biases shift all scores
#: of a row alike, which a softmax does not notice. Under AdamW such weights move as fast as any other, at random.
NOISE = {
    PrecisionName.fp64: 1e-14,
    PrecisionName.fp32: 1e-6,
    PrecisionName.tf32: 1e-4,
    PrecisionName.fp16: 1e-4,
    PrecisionName.bf16: 1e-4,
}

_LR_TOLERANCE = 1e-9

_KINDS = ("loss", "gradient", "weight")


@dataclass(frozen=True)
class Difference:
    """A difference of `what` (loss, gradient, weight) as a share; `largest`: the largest absolute one in `tensor`."""

    what: str
    step: int
    tensor: str
    share: float
    largest: float
    tolerance: float

    @property
    def beyond(self) -> bool:
        return not self.share <= self.tolerance  # so that what is not a number is beyond


@dataclass(frozen=True)
class Finding:
    """Where two setups part: the first step, what it was found in, and a sentence that says it."""

    step: int
    what: str
    sentence: str


@dataclass
class Comparison:
    """The largest differences so far, and in how many steps each kind was compared.

    `set_aside`: by how much weights differ whose gradient is nothing but rounding, by name.
    """

    tolerance: Tolerance
    noise: float
    steps: int = 0
    compared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))
    largest: dict[str, Difference] = field(default_factory=dict)
    set_aside: dict[str, float] = field(default_factory=dict)
    _sizes: dict[str, float] = field(default_factory=dict)  # the largest size so far of what differences are shares of
    _peaks: Tensors = field(default_factory=dict)  # the largest gradient that each element has had
    _peak: float = 0.0  # the largest of them all

    @staticmethod
    def of(*precisions: PrecisionName) -> Comparison:
        """For runs of these precisions: with the tolerance of the coarsest."""
        coarsest = max(precisions, key=lambda name: TOLERANCES[name].loss)
        return Comparison(TOLERANCES[coarsest], NOISE[coarsest])

    def add(self, a: Snapshot, b: Snapshot) -> Finding | None:
        """Compare the next step of both; what was found, if they part there."""
        assert a.step == b.step, (a.step, b.step)
        self.steps = a.step
        return (
            _samples(a, b)
            or self._numbers(a, b)
            or self._gradients(a, b)
            or _replicas(a, b)
            or self._tensors("weight", a.step, a.weights, b.weights)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "compared": self.compared,
            "tolerance": dataclasses.asdict(self.tolerance),
            "largest": [_finite(dataclasses.asdict(self.largest[what])) for what in _KINDS if what in self.largest],
            "without_gradient": _finite(self.set_aside),
        }

    def _numbers(self, a: Snapshot, b: Snapshot) -> Finding | None:
        if a.lr is None or b.lr is None or a.loss is None or b.loss is None:
            return None  # the start or the end, which have weights only
        if not math.isclose(a.lr, b.lr, rel_tol=_LR_TOLERANCE):
            ratio = f", {b.lr / a.lr:.4g} times as much" if a.lr and b.lr else ""
            return Finding(a.step, "learning rate", f"a has the learning rate {a.lr:.6g} and b {b.lr:.6g}{ratio}")
        if a.skipped != b.skipped:
            return Finding(a.step, "step", f"the loss scaler skipped the step in {'a' if a.skipped else 'b'} only")
        absolute = abs(a.loss - b.loss)
        share = absolute / self._size("loss", max(abs(a.loss), abs(b.loss)))
        difference = Difference("loss", a.step, "", share, absolute, self.tolerance.loss)
        self._keep("loss", [difference])
        if not difference.beyond:
            return None
        apart = f"{share:.2g} of it, tolerance {self.tolerance.loss:.0e}"
        return Finding(a.step, "loss", f"a has the loss {a.loss:.9g} and b {b.loss:.9g}: {apart}")

    def _gradients(self, a: Snapshot, b: Snapshot) -> Finding | None:
        if a.skipped:
            return None  # both are: their gradients were not finite, and entered nothing
        for side in (a.gradients, b.gradients):
            for name, gradient in side.items():
                size = gradient.abs()
                self._peaks[name] = torch.maximum(size, self._peaks[name]) if name in self._peaks else size
                self._peak = max(self._peak, _largest(size))
        if a.gradients_of != b.gradients_of:
            return None
        return self._tensors("gradient", a.step, a.gradients, b.gradients)

    def _tensors(self, what: str, step: int, of_a: Tensors, of_b: Tensors) -> Finding | None:
        if not of_a or not of_b:
            return None  # one of them is not synchronised in this step
        unlike = _unlike(what, of_a, of_b)
        if unlike is not None:
            return Finding(step, what, unlike)
        differences = [self._difference(what, step, name, of_a[name], of_b[name]) for name in of_a]
        self._keep(what, differences)
        beyond = [difference for difference in differences if difference.beyond]
        if not beyond:
            return None
        first, worst = beyond[0], max(beyond, key=lambda d: d.share)
        others = f"; {len(beyond)} of {len(differences)} tensors are beyond it, {worst.tensor} most ({worst.share:.2g})"
        return Finding(
            step,
            what,
            f"the {what}s of {first.tensor} differ by {first.share:.2g} of their norm, tolerance {first.tolerance:.0e} "
            f"(largest absolute difference {first.largest:.2g}){others if len(beyond) > 1 else ''}",
        )

    def _difference(self, what: str, step: int, name: str, a: Tensor, b: Tensor) -> Difference:
        size = self._size(f"{what} {name}", max(_norm(a), _norm(b)))
        apart = a.double() - b.double()
        whole = Difference(what, step, name, _norm(apart) / size, _largest(apart), getattr(self.tolerance, what))
        rounding = self._is_rounding(name) if whole.beyond else None
        if rounding is None or not rounding.any():
            return whole
        if what == "weight":
            self.set_aside[name] = max(_largest(apart[rounding]), self.set_aside.get(name, 0.0))
        rest = apart[~rounding]
        return dataclasses.replace(whole, share=_norm(rest) / size, largest=_largest(rest))

    def _is_rounding(self, name: str) -> Tensor | None:
        """Which elements of a tensor have had a gradient, and never one beyond rounding."""
        if name not in self._peaks:
            return None
        peak = self._peaks[name]
        return (peak > 0) & (peak <= self.noise * self._peak)

    def _size(self, what: str, now: float) -> float:
        """The largest size so far: what has shrunk to almost nothing keeps the rounding of what it is a sum of."""
        self._sizes[what] = max(now, self._sizes.get(what, 0.0))
        return self._sizes[what] or 1.0

    def _keep(self, what: str, differences: list[Difference]) -> None:
        self.compared[what] += 1
        for difference in differences:
            kept = self.largest.get(what)
            if kept is None or not difference.share <= kept.share:
                self.largest[what] = difference


def _samples(a: Snapshot, b: Snapshot) -> Finding | None:
    if np.array_equal(a.samples, b.samples):
        return None
    only_a, only_b = len(_without(a.samples, b.samples)), len(_without(b.samples, a.samples))
    said = f"a trains on {len(a.samples)} samples and b on {len(b.samples)}"
    return Finding(a.step, "samples", f"{said}: {only_a} of them are only in a, {only_b} only in b")


def _without(ids: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The ids that `others` has not, as often as it has them fewer times."""
    values, counts = np.unique(ids, return_counts=True)
    theirs = dict(zip(*(part.tolist() for part in np.unique(others, return_counts=True)), strict=True))
    left = [max(0, count - theirs.get(value, 0)) for value, count in zip(values.tolist(), counts.tolist(), strict=True)]
    return np.repeat(values, left)


def _replicas(a: Snapshot, b: Snapshot) -> Finding | None:
    for name, side in (("a", a), ("b", b)):
        if side.replicas is not None:
            return Finding(side.step, "replicas", f"the workers of {name} are not equal: {side.replicas}")
    return None


def _unlike(what: str, of_a: Tensors, of_b: Tensors) -> str | None:
    """How the two models are not even of one form, if so."""
    if of_a.keys() != of_b.keys():
        other = sorted(of_a.keys() ^ of_b.keys())
        return f"the models differ: only one of them has a {what} named {other[0]}"
    for name in of_a:
        if of_a[name].shape != of_b[name].shape:
            shapes = f"{list(of_a[name].shape)} in a and {list(of_b[name].shape)} in b"
            return f"the models differ: {name} has the shape {shapes}"
    return None


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is not a number: `nan` and `inf` as text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
