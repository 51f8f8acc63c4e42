"""n replicas in one process, brought together as docs/sync.md says: what the shipped loop is held to.

Written from that page alone, in flat fp64 vectors: `x` are a replica's weights, `a` the common weights after the last
synchronisation, `d` what a worker brings to the next one, `w` what it weighs there and `m` the weighted sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.replicas import Weights
from tests.sync.reference import Reference, one_thread

#: Wire format: its dtype, and what numbers are multiplied by before they are cast to it.
WIRES = {
    "none": (torch.float64, 1),
    "bf16": (torch.bfloat16, 1),
    "fp16": (torch.float16, 1024),
    "int8": (torch.int8, 1),
}


@dataclass(frozen=True)
class Sync:
    """The settings of the group `sync`."""

    policy: str = "periodic"
    k: int = 4
    schedule: str = "constant"
    synchronous_share: float | None = None
    qsr_alpha: float | None = None
    fragments: int = 1
    compress: str = "none"
    overlap: bool = False
    delay: int | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_nesterov: bool = True
    outer_per_lr: bool = False

    def overrides(self, choice: str | None = None) -> list[str]:
        """The same for the runner's command line; `choice`: a file of the group that stands for policy and outer."""
        named = [f.name for f in fields(self) if f.name != "policy" and not (choice and f.name.startswith("outer"))]
        own = [f"sync.{name}={_written(getattr(self, name))}" for name in named if self.is_set(name)]
        return [f"sync={choice or self.policy}", *own]

    def is_set(self, name: str) -> bool:
        """Whether a setting has to be written down; `k` always is."""
        return name == "k" or getattr(self, name) != getattr(Sync(), name)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)


DILOCO = Sync("outer")
SLOWMO = Sync("outer", outer_lr=1.0, outer_momentum=0.7, outer_nesterov=False, outer_per_lr=True)


def synchronous_steps(sync: Sync, seen: Sequence[int]) -> int:
    """How many steps at the beginning are fully synchronous. `seen`: samples before each step, and in all."""
    *before, total = seen
    if sync.schedule != "post_local":
        return 0
    share = 0.5 if sync.synchronous_share is None else sync.synchronous_share
    return sum(s < share * total for s in before)


def due_steps(sync: Sync, reference: Reference) -> list[int]:
    """The steps (from 0) that a synchronisation follows, the fully synchronous ones left out."""
    seen, lrs = reference.seen(), reference.lrs()
    if sync.schedule == "qsr":
        return sorted(_quadratic(sync, reference.plan.lr, lrs, reference.warming_up()))
    first = synchronous_steps(sync, seen)
    return [t for t in range(first, len(lrs)) if (t - first + 1) % sync.k == 0]


def _quadratic(sync: Sync, peak: float, lrs: Sequence[float], warming_up: Sequence[bool]) -> set[int]:
    alpha = peak * math.sqrt(sync.k) if sync.qsr_alpha is None else sync.qsr_alpha
    due, t = set(), 0
    while t < len(lrs):
        lr = peak if warming_up[t] else lrs[t]
        t += max(sync.k, math.floor((alpha / lr) ** 2))
        due.add(t - 1)
    return due & set(range(len(lrs)))


