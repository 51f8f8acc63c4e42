"""How often a run compiles, and which batch shapes make it compile again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from runner.backends import Backend, Compilations

#: Optimizer steps in which compilations are expected, and how many later ones are tolerated without a warning.
_WARM_UP_STEPS, _TOLERATED = 10, 5


class CompilationWatch:
    """Attributes a backend's new compilations to the work that was just done. The host compiles, so this is exact."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._late: Counter[str] = Counter()
        self._first_step: int | None = None  # of this process: a resumed run compiles again
        self._last_late_step = 0
        self._before = self._count()

    def _count(self) -> int:
        total = self.total()
        return total.count if total is not None else 0

    def _new(self) -> int:
        before, self._before = self._before, self._count()
        return self._before - before

    def after_step(self, step: int, batch: Mapping[str, Tensor]) -> None:
        """Attribute new compilations to optimizer step `step` (counted from 1) with `batch` as last micro-batch."""
        new = self._new()
        self._first_step = self._first_step or step
        if new and step >= self._first_step + _WARM_UP_STEPS:
            self._late[", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())] += new
            self._last_late_step = step

    def after_evaluation(self) -> None:
        """Ignore compilations of an evaluation: it has its own programs, the same ones each time."""
        self._new()

    def total(self) -> Compilations | None:
        return self._backend.compilations()

    def warning(self) -> str | None:
        """One sentence if the run compiled more than a few programs after the first steps."""
        if self._late.total() <= _TOLERATED:
            return None
        shapes = list(self._late)
        shown = "; ".join(shapes[:3]) + (f"; and {len(shapes) - 3} more" if len(shapes) > 3 else "")
        return (
            f"{self._late.total()} compilations after the first {_WARM_UP_STEPS} optimizer steps, the last in step "
            f"{self._last_late_step}, for {shown}: use few batch shapes (check that the recipe's collate pads to "
            "the length it is given, and see device.length_buckets)"
        )
