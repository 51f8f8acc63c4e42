"""The world that torchrun or Slurm states in this process's environment."""

from __future__ import annotations

import os


def is_external() -> bool:
    """True if this process was started as one rank of several, by torchrun or the like."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def external_world_size() -> int | None:
    """The number of processes that were started together; None for a single command."""
    return int(os.environ["WORLD_SIZE"]) if is_external() else None


def external_local_world_size() -> int | None:
    """The number of these processes on this host, if it is stated."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_external() and "LOCAL_WORLD_SIZE" in os.environ else None
