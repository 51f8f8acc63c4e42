"""Which compilations are worth a warning."""

from __future__ import annotations

import pytest
import torch

from runner.backends import Compilations
from runner.train.compilation import CompilationWatch


class Compiler:
    """A device with a number of compiled programs; None: it compiles nothing during training."""

    def __init__(self, programs: int | None = 0) -> None:
        self.programs = programs

    def compilations(self) -> Compilations | None:
        return None if self.programs is None else Compilations(self.programs, 1.5, 3)

    def compile(self, programs: int = 1) -> None:
        assert self.programs is not None
        self.programs += programs


def shapes(tokens: int) -> dict[str, torch.Size]:
    return {"input_ids": torch.Size([4, tokens]), "labels": torch.Size([4])}


def warning(compiled: dict[int, int], same_shape: bool = False) -> str | None:
    """The warning after 40 steps; `compiled`: programs by step. Step n has n tokens unless all have the same shape."""
    backend = Compiler(1000)  # from before the watch, which must not count
    watch = CompilationWatch(backend.compilations)
    for step in range(1, 41):
        backend.compile(compiled.get(step, 0))
        watch.after_step(step, shapes(16 if same_shape else step))
        backend.compile(7)
        watch.after_evaluation()
    assert watch.total() == Compilations(1000 + sum(compiled.values()) + 40 * 7, 1.5, 3)
    return watch.warning()


@pytest.mark.parametrize(
    "compiled", [{}, dict.fromkeys(range(1, 11), 9), {1: 3, 11: 5}, dict.fromkeys((11, 12, 40), 1)]
)
def test_early_and_few_compilations_are_tolerated(compiled: dict[int, int]) -> None:
    """All of the first 10 steps, five later ones, and those of evaluations."""
    assert warning(compiled) is None


@pytest.mark.parametrize(("compiled", "count", "last"), [({11: 6}, 6, 11), ({1: 100, 10: 7, 12: 4, 35: 2}, 6, 35)])
def test_more_are_reported(compiled: dict[int, int], count: int, last: int) -> None:
    said = warning(compiled)
    assert said is not None
    assert said.startswith(f"{count} compilations after the first 10 optimizer steps, the last in step {last}")
    assert "device.length_buckets" in said


def test_up_to_three_shapes_are_named() -> None:
    said = warning(dict.fromkeys((12, 14, 30, 31, 32), 2))
    assert said is not None
    for step in (12, 14, 30):
        assert f"input_ids [4, {step}], labels [4]" in said
    assert "[4, 31]" not in said
    assert "and 2 more" in said
    same = warning(dict.fromkeys(range(1, 41), 1), same_shape=True)
    assert same is not None
    assert same.count("input_ids") == 1


def test_a_backend_that_compiles_nothing() -> None:
    watch = CompilationWatch(Compiler(None).compilations)
    for step in range(1, 41):
        watch.after_step(step, shapes(step))
    assert watch.warning() is None
    assert watch.total() is None