def fragment_of(sizes: Sequence[int], fragments: int) -> Tensor:
    """The fragment that each number is in: tensors in blocks of 16 numbers, of which fragments have equal shares."""
    blocks = [-(-size // 16) for size in sizes]
    starts = np.cumsum([0, *blocks])
    ends = [starts[-1] * (n + 1) // fragments for n in range(fragments)]
    numbers = [np.arange(size) // 16 + start for size, start in zip(sizes, starts, strict=False)]
    return torch.from_numpy(np.searchsorted(ends, np.concatenate([*numbers, []]), side="right"))


def rounded_to_int8(vector: Tensor) -> Tensor:
    """Each block of 256 numbers as multiples of its largest one / 127."""
    blocks = torch.nn.functional.pad(vector, (0, -len(vector) % 256)).view(-1, 256)
    unit = blocks.abs().amax(1, keepdim=True) / 127
    numbers = torch.where(unit > 0, (blocks / unit).round() * unit, 0.0)
    return numbers.flatten()[: len(vector)]


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float], compress: str) -> Tensor:
    """sum_j cast(w_j v_j), added up in the wire's dtype. For two workers that is one rounding of the sum."""
    dtype, factor = WIRES[compress]
    first, *rest = [(w * v * factor).to(dtype) for w, v in zip(weights, values, strict=True)]
    for value in rest:
        first = first + value
    return first.double() / factor


def hooked_average(values: Sequence[Tensor], compress: str) -> Tensor:
    """The mean as torch's bf16_compress_hook and fp16_compress_hook take it: cast, divided, added up."""
    dtype, n = WIRES[compress][0], len(values)
    first, *rest = [v.to(dtype) / n for v in values]
    for value in rest:
        first = first + value
    return first.double()


@dataclass(frozen=True)
class Flight:
    """A snapshot of a fragment that is applied after step `arrival`; `lrs`: the learning rates of its phase."""

    arrival: int
    d: list[Tensor]
    m: Tensor
    lrs: list[float]


@dataclass(frozen=True)
class Record:
    """What is logged of one synchronisation of `numbers` weights, after optimizer step `step` (from 1).

    `drift_cancels`, `cosine_cancels`: how much larger the squares are that a worker tells than what is left when they
    are subtracted from each other, and so by how much their rounding grows.
    """

    step: int
    steps: int
    numbers: int
    drift: float
    cosine: float
    drift_cancels: float
    cosine_cancels: float


class Simulation:
    """Train `workers` replicas under `sync`; `overrides` say everything else."""

    def __init__(self, overrides: list[str], workers: int, sync: Sync) -> None:
        self.reference, self.sync, self.n = Reference(overrides), sync, workers
        self.models, self.optimizers = zip(*(self.reference.replica() for _ in range(workers)), strict=True)
        self.a = self.x(0)
        self.weights_only = sum(p.numel() for p in self.models[0].parameters())
        self.v = torch.zeros_like(self.a)  # the outer momentum
        self.delay = math.ceil(sync.k / (2 * sync.fragments)) if sync.delay is None else sync.delay
        sizes = [t.numel() for t in self.tensors(0)]
        count = len(list(self.models[0].parameters()))
        parts = [fragment_of(part, sync.fragments) for part in (sizes[:count], sizes[count:])]
        self.masks = [torch.cat(parts) == n for n in range(sync.fragments)]
        self.flights: dict[int, Flight] = {}
        #: `int8` only: the place of each number, where tensors begin with a block of 16, and what rounding has taken so
        #: far, of each worker's numbers and of their sum.
        padded = [torch.arange(-(-size // 16) * 16) < size for size in sizes]
        self.places = torch.cat(padded).nonzero().flatten()
        self.lost = [torch.zeros(sum(map(len, padded)), dtype=torch.float64) for _ in range(workers + 1)]
        self.synchronous = 0  # steps of all on common gradients
        self.records: list[Record] = []
        self.commons: dict[int, Weights] = {}  #: common weights by the steps after which they were new
        self.u = [torch.zeros_like(self.a) for _ in range(self.n)]  # `accumulated` only
        self.counts = [np.zeros(self.n) for _ in self.masks]
        self.lrs: list[list[float]] = [[] for _ in self.masks]

    @property
    def vectors(self) -> int:
        """How many vectors of the weights' length one synchronisation brings together."""
        return 2 if self.sync.policy == "gradients" else 1  # the weights as well, for the drift

    def tensors(self, i: int) -> list[Tensor]:
        """What replicas agree on: the weights, and after them running statistics (of batch norm, say)."""
        model = self.models[i]
        return [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]

    def x(self, i: int) -> Tensor:
        return parameters_to_vector(self.tensors(i)).detach().clone()

    def set_x(self, i: int, x: Tensor) -> None:
        vector_to_parameters(x.clone(), self.tensors(i))

    def start_window(self, fragment: int) -> None:
        self.counts[fragment], self.lrs[fragment] = np.zeros(self.n), []
        for u in self.u:
            u[self.masks[fragment]] = 0

    @one_thread()
    def run(self) -> Weights:
        first, due = synchronous_steps(self.sync, self.reference.seen()), due_steps(self.sync, self.reference)
        steps = list(zip(self.reference.global_batches(), self.reference.lrs(), strict=True))
        for t, (ids, lr) in enumerate(steps):
            shares = self.reference.shares(ids, self.n)
            if t < first or (self.sync.k, self.sync.schedule, self.sync.policy) in DDP:
                self.synchronous_step(t, shares, lr)
                continue
            for lrs in self.lrs:
                lrs.append(lr)
            step = {"gradients": self.gradients_step, "accumulated": self.accumulated_step}
            step.get(self.sync.policy, self.local_step)(t, shares, lr, t in due)
            for fragment in [f for f, flight in self.flights.items() if flight.arrival == t]:
                self.arrive(t, fragment)
            for fragment in self.due_fragments(t, first, due):
                self.depart(t, t + self.delay if self.sync.overlap else t, fragment)
        self.finish(len(steps) - 1)
        return dict(self.models[0].state_dict())

    def due_fragments(self, t: int, first: int, due: Sequence[int]) -> list[int]:
        """In a round of s steps, fragment n of F is due ⌊(F − 1 − n) s / F⌋ steps before the round ends."""
        if self.sync.policy == "gradients":
            return []
        last = self.sync.fragments - 1
        ends = [d for d in due if d >= t]
        if not ends:
            return []
        end, steps = ends[0], ends[0] + 1 - max([first, *(d + 1 for d in due if d < t)])
        return [n for n in range(last + 1) if t == end - (last - n) * steps // (last + 1)]

    def synchronous_step(self, t: int, shares: list[np.ndarray], lr: float) -> None:
        """One step of all on the mean gradient of the whole global batch, as DDP comes to it."""
        found = [self.reference.gradient(model, share, t) for model, share in zip(self.models, shares, strict=True)]
        total = max(sum(c for _, c in found), 1)
        mean = hooked_average([g * c * (self.n / total) for g, c in found], self.sync.compress)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.reference.apply(model, optimizer, mean, lr)
        self.synchronous += 1
        self.a = self.x(0)
        self.note_common(t)

    def local_step(self, t: int, shares: list[np.ndarray], lr: float, due: bool = False) -> None:
        """Every worker alone: own count, own clipping, own moments; no step without a loss term."""
        for i, (model, optimizer, share) in enumerate(zip(self.models, self.optimizers, shares, strict=True)):
            gradient, count = self.reference.gradient(model, share, t)
            for counts in self.counts:
                counts[i] += count
            if count:
                self.reference.apply(model, optimizer, gradient, lr)

    def accumulated_step(self, t: int, shares: list[np.ndarray], lr: float, due: bool) -> None:
        """A local step whose update is kept, while the weights go back to the common ones; statistics go on."""
        self.local_step(t, shares, lr)
        for i in range(self.n):
            x = self.x(i)
            self.u[i] += x - self.a
            self.set_x(i, torch.cat([self.a[: self.weights_only], x[self.weights_only :]]))

    def gradients_step(self, t: int, shares: list[np.ndarray], lr: float, due: bool) -> None:
        """A local step, with the weighted mean of this step's gradients if it is due; weights are never aligned."""
        found = [self.reference.gradient(model, share, t) for model, share in zip(self.models, shares, strict=True)]
        gradients, counts = [g for g, _ in found], np.array([c for _, c in found])
        before = [self.x(i) - self.a for i in range(self.n)]
        total = counts.sum()
        if due and total:
            common = weighted_sum(gradients, counts / total, self.sync.compress)
            self.record(t, 0, gradients, counts / total, before)
            gradients, counts = [common] * self.n, counts * 0 + 1
        for model, optimizer, g, c in zip(self.models, self.optimizers, gradients, counts, strict=True):
            if c:
                self.reference.apply(model, optimizer, g, lr)
        if due:
            self.start_window(0)

    def weights(self, fragment: int = 0) -> list[float]:
        counts = self.counts[fragment]
        return [c / counts.sum() if counts.sum() else 1 / self.n for c in counts]

    def depart(self, t: int, arrival: int, fragment: int) -> None:
        """What the workers did since the last time is taken after step `t`, and applied after step `arrival`."""
        w = self.weights(fragment)
        d = [self.x(i) - self.a for i in range(self.n)]
        if self.sync.policy == "accumulated":
            d = [
                torch.cat([u[: self.weights_only], own[self.weights_only :]]) for u, own in zip(self.u, d, strict=True)
            ]
        m = self.quantised(d, w, fragment) if self.sync.compress == "int8" else weighted_sum(d, w, self.sync.compress)
        self.record(t, fragment, d, w)
        self.flights[fragment] = Flight(arrival, d, m, self.lrs[fragment])
        self.start_window(fragment)
        if arrival == t:
            self.arrive(t, fragment)

    def quantised(self, d: list[Tensor], w: list[float], fragment: int) -> Tensor:
        """The weighted sum in int8: of each worker's numbers, and of their sum, with what was lost before."""
        mask = torch.zeros_like(self.lost[0], dtype=torch.bool)
        mask[self.places[self.masks[fragment]]] = True
        mask = mask.view(-1, 16).any(1).repeat_interleave(16)  # with the padding
        total = self.lost[-1][mask]
        for di, wi, lost in zip(d, w, self.lost, strict=False):
            own = torch.zeros_like(lost)
            own[self.places] = wi * di
            own = own[mask] + lost[mask]
            total = total + rounded_to_int8(own)
            lost[mask] = own - rounded_to_int8(own)
        self.lost[-1][mask] = total - rounded_to_int8(total)
        m = torch.zeros_like(self.lost[0])
        m[mask] = rounded_to_int8(total)
        return m[self.places]

    def arrive(self, t: int, fragment: int) -> None:
        """The fragment's common weights change, and those of every replica, but for what it did since the snapshot."""
        flight, mask = self.flights.pop(fragment), self.masks[fragment]
        new = self.outer_step(flight, mask) if self.sync.policy == "outer" else self.a + flight.m
        new = torch.where(mask, new, self.a)
        for i in range(self.n):
            own = self.x(i)
            x = own + (new - self.a) - flight.d[i]
            if self.sync.policy == "accumulated":
                x[: self.weights_only] = new[: self.weights_only]
            self.set_x(i, torch.where(mask, x, own))
        self.a = new
        if fragment == self.sync.fragments - 1:
            self.note_common(t)

    def outer_step(self, flight: Flight, mask: Tensor) -> Tensor:
        """SGD with momentum on the common weights, the gradient being what the workers moved, backwards."""
        new = self.a + flight.m  # statistics are averaged plainly
        gamma = sum(flight.lrs) / len(flight.lrs) if self.sync.outer_per_lr else 1.0
        if gamma:
            gradient = -flight.m / gamma
            self.v = torch.where(mask, self.sync.outer_momentum * self.v + gradient, self.v)
            step = gradient + self.sync.outer_momentum * self.v if self.sync.outer_nesterov else self.v
            new[: self.weights_only] = (self.a - self.sync.outer_lr * gamma * step)[: self.weights_only]
        return new

    def finish(self, t: int) -> None:
        """Nothing stays in flight, and nothing is left that one worker alone did."""
        for fragment in list(self.flights):
            self.arrive(t, fragment)
        if self.sync.policy == "gradients":
            self.a = self.x(0)
            for i in range(self.n):
                self.set_x(i, self.a)
        for fragment in [f for f, lrs in enumerate(self.lrs) if lrs and self.sync.policy != "gradients"]:
            self.depart(t, t, fragment)
        self.note_common(t)

    def record(self, t: int, fragment: int, d: list[Tensor], w: Sequence[float], x: list[Tensor] | None = None) -> None:
        """Drift from the mean in units of the common weights, and how far the workers went the same way.

        `x`: what drifted, from the common weights; what was brought along if not given.
        """
        mask = self.masks[fragment][: self.weights_only]
        x, d = ([v[: self.weights_only][mask] for v in vectors] for vectors in (d if x is None else x, d))
        mean = sum(wi * xi for wi, xi in zip(w, x, strict=True))
        spread = sum(wi * (xi - mean).norm() ** 2 for wi, xi in zip(w, x, strict=True))
        squares = sum(wi * xi.norm() ** 2 for wi, xi in zip(w, x, strict=True))
        pairs = [(i, j) for i in range(self.n) for j in range(self.n) if i != j]
        along = sum(w[i] * w[j] * (d[i] @ d[j]) for i, j in pairs)
        whole = sum(w[i] * w[j] * (d[i].norm() * d[j].norm()) for i, j in pairs)
        lengths = sum(wi * di.norm() for wi, di in zip(w, d, strict=True)) ** 2
        told = Record(
            step=t + 1,
            steps=len(self.lrs[fragment]),
            numbers=int(mask.sum()),
            drift=float(spread**0.5 / self.a[: self.weights_only][mask].norm()),
            cosine=float(along / whole) if whole else math.nan,
            drift_cancels=float(squares / spread) if spread else math.inf,
            cosine_cancels=float(lengths / whole) if whole else math.inf,
        )
        self.records.append(told)

    def note_common(self, t: int) -> None:
        self.commons[t + 1] = {name: tensor.clone() for name, tensor in self._state(self.a).items()}

    def _state(self, x: Tensor) -> Weights:
        """The model's state with `x` for its weights."""
        own = self.x(0)
        self.set_x(0, x)
        state = {name: tensor.clone() for name, tensor in self.models[0].state_dict().items()}
        self.set_x(0, own)
        return state


#: Settings under which all steps are fully synchronous.
DDP = {(1, "constant", "periodic"), (1, "constant", "gradients")}


def simulate(overrides: list[str], workers: int, sync: Sync) -> Simulation:
    simulation = Simulation(overrides, workers, sync)
    simulation.run()
    return simulation
