"""Compilations: which of them are worth a warning, and what it says."""

from __future__ import annotations

import pytest
import torch

from runner.backends import Compilations
from runner.train.compilation import CompilationWatch

#: What a run needs programs for anyway.
WARM_UP = 10


class Compiler:
    """A backend that has compiled as much as it is told; `None` programs: one that compiles nothing while training."""

    def __init__(self, programs: int | None = 0) -> None:
        self.programs = programs
        self.seconds = 0.0

    def compilations(self) -> Compilations | None:
        return None if self.programs is None else Compilations(self.programs, self.seconds, 3)

    def compile(self, programs: int = 1, seconds: float = 0.0) -> None:
        assert self.programs is not None
        self.programs += programs
        self.seconds += seconds


def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(rows, tokens), "labels": torch.zeros(rows)}


def warned(compiled: dict[int, int]) -> str | None:
    """What is said after 40 steps, those of `compiled` having compiled so many programs."""
    backend = Compiler()
    watch = CompilationWatch(backend)  # type: ignore[arg-type]
    for step in range(1, 41):
        backend.compile(compiled.get(step, 0))
        watch.after_step(step, batch(4, step))
    return watch.warning()


@pytest.mark.parametrize(
    "compiled",
    [
        {},
        {1: 100},
        dict.fromkeys(range(1, WARM_UP + 1), 9),
        {1: 3, 11: 5},
        {11: 1, 12: 1, 20: 1, 30: 1, 40: 1},
        {10: 50, 40: 5},
    ],
)
def test_a_few_compilations_are_no_nuisance(compiled: dict[int, int]) -> None:
    """Nothing is said of the first 10 steps, however much they compile, nor of up to 5 compilations after them."""
    assert warned(compiled) is None


def test_what_came_before_is_no_steps() -> None:
    """A run that goes on at step 20 answers for nothing that was compiled before it."""
    watch = CompilationWatch(Compiler(1000))  # type: ignore[arg-type]
    watch.after_step(20, batch(4, 16))
    assert watch.warning() is None


@pytest.mark.parametrize(
    ("compiled", "count", "last"),
    [
        ({11: 6}, 6, 11),
        (dict.fromkeys(range(11, 17), 1), 6, 16),
        ({1: 100, 10: 7, 12: 4, 35: 2}, 6, 35),
        (dict.fromkeys(range(1, 41), 2), 60, 40),
    ],
)
def test_more_are_told(compiled: dict[int, int], count: int, last: int) -> None:
    """From the sixth on one sentence says how many there were after the first 10 steps, and which step had the last."""
    said = warned(compiled)
    assert said is not None
    assert said.startswith(f"{count} compilations after the first 10 optimizer steps, the last in step {last}, for ")
    assert "\n" not in said
    for word in ("batches should come in few shapes", "collate", "device.length_buckets"):
        assert word in said


def test_shapes_are_named() -> None:
    """The batches that were compiled for are named by their tensors' shapes, three at most, each once, in order."""

    def shapes(*steps: int) -> str:
        said = warned({step: 6 // len(steps) + 1 for step in steps})
        assert said is not None
        return said.partition(", for ")[2].partition(": batches")[0]

    def shape(step: int) -> str:
        return f"input_ids [4, {step}], labels [4]"

    assert shapes(11) == shape(11)
    assert shapes(12, 30) == f"{shape(12)}; {shape(30)}"
    assert shapes(12, 14, 30) == f"{shape(12)}; {shape(14)}; {shape(30)}"
    assert shapes(12, 14, 30, 31, 32) == f"{shape(12)}; {shape(14)}; {shape(30)}; and 2 more"


def test_a_shape_that_comes_back_is_named_once() -> None:
    """One batch shape that is compiled for again and again, as by a number baked into the program, is one shape."""
    backend = Compiler()
    watch = CompilationWatch(backend)  # type: ignore[arg-type]
    for step in range(1, 41):
        backend.compile()
        watch.after_step(step, batch(4, 16))
    said = watch.warning()
    assert said is not None
    assert said.startswith("30 compilations after the first 10 optimizer steps, the last in step 40, for input_ids [4")
    assert said.count("input_ids") == 1


def test_evaluations_are_not_counted() -> None:
    """An evaluation may compile as much as it likes, at any time: the step after it answers for its own only."""
    backend = Compiler()
    watch = CompilationWatch(backend)  # type: ignore[arg-type]
    for step in range(1, 41):
        if step % 10 == 1:
            backend.compile()
        watch.after_step(step, batch(4, 16))
        backend.compile(7)
        watch.after_evaluation()
    assert watch.warning() is None
    assert watch.total() == Compilations(4 + 40 * 7, 0.0, 3)


def test_the_total_is_the_backends() -> None:
    """All compilations are in the total, early and late ones, with their seconds and those found in the cache."""
    backend = Compiler(2)
    watch = CompilationWatch(backend)  # type: ignore[arg-type]
    assert watch.total() == Compilations(2, 0.0, 3)
    backend.compile(5, seconds=1.5)
    watch.after_step(1, batch(1, 1))
    assert watch.total() == Compilations(7, 1.5, 3)


def test_a_backend_that_compiles_nothing() -> None:
    """On CPUs and GPUs there is nothing to count and nothing to say."""
    watch = CompilationWatch(Compiler(None))  # type: ignore[arg-type]
    for step in range(1, 41):
        watch.after_step(step, batch(4, step))
        watch.after_evaluation()
    assert watch.warning() is None
    assert watch.total() is None
