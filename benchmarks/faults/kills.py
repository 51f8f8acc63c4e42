"""Random kills: a worker, the parent, the forkserver or a torchrun agent, until the run has ended nevertheless."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.processes import Processes, send, wait_until
from benchmarks.faults.records import Trial
from benchmarks.faults.runs import (
    VARIANTS,
    Place,
    Variant,
    delivery_problems,
    logged,
    phase,
    problems_of,
    reference,
)
from runner.folder.record import FINISHED, PREEMPTED, RunRecord, status_of
from runner.launch.signals import EXIT_PREEMPTED

#: Targets, of a hundred faults. Kills of workers are cheap, since their parent starts others.
_LOCAL = {"worker": 80, "parent": 8, "forkserver": 6, "preempted": 6}
_TORCHRUN = {"worker": 60, "agent": 30, "preempted": 10}
_FAULTS = (20, 40)
#: Seconds in which a run that was hit must have ended or gone on; in which its other processes must have ended (the
#: forkserver first imports to the end); and that a run takes at most if it is left alone.
_REACTION_S, _LEFT_S, _WHOLE_S = 60.0, 20.0, 300.0


def kills(number: int, seed: int, most: int, place: Place) -> Trial:
    """Run number `number` of the campaign, with at most `most` faults, which `seed` determines up to the speed."""
    draw = random.Random(f"{seed}/{number}")
    variant = draw.choice(list(VARIANTS.values()))
    expected, folder = reference(variant, place), place.work / "kills" / f"{seed}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    with Processes(folder.with_suffix(".log"), place.environment) as processes:
        run = _Run(draw, variant, folder, processes, expected, place.uri, most)
        problems = [*run.problems(), *processes.left(_LEFT_S)]
        if run.ended_by_fault:  # FINISHED in its folder, and perhaps not yet in the store
            processes.start(["-m", "runner.track", "sync", str(folder)]).wait()
    problems += [*problems_of(folder, expected, variant.equal), *delivery_problems(folder, place.uri)]
    if not problems:
        shutil.rmtree(folder)
        folder.with_suffix(".log").unlink()
    return Trial("kills", variant.name, f"{seed}-{number}", run.faults, problems, details={"workers": run.workers})


class _Run:
    """One run with all its commands. `faults`: those that were injected. `workers`: of each command.

    `ended_by_fault`: whether the last command was hit and not able to end by itself.
    """

    def __init__(
        self,
        draw: random.Random,
        variant: Variant,
        folder: Path,
        processes: Processes,
        expected: Path,
        uri: str,
        most: int,
    ) -> None:
        """`expected`: the folder of an uninterrupted run, which says how long a run takes. `most`: faults."""
        self._draw, self._variant, self._folder, self._processes, self._uri = draw, variant, folder, processes, uri
        usual, times = RunRecord.read(expected), [line["timestamp"] / 1000 for line in logged(expected)]
        assert usual is not None
        assert usual.wall_s is not None
        self._train_s, self._whole_s = max(times) - min(times), usual.wall_s
        self._most = min(most, draw.randint(*(2, 4) if variant.torchrun else _FAULTS))
        self._before: set[int] = set()  # the workers of which one was hit
        self.faults: list[dict[str, Any]] = []
        self.workers: list[int] = []
        self.ended_by_fault = False

    def problems(self) -> Iterator[str]:
        """Run to the end, and yield what was not as required on the way."""
        while status_of(self._folder) != FINISHED:
            command, faults = self._processes.start(self._command()), len(self.faults)
            while command.poll() is None:
                if len(self.faults) < self._most:
                    yield from self._inject(command)
                elif not wait_until(lambda: command.poll() is not None, _WHOLE_S):  # noqa: B023 - called at once
                    yield f"not ended after {_WHOLE_S:g} s"
                    return
            self.ended_by_fault = command.returncode != 0
            if command.returncode and len(self.faults) == faults:
                yield f"exit code {command.returncode} without a fault"
                return

    def _command(self) -> list[str]:
        self.workers.append(self._draw.choice(self._variant.workers))
        if (self._folder / "config.yaml").exists():
            return self._variant.command(self.workers[-1], f"resume={self._folder}")
        return self._variant.start(self.workers[-1], self._folder, self._uri)

    def _inject(self, command: subprocess.Popen[bytes]) -> Iterator[str]:
        """Wait for a random moment, signal a process, and wait until the run has ended or continues."""
        kinds = _TORCHRUN if self._variant.torchrun else _LOCAL
        (target,) = self._draw.choices(list(kinds), list(kinds.values()))
        # Of a run, the start and the end take most of the time: most faults come while it trains. A worker of torchrun
        # imports everything itself.
        trains = not self._variant.torchrun and self._draw.random() < 0.9
        seconds = self._draw.random() ** 2 * self._train_s / 10 if trains else self._draw.random() * self._whole_s
        if target == "worker" or trains:
            wait_until(lambda: self._new_workers(command) or command.poll() is not None, _WHOLE_S)
        if wait_until(lambda: command.poll() is not None, seconds):
            return  # it was faster
        roles = self._processes.by_role(command)
        self._before = {worker.pid for worker in roles.get("worker", ())}
        now = phase(self._folder)
        if target == "preempted":
            yield from self._preempt(command, now)
            return
        victims = roles.get(target)
        if not victims:
            return  # not started yet, or just being replaced
        send(self._draw.choice(victims), signal.SIGKILL)
        self.faults.append({"target": target, "phase": now})
        if not wait_until(lambda: command.poll() is not None or self._new_workers(command), _REACTION_S):
            yield f"nothing happened for {_REACTION_S:g} s after a kill of a {target}"
            self._processes.kill()
        elif command.poll() is not None and (target == "agent" or self._draw.random() < 0.5):
            # In the other cases the run is resumed at once. Workers without an agent may train on to the end.
            limit_s = _REACTION_S if target == "agent" else _LEFT_S
            if not wait_until(lambda: not self._processes.all(), limit_s):
                yield f"processes left {limit_s:g} s after a kill of a {target}"
                self._processes.kill()

    def _preempt(self, command: subprocess.Popen[bytes], now: str) -> Iterator[str]:
        """Send SIGTERM or SIGUSR1 to one process, or to all as a batch system may."""
        number = self._draw.choice((signal.SIGTERM, signal.SIGUSR1))
        roles = self._processes.by_role(command)
        names = [role for role in roles if roles[role]]
        if self._variant.torchrun and number == signal.SIGUSR1:
            names.remove("agent")  # it would end torchrun, which knows nothing of this signal
        if not names:
            return
        role = self._draw.choice([*sorted(names), *["all"] * ("agent" not in roles)])
        hit = self._processes.all() if role == "all" else [self._draw.choice(roles[role])]
        for process in hit:
            send(process, number)
        self.faults.append({"target": f"{number.name} to {role}", "phase": now})
        if not wait_until(lambda: command.poll() is not None, _REACTION_S):
            yield f"nothing happened for {_REACTION_S:g} s after {number.name} to {role}"
            self._processes.kill()
            command.wait()
        elif command.returncode not in (0, 1 if self._variant.torchrun else EXIT_PREEMPTED):
            yield f"exit code {command.returncode} after {number.name} to {role}"
        elif status_of(self._folder) not in (None, PREEMPTED, FINISHED):
            yield f"status {status_of(self._folder)} after {number.name} to {role}"

    def _new_workers(self, command: subprocess.Popen[bytes]) -> bool:
        return any(worker.pid not in self._before for worker in self._processes.by_role(command).get("worker", ()))
