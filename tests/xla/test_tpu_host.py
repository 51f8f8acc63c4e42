"""Acquiring a TPU's chips, on a host that is mocked to have some: which calls torch_xla gets, and in which order.

This does not show that a TPU works. It runs lines that otherwise need one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from torch_xla import runtime
from torch_xla._internal import pjrt, tpu

from runner.backends import xla
from runner.errors import UserError


class _Host:
    """One of sixteen workers, eight per host: the fourth of the second host."""

    rank, world_size, local_rank = 11, 16, 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A host with eight chips; the calls that it gets, in order."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop("PJRT_DEVICE", None)
    monkeypatch.setattr(xla, "_pci_vendors", lambda: {"0x8086", "0x1ae0"})
    monkeypatch.setattr(tpu, "num_available_chips", lambda: 8)
    monkeypatch.setattr(tpu, "num_tpu_workers", lambda: 2)  # hosts
    monkeypatch.setattr(tpu, "num_logical_cores_per_chip", lambda: 1)
    monkeypatch.setattr(runtime, "initialize_cache", lambda path: made.append(("cache", path)))
    monkeypatch.setattr(pjrt, "initialize_multiprocess", lambda rank, count: made.append(("chips", rank, count)))
    monkeypatch.setattr(pjrt, "initialize_singleprocess", lambda: made.append(("one chip",)))
    monkeypatch.setattr(runtime, "world_size", lambda: 16)
    monkeypatch.setattr(torch_xla, "device", lambda: made.append(("device",)) or torch.device("xla", 0))
    return made


def test_workers_of_a_host(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as chips; none without a Google device on PCI, without chips, or with another PJRT_DEVICE."""
    assert xla.tpu_workers() == 8
    with monkeypatch.context() as patch:
        patch.setitem(os.environ, "PJRT_DEVICE", "CPU")
        assert xla.tpu_workers() == 0
    with monkeypatch.context() as patch:
        patch.setattr(tpu, "num_available_chips", lambda: 0)
        assert xla.tpu_workers() == 0
    monkeypatch.setattr(xla, "_pci_vendors", lambda: {"0x8086"})
    assert xla.tpu_workers() == 0


def test_a_worker_takes_its_chip(calls: list[Any], tmp_path: Path) -> None:
    """The cache before anything is computed, then the chips by their local numbers, then the device."""
    backend = xla.connect(_Host(), 8, tmp_path / "xla", 1)  # type: ignore[arg-type]
    assert calls == [("cache", str(tmp_path / "xla" / "3")), ("chips", 3, 8), ("device",)]
    assert os.environ["PJRT_DEVICE"] == "TPU"
    assert (backend.rank, backend.world_size, backend.local_rank) == (11, 16, 3)
    assert backend._all_reduce is not xla.host_all_reduce


def test_one_worker_takes_one_chip(calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline of a comparison: one worker, however many chips the host has."""
    monkeypatch.setattr(_Host, "world_size", 1)
    monkeypatch.setattr(_Host, "local_rank", 0)
    xla.connect(_Host(), 1, tmp_path, 1)  # type: ignore[arg-type]
    assert calls == [("cache", str(tmp_path / "0")), ("one chip",), ("device",)]


def test_a_slice_that_was_not_started_on_all_hosts(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with both numbers and the fix, before taking chips would wait for those of the other host."""
    monkeypatch.setattr(_Host, "world_size", 8)
    with pytest.raises(UserError, match=r"16 .*8 workers.*torchrun"):
        xla.connect(_Host(), 8, tmp_path, 1)  # type: ignore[arg-type]
    assert ("chips", 3, 8) not in calls
