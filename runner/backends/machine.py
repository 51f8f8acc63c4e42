"""What a run was executed on, in a few words: speeds are compared between equal machines only."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def describe_machine(device_type: str, cores: int) -> str:
    """The hardware behind a worker: `2 cores of Intel(R) Xeon(R) Gold 6248`, or the machine's GPUs by name."""
    if device_type == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return f"{cores} cores of {_processor()}"


def _processor() -> str:
    # Python's own answer on Linux is empty or only the architecture.
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()
