"""What a run will cost, from the work of its steps and what a few real steps have cost: pure arithmetic.

A phase of an optimizer step (forward, backward, optimizer …) takes on a worker

    seconds = a + m · (micro-batches − 1) + b · tokens + c · squares

with the tokens that are computed and, for attention, rows × length² (`Shapes.of`). The four numbers are fitted to
measured steps; none is negative. Each local phase, which with k = 1 is a step, lasts as long as its slowest worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runner.cost.quantity import Quantity
from runner.cost.work import Work

#: Half the width of the interval around predicted seconds, as a share: at least, and times what the fit leaves open.
_LEAST_ERROR, _ERRORS = 0.1, 2.0
#: What start-up and the end of a run, measured once, can be off by.
_ONCE_ERROR = 0.3
#: Widens the interval for each factor of e by which a run leaves the measured range of tokens.
_OUTSIDE_ERROR = 0.2
#: Memory counts as fitting up to this share of what there is: runs have needed up to a tenth more than was predicted
#: (benchmarks/results/planner.md).
_FITS = 0.9


@dataclass(frozen=True)
class Measurement:
    """What some real optimizer steps of a setup's workers have cost.

    `setup`: in words. `measured_at`: in seconds since the epoch. `steps`: that were timed. `rows`: of the smallest and
    of the largest micro-batch. `tokens`: of these. `phases`: of an optimizer step, the four coefficients of each.
    `synchronisation_s`: of one local phase, with what is computed for it; 0 with k = 1, whose phases include it.
    `evaluation`: seconds of a micro-batch, of a token and of a square. `metrics_s`: of computing metrics from all
    predictions, the first time and later; `evaluated`: how many predictions these were. `start_s`: from the start of
    the command to the end of the first step, without that. `ending_s`: from the last evaluation to the worker's end.
    `memory`: bytes of a worker that trains, and for each token and square of its largest micro-batch;
    `gradient_memory`: added if a step has several micro-batches; `evaluation_memory`: that evaluation and its libraries
    add. `error`: share of a step's seconds that the fit leaves open, as a root mean square. `oversubscription`: threads
    of all workers for each core. `flops_per_token`: of forward and backward pass. `peak_flops_per_s`: of the devices of
    all workers. `parameters`: that are trained; `frozen_bytes`: of the others.
    """

    setup: str
    measured_at: float
    steps: int
    rows: tuple[int, ...]
    tokens: tuple[float, ...]
    phases: Mapping[str, Sequence[float]]
    synchronisation_s: float
    evaluation: tuple[float, ...]
    metrics_s: tuple[float, ...]
    evaluated: int
    start_s: float
    ending_s: float
    memory: tuple[float, ...]
    gradient_memory: float
    evaluation_memory: float
    error: float
    oversubscription: float = 1.0
    flops_per_token: float | None = None
    peak_flops_per_s: float | None = None
    parameters: int | None = None
    frozen_bytes: int = 0

    @property
    def efficiency(self) -> float | None:
        """The share of the devices' peak, while a long micro-batch is computed; None if the peak is not known."""
        if not self.flops_per_token or not self.peak_flops_per_s:
            return None
        per_token = sum(self.phases[name][2] for name in ("forward", "backward"))
        return self.flops_per_token / per_token / self.peak_flops_per_s if per_token else None


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to need.

    `training`: seconds of all optimizer steps; `total`: of the whole command. `step_s`: seconds of an optimizer step by
    phase, `waiting` for slower workers among them; they add up. `start_s`, `evaluation_s` (of all `evaluations`),
    `ending_s`: seconds. `padding_share`: of the tokens. `memory_bytes`: peak of one worker, `available_bytes`: what
    there is for it, None if unknown. `outside`: factor by which micro-batches leave the measured range of tokens, 1 if
    they do not. `measured_at`: None for data sheets, which have an `answer`: which k pays, in a sentence.
    """

    training: Quantity
    total: Quantity
    step_s: Mapping[str, float]
    start_s: float
    evaluations: int
    evaluation_s: float
    ending_s: float
    padding_share: float
    memory_bytes: float
    available_bytes: float | None
    outside: float
    measured_at: float | None
    answer: str | None = None

    @property
    def communication_share(self) -> float:
        """Parts of a step: communication, and waiting for slower workers."""
        return (self.step_s["communication"] + self.step_s["waiting"]) / sum(self.step_s.values())

    @property
    def fits(self) -> bool | None:
        """Whether memory suffices; None if it is not known how much there is."""
        return None if self.available_bytes is None else self.memory_bytes <= _FITS * self.available_bytes

    def money(self, price_per_hour: float) -> Quantity:
        """`price_per_hour`: of all devices together."""
        return self.total * (price_per_hour / 3600)


def fitted(features: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The coefficients, none of them negative, with the smallest sum of absolute relative errors.

    `features`: [observations, coefficients]. Outliers count little: other processes slow down single steps.
    """
    own = 1 / np.maximum(measured, 1e-9 + 1e-3 * float(measured.max(initial=0.0)))
    weights = own
    coefficients = np.zeros(features.shape[1])
    for _ in range(8):
        coefficients = _least_squares(features * weights[:, None], measured * weights)
        errors = np.abs(features @ coefficients - measured) * own
        weights = own / np.sqrt(np.maximum(errors, 0.01))
    return coefficients


