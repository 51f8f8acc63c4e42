"""`accumulation=fit`: the largest micro-batch whose peak memory, according to measured steps, fits."""

from __future__ import annotations

import time
from collections.abc import Callable

from runner.backends.memory import available_memory
from runner.config.choices import AccumulationMode, BatchMode
from runner.data.cache import Progress
from runner.errors import OutOfMemory, UserError
from runner.measure.predicted import FIRST_ROWS, Measuring, predicted, unsupported_reason
from runner.measure.store import load
from runner.measure.tables import gib
from runner.plan.experiment import Experiment


def with_fitting_micro_batches(
    experiment: Experiment,
    started: float,
    progress: Progress,
    say: Callable[[str], None],
    measures: bool = True,
    jobs_at_once: int = 1,
) -> Experiment:
    """The experiment with the largest micro-batch that fits, with `accumulation=fit`; else the same.

    `started`: when the command began, on the monotonic clock. `say`: called with a sentence for each measurement and
    choice. `measures`: whether what is not known may be measured. `jobs_at_once`: of a sweep, that share the memory of
    this machine. Raises UserError if that is not possible, or one sample does not fit.
    """
    accumulation, placement = experiment.config.accumulation, experiment.placement
    if accumulation.mode is not AccumulationMode.fit:
        return experiment
    if experiment.config.batch.mode is BatchMode.per_device:
        rule = "choose accumulation=fixed or batch=fixed_global"
        raise UserError(f"accumulation=fit derives the micro-batch, which batch=per_device gives: {rule}")
    instead = "use accumulation=fixed or auto"
    if (reason := unsupported_reason(experiment)) is not None:
        raise UserError(f"accumulation=fit is not possible: {reason}; {instead}")
    sharing = jobs_at_once if placement.device_type == "cpu" else 1
    available = available_memory(placement.device_type, placement.local_workers * sharing)
    if available is None:
        raise UserError(f"accumulation=fit is not possible: this system does not tell its free memory; {instead}")
    assert accumulation.memory_share is not None
    limit = accumulation.memory_share * available
    known, prepared_s = load(experiment), time.monotonic() - started
    if known is None and not measures:
        raise UserError("accumulation=fit needs a measurement: add measure=true; a run measures by itself")

    def measured(candidate: Experiment) -> bool:
        """Whether there was enough memory to measure micro-batches of this size."""
        words = f"micro-batches of {candidate.plan.micro_batch}"
        say(f"accumulation=fit: measuring what {words} need, about 20 s …")
        measuring = Measuring(prepared_s, progress)  # each its own: it would measure the size that did not fit again
        measuring.announce([candidate])
        try:
            measuring.predicted(candidate)
        except OutOfMemory:
            say(f"accumulation=fit: there is too little memory for {words}")
            return False
        return True

    share = experiment.plan.replica_batch
    candidates = [experiment.with_accumulation_steps(steps) for steps in range(1, share + 1) if share % steps == 0]
    while candidates:
        if known is None:
            first = next(one for one in candidates if one.plan.micro_batch <= FIRST_ROWS or one is candidates[-1])
            if not measured(first):
                candidates = [one for one in candidates if one.plan.micro_batch < first.plan.micro_batch]
        else:
            needs = {one.plan.micro_batch: _memory(one) for one in candidates}
            candidates = [one for one in candidates if needs[one.plan.micro_batch] <= limit]
            if not candidates:
                smallest = min(needs)
                samples = f"{smallest} sample{'s' * (smallest > 1)}"
                least = f"micro-batches of {samples} need {gib(needs[smallest])}"
                part = _of(accumulation.memory_share, available)
                raise UserError(f"accumulation=fit is not possible: {least}, {part}")
            best = candidates[0]
            if best.plan.micro_batch <= known.rows[1] or not measures:
                needed = gib(needs[best.plan.micro_batch])
                part = _of(accumulation.memory_share, available)
                say(f"accumulation=fit: micro-batches of {best.plan.micro_batch} need {needed}, {part}")
                return best
            if not measured(best):
                candidates = candidates[1:]
        known = load(experiment)
    raise UserError("accumulation=fit is not possible: there is too little memory for one sample")


def _memory(experiment: Experiment) -> float:
    """Bytes of a worker at its peak, from the measurement that there is."""
    prediction = predicted(experiment)
    assert prediction is not None
    return prediction.memory_bytes


def _of(share: float, available: float) -> str:
    return f"and a worker may take {gib(share * available)} (accumulation.memory_share={share:g} of {gib(available)})"
