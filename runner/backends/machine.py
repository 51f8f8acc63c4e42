"""A short name of the hardware: speeds are only compared between runs on equal hardware."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


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
