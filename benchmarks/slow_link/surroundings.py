"""When, where and with what something was measured, in one line."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version

from runner.backends.machine import describe_machine
from runner.track.card import git_commit

_LIBRARIES = ("torch", "transformers", "accelerate")


def surroundings() -> str:
    now = datetime.datetime.now(datetime.timezone.utc)
    libraries = (f"{name} {version(name)}" for name in _LIBRARIES)
    machine = describe_machine("cpu", len(os.sched_getaffinity(0)))
    load = f"load {os.getloadavg()[0]:.1f} before"
    return ", ".join(
        (f"{now:%Y-%m-%d}", f"commit {(git_commit() or 'unknown')[:12]}", machine, platform.release(), *libraries, load)
    )
