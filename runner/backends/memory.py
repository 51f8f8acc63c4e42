"""The memory of workers, and the errors of those that have too little."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from runner.errors import RunFailed, first_line

#: Texts of torch's allocator for CPUs, and of oneDNN, whose errors have no special type.
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "could not create a memory object", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """True if a computation on a CPU or GPU failed because there was too little memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


@contextlib.contextmanager
def enough_for(what: str, instead: str) -> Iterator[None]:
    """Raises RunFailed, with what to use `instead`, if there is too little memory in the block."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RunFailed(f"there is too little memory {what} ({first_line(error)}): use {instead}") from error


def available_memory(device_type: str, local_workers: int) -> int | None:
    """Bytes for each of this machine's workers: of its GPU, or its share of the host's free memory; None if unknown.

    The limits of the control groups that this process is in count, such as a container's.
    """
    if device_type == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    (free,) = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    with contextlib.suppress(OSError):  # no control groups
        free = min([free, *left_of_limits(Path("/proc/self/cgroup").read_text())])
    return free // local_workers


def left_of_limits(groups: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes that are left of the limits of a control group (version 2) and of those above it.

    `groups`: the content of a process's `/proc/PID/cgroup`. Memory that only keeps files' content counts as left.
    """
    paths = [line.removeprefix("0::/") for line in groups.splitlines() if line.startswith("0::/")]
    for folder in (folder for path in paths for folder in (root / path, *(root / path).parents)):
        with contextlib.suppress(OSError, ValueError):  # a group without a limit, which is the word `max`
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            statistics = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            yield limit - used + int(statistics["inactive_file"])
