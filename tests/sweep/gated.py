"""A recipe that a test can hold in mid-training, and that tells which processes worked for it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from recipes.synthetic.linear import LinearLayer
from runner.data.recipe import Batch, Prepared

#: What chooses it, with one optimizer step to an epoch, and so an evaluation after every step.
GATED = [
    "recipe=linear",
    "recipe._target_=tests.sweep.gated.GatedLayer",
    "trusted_packages=[tests]",
    "batch.micro_batch=8",
    "device=cpu",
]
_PATIENCE_S = 240.0


def hold(root: Path, step: int, job: int = 0) -> None:
    """Let a run in `root` wait before this optimizer step, counted from 1. `job`: how many runs began before it."""
    (root / f"hold-{job}-{step}").touch()


def release(root: Path, step: int, job: int = 0) -> None:
    """Let it go on."""
    (root / f"hold-{job}-{step}").unlink()


def begun(root: Path) -> list[str]:
    """Of every run that has begun in `root` the process that its worker was forked from."""
    path = root / "forked_by.txt"
    return path.read_text().split() if path.exists() else []


@dataclass(frozen=True)
class GatedLayer(LinearLayer):
    """Before a step that is held it leaves `at-<job>-<step>` in the current folder, and waits there.

    Where there is a file `meet`, the first step waits for another job to get as far; where there is a file `fail`, it
    takes that away and fails.
    """

    def _write(self, folder: Path) -> None:
        _tell("tokenised", os.getpid())
        super()._write(folder)

    def build_model(self, prepared: Prepared) -> nn.Module:
        object.__setattr__(self, "_job", len(begun(Path.cwd())))
        object.__setattr__(self, "_step", 0)
        _tell("forked_by", os.getppid())
        return super().build_model(prepared)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        object.__setattr__(self, "_step", self.__dict__["_step"] + 1)
        step = self.__dict__["_step"]
        if step == 1 and Path("meet").exists():
            Path(f"here-{os.getpid()}").touch()
            wait_until(lambda: len(list(Path.cwd().glob("here-*"))) > 1, "no other job comes")
        if step == 1 and Path("fail").exists():
            Path("fail").unlink()
            raise RuntimeError("broken on purpose")
        gate = Path(f"hold-{self.__dict__['_job']}-{step}")
        if gate.exists():
            Path(gate.name.replace("hold", "at")).touch()
            wait_until(lambda: not gate.exists(), f"{gate} is never taken away")
        return super().loss(model, batch)


def _tell(what: str, pid: int) -> None:
    with Path(f"{what}.txt").open("a") as file:
        file.write(f"{pid}\n")


def wait_until(condition: Any, otherwise: str, seconds: float = _PATIENCE_S) -> None:
    """Look again and again until `condition()` is true. Raises AssertionError, saying `otherwise`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
