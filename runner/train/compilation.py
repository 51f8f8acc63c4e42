"""How much a run compiles, and which batches made it compile again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from runner.backends import Backend, Compilations

#: Optimizer steps in which compiling is to be expected, and the compilations after them that are still no nuisance.
_WARM_UP_STEPS, _A_HANDFUL = 10, 5


class CompilationWatch:
    """Looks at a backend's compilations after each piece of work. On one that compiles nothing it has nothing to say.

    Compiling happens in the host's thread, so that what is new after a piece of work was compiled for it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._late: Counter[str] = Counter()
        self._last_late_step = 0
        self._before = self._count()

    def _count(self) -> int:
        now = self._backend.compilations()
        return now.count if now is not None else 0

    def after_step(self, step: int, batch: Mapping[str, Tensor]) -> None:
        """Note what optimizer step `step` (counted from 1) has compiled, `batch` being its last micro-batch."""
        new = self._new()
        if new and step > _WARM_UP_STEPS:
            self._late[_shapes(batch)] += new
            self._last_late_step = step

    def after_evaluation(self) -> None:
        """Leave out what an evaluation has compiled: it has programs of its own, the same ones each time."""
        self._new()

    def _new(self) -> int:
        before, self._before = self._before, self._count()
        return self._before - before

    def total(self) -> Compilations | None:
        return self._backend.compilations()

    def warning(self) -> str | None:
        """One sentence if there were more than a handful of compilations after the first steps."""
        if self._late.total() <= _A_HANDFUL:
            return None
        shapes = list(self._late)
        shown = "; ".join(shapes[:3]) + (f"; and {len(shapes) - 3} more" if len(shapes) > 3 else "")
        return (
            f"{self._late.total()} compilations after the first {_WARM_UP_STEPS} optimizer steps, the last in step "
            f"{self._last_late_step}, for {shown}: batches should come in few shapes (does the recipe's collate pad to "
            "the length it is given? device.length_buckets says which lengths there are)"
        )


def _shapes(batch: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
