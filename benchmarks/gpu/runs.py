"""Runs of the runner in processes of their own, and what their folders say."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.golden_runs import fingerprint
from runner.folder.record import RunRecord

ROOT = Path(__file__).parents[2]
_LAST_LINES = 6


class Failed(Exception):
    """A check did not see what it should have seen; the message says what it saw."""


class NotReached(Exception):
    """The time was over, or the machine lacks what the check needs; the message says which."""


@dataclass(frozen=True)
class Run:
    """A finished run's folder."""

    folder: Path

    @property
    def record(self) -> RunRecord:
        found = RunRecord.read(self.folder)
        if found is None:
            raise Failed(f"{self.folder.name} has no summary.json")
        return found

    @property
    def plan(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "plan.json").read_text(encoding="utf-8")))

    @property
    def losses(self) -> list[float]:
        """The loss of each logged step."""
        return [float.fromhex(value) for _, value in fingerprint(self.folder)["losses"]]

    @property
    def weights(self) -> str:
        """Return a digest of the final weights."""
        return str(fingerprint(self.folder)["weights"])


class Bench:
    """Where checks run, on which device, and until when.

    `device`: `cuda`, or `cpu` to try the checks themselves. `deadline`: by `time.monotonic`.
    """

    def __init__(self, work: Path, device: str, deadline: float) -> None:
        self.work, self.device, self._deadline = work, device, deadline
        self._numbers = itertools.count()
        self._runs: dict[tuple[str, ...], Run] = {}

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def runner_device(self) -> str:
        return "device=gpu" if self.on_gpu else "device=cpu"

    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def cola(self) -> list[str]:
        """Return settings that train the encoder in `bert/`, with random weights, on generated sentences."""
        data = [f"recipe.data.{part}={self.work / file}.tsv" for part, file in (("train", "train"), ("eval", "dev"))]
        return ["recipe=cola", *data, f"recipe.model.name={self.work / 'bert'}"]

    def train(self, *overrides: str, launcher: Sequence[str] = ()) -> Run:
        """Train on the device unless `overrides` name another. The same run serves several checks.

        Raises Failed, NotReached.
        """
        key = (*launcher, *overrides)
        if key not in self._runs:
            self._runs[key] = self._train(overrides, launcher)
        return self._runs[key]

    def train_again(self, *overrides: str) -> Run:
        """Train, also if there is such a run. Raises Failed, NotReached."""
        return self._train(overrides, ())

    def _train(self, overrides: Sequence[str], launcher: Sequence[str]) -> Run:
        folder = self.new_folder()
        device = [] if any(one.startswith("device=") for one in overrides) else [self.runner_device]
        self.command(["-m", *launcher, "runner", *device, *overrides, "tracking=none", f"hydra.run.dir={folder}"])
        return Run(folder)

    def new_folder(self) -> Path:
        return self.work / f"run-{next(self._numbers)}"

    def command(self, arguments: Sequence[str], stop_when: Path | None = None) -> str:
        """Run Python with `arguments`; what it printed. It is asked to end as soon as `stop_when` matches a file.

        Raises Failed with the end of its output if it fails, NotReached when the time is over.
        """
        log = self.work / "command.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        asked = False
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.work,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    if self.left_s() <= 0:
                        raise NotReached("the time was over")
                    if stop_when is not None and not asked and any(stop_when.parent.glob(stop_when.name)):
                        process.send_signal(signal.SIGTERM)
                        asked = True
                    time.sleep(0.1)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        printed = log.read_text(encoding="utf-8", errors="replace")
        if process.returncode and not asked:
            raise Failed(f"exit code {process.returncode}: " + " / ".join(printed.splitlines()[-_LAST_LINES:]))
        return printed
