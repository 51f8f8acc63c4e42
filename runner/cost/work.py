"""What each worker computes in each optimizer step of a plan: pure arithmetic, known before the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runner.plan import Plan
from runner.plan.order import DataOrder
from runner.plan.steps import Step

#: Optimizer steps that are looked at, at most: of longer runs some local phases stand for the others.
_STEPS = 3000


@dataclass(frozen=True)
class Shapes:
    """How the rows of a table become what a model computes.

    `lengths`: tokens of each row, int64 [rows]. `width`: the length that a micro-batch with this longest row is padded
    to. `padded`: whether the model computes padding; its attention does in any case.
    """

    lengths: np.ndarray
    width: Callable[[int], int]
    padded: bool

    def of(self, ids: Sequence[int] | np.ndarray) -> tuple[float, float]:
        """Tokens that are computed for a micro-batch, and rows × width², which attention grows with.

        A micro-batch without rows has one filler, the shortest.
        """
        own = self.lengths[ids] if len(ids) else self.lengths.min(keepdims=True)
        width = self.width(int(own.max()))
        return float(len(own) * width if self.padded else own.sum()), float(len(own)) * width**2


@dataclass(frozen=True)
class Work:
    """What workers compute in some optimizer steps, which stand for all steps of a run.

    `micro_batches`, `tokens`, `squares` (of `Shapes.of`): of each step and worker, [steps, workers]. `phase_starts`:
    the first step of each local phase, after which workers wait for each other; with k = 1 each step is one. `share`:
    of these steps in the whole run. `synchronisations`: in the whole run, of local phases. `largest`: tokens and
    squares of micro-batches, the most of each, [2]. `padding_share`: padding among the tokens.
    """

    micro_batches: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray
    phase_starts: np.ndarray
    share: float
    synchronisations: int
    largest: np.ndarray
    padding_share: float

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return round(len(self.tokens) / self.share)


def mean_work(plan: Plan, tokens: float) -> Work:
    """The same work in every step and on every worker, where only the mean `tokens` of a sample are known."""
    own = np.full((1, plan.world_size), tokens * plan.replica_batch)
    return Work(
        micro_batches=np.full_like(own, plan.accumulation_steps),
        tokens=own,
        squares=np.zeros_like(own),
        phase_starts=np.zeros(1, dtype=int),
        share=1 / plan.optimizer_steps,
        synchronisations=0,
        largest=np.array([tokens * plan.replica_batch / plan.accumulation_steps, 0.0]),
        padding_share=0.0,
    )


def planned_work(plan: Plan, seed: int, length_sorted: bool, shapes: Shapes, due: Sequence[int] | None) -> Work:
    """The work of a whole run.

    `due`: the optimizer steps, counted from 0, that end a local phase; None if gradients are averaged in every step.
    """
    ends = np.arange(plan.optimizer_steps) if due is None else np.array([*due, plan.optimizer_steps - 1])
    ends = np.unique(ends)
    starts = np.array([0, *(ends[:-1] + 1)])
    # Spread evenly, but not with the period of an epoch, whose last step is shorter.
    kept = -(-len(ends) * _STEPS // max(plan.optimizer_steps, _STEPS))
    some = np.linspace(0, len(ends) - 1, kept).round().astype(int)
    phases = list(zip(starts[some].tolist(), ends[some].tolist(), strict=True))
    orders = [DataOrder(plan, seed, rank, shapes.lengths if length_sorted else None) for rank in range(plan.world_size)]
    rows: list[list[tuple[float, float, float]]] = []
    phase_starts: list[int] = []
    largest, real = np.zeros(2), 0.0
    for first, last in phases:
        phase_starts.append(len(rows))
        for number in range(first, last + 1):
            epoch, t = divmod(number, plan.steps_per_epoch)
            row = [_of_worker(order, epoch, order.step(t), shapes) for order in orders]
            rows.append([(count, tokens, squares) for count, tokens, squares, _, _ in row])
            largest = np.maximum(largest, np.max([most for _, _, _, most, _ in row], axis=0))
            real += sum(own for *_, own in row)
    numbers = np.array(rows, dtype=float)
    tokens = numbers[..., 1]
    return Work(
        micro_batches=numbers[..., 0],
        tokens=tokens,
        squares=numbers[..., 2],
        phase_starts=np.array(phase_starts),
        share=len(rows) / plan.optimizer_steps,
        synchronisations=0 if due is None else len(due),
        largest=largest,
        padding_share=float(1 - real / tokens.sum()),
    )


def _of_worker(
    order: DataOrder, epoch: int, step: Step, shapes: Shapes
) -> tuple[int, float, float, tuple[float, float], float]:
    """Micro-batches, tokens and squares of a worker's step; the most of one micro-batch; tokens without padding."""
    micro_batches = order.micro_batches(epoch, step)
    own = float(sum(shapes.lengths[ids].sum() for ids in micro_batches))
    each = [shapes.of(ids) for ids in micro_batches or [np.zeros(0, dtype=np.int64)]]
    tokens, squares = (sum(numbers) for numbers in zip(*each, strict=True))
    most = (max(tokens for tokens, _ in each), max(squares for _, squares in each))
    return len(each), tokens, squares, most, own


def evaluation_work(shapes: Shapes, micro_batch: int, workers: int) -> np.ndarray:
    """Micro-batches, tokens and squares of one evaluation, [workers, 3]: sorted by length, then dealt."""
    by_length = np.argsort(shapes.lengths, kind="stable")
    micro_batch = min(micro_batch, max(-(-len(by_length) // workers), 1))
    numbers = np.zeros((workers, 3))
    for rank in range(workers):
        own = by_length[rank::workers]
        for start in range(0, len(own), micro_batch):
            numbers[rank] += (1, *shapes.of(own[start : start + micro_batch]))
    return numbers