def _least_squares(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Non-negative least squares, of columns that are scaled alike: their units differ by many orders."""
    from scipy.optimize import nnls  # slow to import, and needed only where something was measured

    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    solution: np.ndarray = nnls(features / scale, values)[0] / scale
    return solution


def predict(
    work: Work,
    measured: Measurement,
    evaluation: np.ndarray,
    eval_samples: int,
    evaluations: int,
    available_bytes: float | None,
) -> Prediction:
    """What the run will need whose training is `work`.

    `evaluation`: of one evaluation, [workers, 3] (`evaluation_work`), of `eval_samples`. `available_bytes`: for each
    worker; None if unknown.
    """
    steps = len(work.tokens)
    features = np.stack([np.ones_like(work.tokens), work.micro_batches - 1, work.tokens, work.squares], axis=-1)
    of_phases = {name: features @ np.asarray(numbers) for name, numbers in measured.phases.items()}
    in_phases = np.add.reduceat(sum(of_phases.values()), work.phase_starts, axis=0)  # [phases, workers]
    mean, slowest = in_phases.mean(axis=1), in_phases.max(axis=1)
    # Where threads outnumber cores, the cores of workers that wait speed up the others.
    lasts = np.maximum(mean, slowest / max(measured.oversubscription, 1.0))
    step_s = {name: float(seconds.mean()) for name, seconds in of_phases.items()}
    step_s["communication"] += work.synchronisations / work.steps * measured.synchronisation_s
    step_s["waiting"] = float((lasts - mean).sum()) / steps
    training = sum(step_s.values()) * work.steps

    forward = float((evaluation @ np.asarray(measured.evaluation)).max())
    first, later = (seconds * eval_samples / max(measured.evaluated, 1) for seconds in measured.metrics_s)
    evaluation_s = evaluations * forward + first + max(evaluations - 1, 0) * later
    typical, (low, high) = float(work.tokens.sum() / work.micro_batches.sum()), measured.tokens
    outside = max(1.0, typical / high, low / typical)
    error = max(_LEAST_ERROR, _ERRORS * measured.error) + _OUTSIDE_ERROR * float(np.log(outside))
    total = measured.start_s + training + evaluation_s + measured.ending_s
    once = (total - training) / total
    base, per_token, per_square = measured.memory
    memory = base + per_token * float(work.largest[0]) + per_square * float(work.largest[1])
    if work.micro_batches.max() > 1:
        memory += measured.gradient_memory
    return Prediction(
        training=Quantity.around(training, 1 + error),
        total=Quantity.around(total, 1 + error * (1 - once) + _ONCE_ERROR * once),
        step_s=step_s,
        start_s=measured.start_s,
        evaluations=evaluations,
        evaluation_s=evaluation_s,
        ending_s=measured.ending_s,
        padding_share=work.padding_share,
        memory_bytes=memory + measured.evaluation_memory,
        available_bytes=available_bytes,
        outside=outside,
        measured_at=measured.measured_at,
    )
