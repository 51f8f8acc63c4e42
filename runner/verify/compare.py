"""Compare two setups' snapshots, step after step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.choices import PrecisionName
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
    PrecisionName.bf16: Tolerance(loss=5e-2, gradient=5e-1, weight=1e-1),
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


@dataclass(frozen=True)
class Finding:
    """Where two setups part: the first step, what it was found in, and a sentence that says it."""

    step: int
    what: str
    sentence: str


@dataclass
class Comparison:
    """The largest differences so far; those of weights whose gradient is nothing but rounding are kept `apart`."""

    tolerance: Tolerance
    noise: float
    steps: int = 0
    largest: dict[str, Difference] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    _peaks: Tensors = field(default_factory=dict)  # the largest gradient that each element has had

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
            self._samples(a, b)
            or self._numbers(a, b)
            or self._tensors("gradient", a, b)
            or self._replicas(a, b)
            or self._tensors("weight", a, b)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "tolerance": dataclasses.asdict(self.tolerance),
            "largest": [dataclasses.asdict(self.largest[what]) for what in _KINDS if what in self.largest],
            "without_gradient": self.apart,
        }

    def _samples(self, a: Snapshot, b: Snapshot) -> Finding | None:
        if np.array_equal(a.samples, b.samples):
            return None
        only_a, only_b = len(_without(a.samples, b.samples)), len(_without(b.samples, a.samples))
        said = f"a trains on {len(a.samples)} samples and b on {len(b.samples)}"
        return Finding(a.step, "samples", f"{said}: {only_a} of them are only in a, {only_b} only in b")

    def _numbers(self, a: Snapshot, b: Snapshot) -> Finding | None:
        if a.step == 0:
            return None
        if not math.isclose(a.lr, b.lr, rel_tol=_LR_TOLERANCE):
            sentence = f"a has the learning rate {a.lr:.6g} and b {b.lr:.6g}{_ratio(a.lr, b.lr)}"
            return Finding(a.step, "learning rate", sentence)
        share = _share(abs(a.loss - b.loss), max(abs(a.loss), abs(b.loss)))
        self._keep(Difference("loss", a.step, "", share, abs(a.loss - b.loss), self.tolerance.loss))
        if share <= self.tolerance.loss:
            return None
        sentence = (
            f"a has the loss {a.loss:.9g} and b {b.loss:.9g}: {share:.2g} of it, tolerance {self.tolerance.loss:.0e}"
        )
        return Finding(a.step, "loss", sentence)

    def _replicas(self, a: Snapshot, b: Snapshot) -> Finding | None:
        for name, side in (("a", a), ("b", b)):
            if side.apart is not None:
                return Finding(side.step, "replicas", f"the workers of {name} are not equal: {side.apart}")
        return None

    def _tensors(self, what: str, a: Snapshot, b: Snapshot) -> Finding | None:
        of_a, of_b = (a.gradients, b.gradients) if what == "gradient" else (a.weights, b.weights)
        if not of_a or not of_b:
            return None  # one of them has none to compare in this step: its workers step alone
        if of_a.keys() != of_b.keys():
            other = sorted(of_a.keys() ^ of_b.keys())
            return Finding(a.step, what, f"the models differ: only one of them has a {what} named {other[0]}")
        for name in of_a:
            if of_a[name].shape != of_b[name].shape:
                shapes = f"{list(of_a[name].shape)} in a and {list(of_b[name].shape)} in b"
                return Finding(a.step, what, f"the models differ: {name} has the shape {shapes}")
        if what == "gradient":
            self._note_peaks(of_a, of_b)
        differences = [self._difference(what, a.step, name, of_a[name], of_b[name]) for name in of_a]
        for difference in differences:
            self._keep(difference)
        beyond = [d for d in differences if not d.share <= d.tolerance]
        if not beyond:
            return None
        first, worst = beyond[0], max(beyond, key=lambda d: d.share)
        others = f"; {len(beyond)} of {len(differences)} tensors are beyond it, {worst.tensor} most ({worst.share:.2g})"
        return Finding(
            a.step,
            what,
            f"the {what}s of {first.tensor} differ by {first.share:.2g} of their norm, tolerance {first.tolerance:.0e} "
            f"(largest absolute difference {first.largest:.2g}){others if len(beyond) > 1 else ''}",
        )

    def _note_peaks(self, of_a: Tensors, of_b: Tensors) -> None:
        for name in of_a:
            size = torch.maximum(of_a[name].abs(), of_b[name].abs())
            self._peaks[name] = torch.maximum(size, self._peaks[name]) if name in self._peaks else size

    def _difference(self, what: str, step: int, name: str, a: Tensor, b: Tensor) -> Difference:
        tolerance = getattr(self.tolerance, what)
        norm = max(float(torch.linalg.vector_norm(side, dtype=torch.float64)) for side in (a, b))
        difference = a.double() - b.double()
        share = _share(float(torch.linalg.vector_norm(difference)), norm)
        if share > tolerance and name in self._peaks:
            floor = self.noise * max(map(_largest, self._peaks.values()))
            rounding = (self._peaks[name] > 0) & (self._peaks[name] <= floor)
            if what == "weight" and rounding.any():
                self.apart[name] = max(_largest(difference[rounding]), self.apart.get(name, 0.0))
            difference = difference[~rounding]
            share = _share(float(torch.linalg.vector_norm(difference)), norm)
        return Difference(what, step, name, share, _largest(difference), tolerance)

    def _keep(self, difference: Difference) -> None:
        kept = self.largest.get(difference.what)
        if kept is None or not difference.share <= kept.share:
            self.largest[difference.what] = difference


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _share(difference: float, of: float) -> float:
    """NaN, which no tolerance admits, when either is not a number."""
    return difference / of if of != 0 else difference


def _without(ids: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The ids that `others` has not, as often as it has them fewer times."""
    values, counts = np.unique(ids, return_counts=True)
    theirs = {int(v): int(c) for v, c in zip(*np.unique(others, return_counts=True), strict=True)}
    left = [max(0, int(c) - theirs.get(int(v), 0)) for v, c in zip(values, counts, strict=True)]
    return np.repeat(values, left)


def _ratio(a: float, b: float) -> str:
    return f", {b / a:.4g} times as much" if a and b else ""
