"""The name of the hardware of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot restrict a process to a core")
def test_waiting_for_a_core_that_another_program_uses() -> None:
    """Two programs on one core each wait half of the time."""
    cores = os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for process in (0, other.pid):
            os.sched_setaffinity(process, {min(cores)})
        time.sleep(0.1)  # does not count
        waits, ends = machine.CoreWaits(), time.process_time() + 0.2
        while time.process_time() < ends:
            pass
        share = waits.share()
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    assert share is not None
    assert 0.3 < share < 1


def test_time_that_another_guest_of_the_host_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a virtual machine: 20 of 100 busy ticks; threads waited for another 50% of what was left."""
    (tmp_path / "task/1").mkdir(parents=True)
    monkeypatch.setattr(
        machine, "Path", lambda path: tmp_path / path.removeprefix("/proc/self/").removeprefix("/proc/")
    )

    def write(ran: int, waited: int, system: int, stolen: int) -> None:
        (tmp_path / "task/1/schedstat").write_text(f"{ran} {waited} 7\n")
        (tmp_path / "stat").write_text(f"cpu  5 0 {system} 1000 10 0 0 {stolen} 0 0\ncpu0 1 2 3\n")

    write(1000, 500, 50, 5)
    waits = machine.CoreWaits()
    write(2000, 1500, 130, 25)
    assert waits.share() == pytest.approx(1 - 0.5 * 0.8)
    (tmp_path / "stat").unlink()
    assert waits.share() is None


def test_looking_for_a_tpu_imports_nothing_where_another_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla takes seconds to import."""
    monkeypatch.setattr(machine, "xla_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "torch_xla", None)  # an import fails
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for look_for_tpu in (False, True):
        assert machine.local_devices(look_for_tpu) == machine.LocalDevices(2, True, 0)
