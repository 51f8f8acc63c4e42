"""The name of the hardware of a run."""

from __future__ import annotations

import sys
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


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (3, 2), (16, 1)])
def test_cores_are_shared_by_the_workers(workers: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: 8)
    assert machine.threads_per_worker(workers) == threads
    assert machine.threads_per_worker(workers, 5) == 5


def test_cores_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container or a job can use fewer cores than the machine has."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 5, 6}, raising=False)
    assert machine.available_cores() == 3


def test_looking_for_a_tpu_imports_nothing_where_another_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla takes seconds to import."""
    monkeypatch.setattr(machine, "xla_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "torch_xla", None)  # an import fails
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for look_for_tpu in (False, True):
        assert machine.local_devices(look_for_tpu) == machine.LocalDevices(2, True, 0)
