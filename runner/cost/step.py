"""What a step takes with `sync.k=k`, and which k pays: for predictions, measured runs and devices that are not here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

#: Share of a step, or of a run, that stands out: below it, the rest would be at most a quarter faster without it.
STANDS_OUT = 0.2


def ring_bytes(size: float, workers: int) -> float:
    """Bytes that each worker sends in an all-reduce of a tensor of `size` bytes: 2 (n − 1) / n times as many.

    Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return 2 * (workers - 1) / workers * size


@dataclass(frozen=True)
class StepCost:
    """Seconds of an optimizer step without communication, and of one synchronisation, whatever k is."""

    local_s: float
    synchronisation_s: float

    def seconds(self, k: float) -> float:
        """Seconds of a step with one synchronisation in `k` steps."""
        return self.local_s + self.synchronisation_s / k

    def communication_share(self, k: float) -> float:
        """Communication as a share of a step."""
        return self.synchronisation_s / k / self.seconds(k)

    def smallest_useful_k(self, largest: int) -> int | None:
        """The smallest power of two for which communication does not stand out; None if it is above `largest`."""
        powers = itertools.takewhile(lambda k: k <= largest, (2**n for n in itertools.count()))
        return next((k for k in powers if self.communication_share(k) < STANDS_OUT), None)

    def advice(self, largest: int) -> tuple[int | None, str]:
        """The smallest useful k of a run with `largest` steps, and what it would do, as a clause."""
        k = self.smallest_useful_k(largest)
        if k is None:
            return k, f"no sync.k up to the {largest:,} steps of this run would reduce it below {STANDS_OUT:.0%}"
        return k, f"sync.k={k} would reduce it to {self.communication_share(k):.0%}"
