"""A recipe that a test can pause during training, and that records which processes it ran in."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from recipes.synthetic.linear import LinearLayer
from runner.data.cache import Cache
from runner.data.recipe import Batch, DataFacts, Prepared

#: Overrides that select it, with one optimizer step per epoch, so that every step is followed by an evaluation.
GATED = [
    "recipe=linear",
    "recipe._target_=tests.tools.sweep.gated.GatedLayer",
    "trusted_packages=[tests]",
    "batch.micro_batch=8",
    "device=cpu",
]
_TIMEOUT_S = 600.0


def hold(root: Path, step: int, job: int = 0) -> None:
    """Make a run in `root` wait before this optimizer step, counted from 1. `job`: how many runs started before."""
    (root / f"hold-{job}-{step}").touch()


def release(root: Path, step: int, job: int = 0) -> None:
    """Let it continue."""
    (root / f"hold-{job}-{step}").unlink()


def begun(root: Path) -> list[str]:
    """For every run started in `root`, the process that its worker was forked from."""
    path = root / "forked_by.txt"
    return path.read_text().split() if path.exists() else []


@dataclass(frozen=True)
class GatedLayer(LinearLayer):
    """Before a held step it creates `at-<job>-<step>` in the current folder and waits.

    With a file `meet`, the first step waits for another job to get as far; with a file `fail`, it removes the file and
    fails.
    """

    def _write(self, folder: Path) -> None:
        _record("tokenised", os.getpid())
        super()._write(folder)

    def build_model(self, prepared: Prepared) -> nn.Module:
        object.__setattr__(self, "_job", len(begun(Path.cwd())))
        object.__setattr__(self, "_step", 0)
        _record("forked_by", os.getppid())
        return super().build_model(prepared)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        object.__setattr__(self, "_step", self.__dict__["_step"] + 1)
        step = self.__dict__["_step"]
        if step == 1 and Path("meet").exists():
            Path(f"here-{os.getpid()}").touch()
            wait_until(lambda: len(list(Path.cwd().glob("here-*"))) > 1, "no other job arrives")
        if step == 1 and Path("fail").exists():
            Path("fail").unlink()
            raise RuntimeError("broken on purpose")
        gate = Path(f"hold-{self.__dict__['_job']}-{step}")
        if gate.exists():
            Path(gate.name.replace("hold", "at")).touch()
            wait_until(lambda: not gate.exists(), f"{gate} is never removed")
        return super().loss(model, batch)


def _record(what: str, pid: int) -> None:
    with Path(f"{what}.txt").open("a") as file:
        file.write(f"{pid}\n")


def wait_until(condition: Any, otherwise: str, seconds: float = _TIMEOUT_S) -> None:
    """Poll until `condition()` is true. Raises AssertionError with the message `otherwise`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@dataclass(frozen=True)
class OtherRows(GatedLayer):
    """The same layer on other data."""

    def facts(self, cache: Cache) -> DataFacts:
        return replace(super().facts(cache), digest="other")
