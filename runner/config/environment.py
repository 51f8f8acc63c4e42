"""What torchrun or Slurm says about this process in its environment."""

from __future__ import annotations

import os


def is_external() -> bool:
    """Whether this process was started as one rank of several, by torchrun or the like."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def external_world_size() -> int | None:
    """The number of processes that were started together; None for a command by itself."""
    return int(os.environ["WORLD_SIZE"]) if is_external() else None
