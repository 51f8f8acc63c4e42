"""A CPU that wants what a compiling device wants, and training on it in test workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from runner.backends import Backend, Compilations, TorchBackend
from runner.data.loader import FILLER
from runner.data.recipe import Batch
from runner.kernels.unpadded import PLACES
from runner.train.finish import gather_warnings
from tests import replicas
from tests.resumed import train_in_parts


class Compiling(TorchBackend):
    """Runs as a plain CPU worker, and is treated as a device that compiles a program for every shape.

    So it gets fixed rows, length buckets and an unfused optimizer, and like the XLA backend it has no data-parallel
    wrapper and takes one batch ahead. `host`: the worker whose world it joins. Every new shape is a compilation.
    """

    compiles = True

    def __init__(self, host: TorchBackend) -> None:
        vars(self).update(vars(host))
        self._known: set[tuple[int, ...]] = set()

    def feed(self, batches: Iterable[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        ahead: list[tuple[np.ndarray, Batch]] = []
        for ids, batch in super().feed(batches):
            ahead.append((ids, batch))
            if len(ahead) > 1:
                yield self._compiled(*ahead.pop(0))
        for ids, batch in ahead:
            yield self._compiled(ids, batch)

    def _compiled(self, ids: np.ndarray, batch: Batch) -> tuple[np.ndarray, Batch]:
        self._known.add(tuple(batch["input_ids"].shape))
        return ids, batch

    def compilations(self) -> Compilations | None:
        return Compilations(len(self._known), float(len(self._known)), 0)


#: Numbers of a micro-batch's rows, and the shape of its inputs.
Shape = tuple[list[int], tuple[int, ...]]


class Shapes:
    """Notes every micro-batch that a backend feeds, for training and for evaluations."""

    def __init__(self, backend: Backend) -> None:
        self.trained: list[Shape] = []
        self.evaluated: list[Shape] = []
        self._feed = backend.feed
        backend.feed = self._noting  # type: ignore[method-assign]

    def _noting(self, batches: Iterable[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        for ids, batch in self._feed(batches):
            assert {len(tensor) for name, tensor in batch.items() if name != PLACES} == {len(ids)}
            assert bool((batch["labels"].reshape(len(ids), -1)[torch.from_numpy(ids == FILLER)] == -100).all())
            seen = self.trained if torch.is_grad_enabled() else self.evaluated
            seen.append((ids.tolist(), tuple(batch["input_ids"].shape)))
            yield ids, batch


def train(backend: TorchBackend, overrides: list[str], compiles: bool) -> dict[str, Any]:
    """Train to the end, on a device that compiles or on the plain CPU; also every micro-batch's rows and shape."""
    device = Compiling(backend) if compiles else backend
    shapes = Shapes(device)
    return {**replicas.train(device, overrides), "trained": shapes.trained, "evaluated": shapes.evaluated}


def train_in_two_parts(backend: TorchBackend, overrides: list[str], stop: int) -> dict[str, Any]:
    """Train, stop after `stop` steps, save, and continue from there, on a device that compiles."""
    result = train_in_parts(Compiling(backend), overrides, [stop])
    assert isinstance(result, dict), result
    return result


def what_is_said_of_shapes(backend: TorchBackend, overrides: list[str], heedless: bool) -> tuple[int, str | None]:
    """The number of programs of a run on a device that compiles, and the warning.

    `heedless`: of the given length; every batch is padded by another number of tokens, up to 20.
    """
    loop = replicas.make_loop(Compiling(backend), overrides)
    if heedless:
        collate, more = loop.replica.recipe.collate, itertools.cycle(range(20))
        object.__setattr__(
            loop.replica.recipe, "collate", lambda rows, prepared, length: collate(rows, prepared, length + next(more))
        )
    loop.train()
    loop.finish()
    compiled = loop.compilations.total()
    assert compiled is not None
    loop.policy.close()
    return compiled.count, loop.compilations.warning()


def warnings_of_all(backend: TorchBackend, said: list[str | None]) -> tuple[str, ...]:
    """What a run's summary is told of compilations, if the workers have this to say."""
    loop = replicas.make_loop(Compiling(backend), [])
    loop.policy.close()
    return gather_warnings(loop.backend, said[backend.rank], None)


def optimizer_is_fused(backend: TorchBackend, overrides: list[str], compiles: bool) -> set[bool]:
    """Whether any group of the optimizer uses torch's fused kernels."""
    loop = replicas.make_loop(Compiling(backend) if compiles else backend, overrides)
    loop.policy.close()
    return {bool(group["fused"]) for group in loop.replica.optimizer.param_groups}
