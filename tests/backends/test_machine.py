"""What a run was executed on, in a few words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from runner.backends import machine
from runner.backends.machine import describe_machine

#: As Linux has it on Intel: twice, once for each core, with blanks that say nothing.
CPUINFO = "processor\t: 0\nmodel name\t: Intel(R)  Xeon(R)   CPU @ 2.20GHz\nflags : a\nmodel name\t: another\n"


class Files:
    """`Path`, where the only file there can be is the one given."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def __call__(self, path: str) -> Files:
        assert path == "/proc/cpuinfo"
        return self

    def exists(self) -> bool:
        return self._text is not None

    def read_text(self) -> str:
        assert self._text is not None
        return self._text


@pytest.mark.parametrize(
    ("text", "processor", "said"),
    [
        (CPUINFO, "x86_64", "2 cores of Intel(R) Xeon(R) CPU @ 2.20GHz"),
        ("processor\t: 0\nCPU part\t: 0xd40\n", "", "2 cores of aarch64"),  # Arm names no model
        (None, "Apple M9", "2 cores of Apple M9"),
        (None, "", "2 cores of aarch64"),
    ],
)
def test_a_processor_by_its_name(text: str | None, processor: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux's own name of the model in one line, or else what Python knows, and the cores that a run may use."""
    monkeypatch.setattr(machine, "Path", Files(text))
    monkeypatch.setattr(machine.platform, "processor", lambda: processor)
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert describe_machine("cpu", 2) == said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["NVIDIA H200"], "1 × NVIDIA H200"),
        (["A100"] * 4, "4 × A100"),
        (["A100", "T4", "A100"], "2 × A100, 1 × T4"),
    ],
)
def test_gpus_are_counted_by_name(names: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs of the machine, equal ones once: its cores do not matter."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    assert describe_machine("cuda", 64) == said


def test_this_machine_has_a_name() -> None:
    """Whatever this is: one line that begins with the cores, the same each time."""
    said = describe_machine("cpu", 3)
    assert said == describe_machine("cpu", 3)
    assert said.startswith("3 cores of ")
    assert len(said.splitlines()) == 1
    assert Path("/proc/cpuinfo").exists() is False or len(said) > len("3 cores of ")


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (3, 2), (16, 1)])
def test_cores_are_shared_by_the_workers(workers: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: 8)
    assert machine.threads_per_worker(workers) == threads


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
