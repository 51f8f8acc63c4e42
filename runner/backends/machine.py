"""The machine of a process: its devices, its cores, its name and its libraries."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from runner.backends import xla_installed

#: From this share of the time that threads wait for a core, something else uses the machine.
BUSY = 0.2

_LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


@dataclass(frozen=True)
class LocalDevices:
    """The accelerators of this machine. `tpu_workers`: one for each process that its TPU can serve."""

    gpus: int = 0
    xla_installed: bool = False
    tpu_workers: int = 0


def local_devices(look_for_tpu: bool) -> LocalDevices:
    """Count this machine's accelerators. Looking for a TPU can import torch_xla, which takes seconds."""
    if not (look_for_tpu and xla_installed()):
        return LocalDevices(torch.cuda.device_count(), xla_installed())
    from runner.backends.xla import tpu_workers  # torch_xla is optional

    return LocalDevices(torch.cuda.device_count(), True, tpu_workers())


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them: numbers, or those it is set to."""
    count, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA ignores a name that it does not know, and all that follow.
    return [str(number) for number in range(count)] if given is None else given.split(",")[:count]


def available_cores() -> int:
    """The cores that this process may use; in a container they can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_worker(local_workers: int, given: int | None = None) -> int:
    """CPU threads of each of this machine's workers: as many as are `given`, or its share of the cores."""
    return given or max(1, available_cores() // local_workers)


class CoreWaits:
    """The time that this process's threads wait for a core, from now on."""

    def __init__(self) -> None:
        self._start = _core_seconds()

    def share(self) -> float | None:
        """The share of the time in which threads could have run in which they had no core; None if it is unknown.

        Another process had the core or, in a virtual machine, another guest of its host (time that is "stolen").
        """
        if self._start is None or (now := _core_seconds()) is None:
            return None
        ran, waited, busy, stolen = (after - before for before, after in zip(self._start, now, strict=True))
        if ran <= 0:
            return None
        return 1 - ran / (ran + max(waited, 0)) * (1 - stolen / busy if busy > 0 else 1)


def _core_seconds() -> tuple[float, float, float, float] | None:
    """Nanoseconds in which this process's threads ran and were ready to, and ticks in which the machine's cores were
    busy and, of these, stolen. None except on Linux."""
    threads = [_numbers(path) for path in Path("/proc/self/task").glob("*/schedstat")]
    machine = _numbers(Path("/proc/stat"))[:8]
    if not any(threads) or len(machine) < 8:
        return None
    user, nice, system, _, _, _, _, stolen = machine
    ran, waited, _ = (sum(numbers) for numbers in zip(*filter(None, threads), strict=True))
    return ran, waited, user + nice + system + stolen, stolen


def _numbers(path: Path) -> list[int]:
    """The numbers in the first line of a file of /proc; empty if there is none, as for a thread that has ended."""
    try:
        with path.open() as file:
            return [int(word) for word in file.readline().split() if word.isdigit()]
    except OSError:
        return []


def describe_machine(device_type: str, cores: int) -> str:
    """`2 cores of Intel(R) Xeon(R) Gold 6248`, or this machine's GPUs by name."""
    if device_type == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return f"{cores} cores of {_processor()}"


def _processor() -> str:
    # On Linux platform.processor() is empty or only the architecture.
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


@functools.cache
def processor(device_type: str) -> str:
    """The name of what computes, and a CPU's instruction set, which decide about the last bits of results."""
    if device_type == "cuda":
        names = (torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return ", ".join(dict.fromkeys(names))
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


@functools.cache
def library_versions(device_type: str) -> Mapping[str, str]:
    """Versions of the libraries that influence results, by name; with CUDA's or torch_xla's for those devices."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    if device_type == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
    if device_type == "xla":
        versions["torch_xla"] = importlib.metadata.version("torch_xla")
    return {"python": platform.python_version(), **versions}
