"""Signals in the first seconds of a run: it ends at once and completely, whatever it was doing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time

from benchmarks.faults.processes import Processes, send, wait_until
from benchmarks.faults.records import Trial
from benchmarks.faults.runs import VARIANTS, Place, phase
from runner.launch.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED

#: Seconds: before the first moment, in which Python itself starts, and of the moments; until the command must have
#: ended, which takes up to 3 on an idle machine (2 of them for a tracking store that does not answer) and twice that on
#: one that runs three tests at once; and then its other processes.
_START_S, _MOMENTS_S, _END_S, _LEFT_S = 0.1, 6.0, 10.0, 2.0
_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_PREEMPTED, signal.SIGUSR1: EXIT_PREEMPTED}


def signals(number: int, seed: int, place: Place) -> Trial:
    """Send a signal at a random moment: to the parent or any other process, SIGINT to all as a terminal does."""
    draw = random.Random(f"{seed}/signals/{number}")
    kind, moment, to_parent = draw.choice(list(_CODES)), _START_S + draw.random() * _MOMENTS_S, draw.random() < 0.7
    folder = place.work / "signals" / f"{seed}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    with Processes(folder.with_suffix(".log"), place.environment) as processes:
        endless = [*VARIANTS["k=1, 2 workers"].start(2, folder, place.uri), "epochs=1000"]
        command, started = processes.start(endless), time.monotonic()
        wait_until(lambda: command.poll() is not None, moment)
        now, roles = phase(folder), processes.by_role(command)
        role = (
            "all" if kind is signal.SIGINT else "parent" if to_parent else draw.choice(sorted(filter(roles.get, roles)))
        )
        if role == "all":
            os.killpg(command.pid, kind)
        else:
            send(draw.choice(roles[role]), kind)
        in_time = wait_until(lambda: command.poll() is not None, _END_S)
        seconds = time.monotonic() - started - moment
        problems = [] if in_time else [f"not ended after {_END_S:g} s"]
        if in_time and command.returncode != _CODES[kind]:
            problems.append(f"exit code {command.returncode}")
        problems += processes.left(_LEFT_S)
    if "Traceback" in folder.with_suffix(".log").read_text(errors="replace"):
        problems.append("a traceback")
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink()
    fault = {"target": role, "phase": now}
    return Trial(
        "signals", kind.name, f"{seed}-{number}", [fault], problems, details={"moment_s": moment, "end_s": seconds}
    )
