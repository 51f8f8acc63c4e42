"""The name of the hardware of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner.backends import machine
from runner.backends.machine import describe_machine

#: As Linux writes it on Intel: once per core.
CPUINFO = "processor\t: 0\nmodel name\t: Intel(R)  Xeon(R)   CPU @ 2.20GHz\nflags : a\nmodel name\t: another\n"


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "name"),
    [
        (CPUINFO, "x86_64", "2 cores of Intel(R) Xeon(R) CPU @ 2.20GHz"),
        ("processor\t: 0\nCPU part\t: 0xd40\n", "", "2 cores of aarch64"),  # Arm has no model name
        (None, "Apple M9", "2 cores of Apple M9"),
    ],
)
def test_processors(
    cpuinfo: str | None, processor: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux's name of the model, or else what Python knows."""
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    monkeypatch.setattr(machine, "Path", lambda _: path)
    monkeypatch.setattr(machine.platform, "processor", lambda: processor)
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert describe_machine("cpu", 2) == name


def test_gpus_are_counted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs of the machine; its cores do not matter."""
    names = ["A100", "T4", "A100"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    assert describe_machine("cuda", 64) == "2 × A100, 1 × T4"
