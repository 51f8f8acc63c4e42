"""Taking a TPU's chips, on a host that is pretended to have some: what is asked of torch_xla, and in which order.

Nothing here shows that a TPU would do what it is asked. The lines would otherwise not run at all before one is there.
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
    """The link between the hosts of sixteen workers, eight on each; this is the fourth of the second host."""

    rank, world_size, local_rank = 11, 16, 3


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A host with eight chips; what it is asked, in order."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop("PJRT_DEVICE", None)
    monkeypatch.setattr(xla, "_pci_vendors", lambda: {"0x8086", "0x1ae0"})
    monkeypatch.setattr(tpu, "num_available_chips", lambda: 8)
    monkeypatch.setattr(tpu, "num_tpu_workers", lambda: 2)  # hosts
    monkeypatch.setattr(tpu, "num_logical_cores_per_chip", lambda: 1)
    monkeypatch.setattr(runtime, "initialize_cache", lambda path: calls.append(("cache", path)))
    monkeypatch.setattr(pjrt, "initialize_multiprocess", lambda rank, count: calls.append(("chips", rank, count)))
    monkeypatch.setattr(pjrt, "initialize_singleprocess", lambda: calls.append(("one chip",)))
    monkeypatch.setattr(runtime, "world_size", lambda: 16)
    monkeypatch.setattr(torch_xla, "device", lambda: calls.append(("device",)) or torch.device("xla", 0))
    return calls


def test_workers_of_a_host(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as chips; none where PCI shows no device of Google's, no chip among them, or another device is wanted."""
    assert xla.tpu_workers() == 8
    with monkeypatch.context() as patch:
        patch.setitem(os.environ, "PJRT_DEVICE", "CPU")
        assert xla.tpu_workers() == 0
    with monkeypatch.context() as patch:
        patch.setattr(tpu, "num_available_chips", lambda: 0)
        assert xla.tpu_workers() == 0
    monkeypatch.setattr(xla, "_pci_vendors", lambda: {"0x8086"})
    assert xla.tpu_workers() == 0


def test_a_worker_takes_its_chip(asked: list[Any], tmp_path: Path) -> None:
    """The cache before anything is computed, then the chips, by the numbers of this host, then the device."""
    backend = xla.connect(_Host(), 8, tmp_path / "xla", 1)  # type: ignore[arg-type]
    assert asked == [("cache", str(tmp_path / "xla" / "3")), ("chips", 3, 8), ("device",)]
    assert os.environ["PJRT_DEVICE"] == "TPU"
    assert (backend.rank, backend.world_size, backend.local_rank) == (11, 16, 3)
    assert backend._all_reduce is not xla.host_all_reduce


def test_one_worker_takes_one_chip(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline of a comparison: one worker, whatever the host has."""
    monkeypatch.setattr(_Host, "world_size", 1)
    monkeypatch.setattr(_Host, "local_rank", 0)
    xla.connect(_Host(), 1, tmp_path, 1)  # type: ignore[arg-type]
    assert asked == [("cache", str(tmp_path / "0")), ("one chip",), ("device",)]


def test_a_slice_that_was_not_started_on_all_hosts(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with both numbers and the mend, before chips are taken that would wait for the other host's."""
    monkeypatch.setattr(_Host, "world_size", 8)
    with pytest.raises(
        UserError, match="sees 16 TPU devices, and 8 workers were started: start torchrun on every host"
    ):
        xla.connect(_Host(), 8, tmp_path, 1)  # type: ignore[arg-type]
    assert ("chips", 3, 8) not in asked
