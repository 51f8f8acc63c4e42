"""The position of each optimizer step's global batch in the epoch's order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Global batch `t` of an epoch: positions `start` to `stop` of the epoch's order."""

    t: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


def epoch_length(samples: int, global_batch: int, drop_last: bool) -> int:
    """Optimizer steps in one epoch; the last, short global batch counts unless `drop_last`."""
    return samples // global_batch if drop_last else -(-samples // global_batch)


def step_of_epoch(t: int, samples: int, global_batch: int) -> Step:
    """Step `t` of an epoch over `samples` samples."""
    return Step(t, t * global_batch, min((t + 1) * global_batch, samples))


def total_steps(samples: int, global_batch: int, drop_last: bool, epochs: int, max_steps: int | None) -> int:
    """Optimizer steps of a whole run."""
    whole = epochs * epoch_length(samples, global_batch, drop_last)
    return whole if max_steps is None else min(whole, max_steps)


def samples_before(step: int, samples: int, global_batch: int, drop_last: bool) -> int:
    """Samples seen by all workers after `step` optimizer steps, over all epochs."""
    per_epoch = epoch_length(samples, global_batch, drop_last)
    seen_per_epoch = per_epoch * global_batch if drop_last else samples
    epoch, t = divmod(step, per_epoch)
    return epoch * seen_per_epoch + t * global_batch
