"""On which device the workers run, for machines described by their devices."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import pytest
import torch

from runner.backends.machine import LocalDevices
from runner.config.choices import DeviceKind, Rehearse
from runner.config.schema import Device
from runner.errors import UserError
from runner.plan.placement import Placement, check_device_serves, place
from tests.configured import configured


@pytest.fixture(autouse=True)
def _no_pjrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


def machine(gpus: int = 0, tpus: int | None = None) -> LocalDevices:
    """`tpus`: workers of the TPU; 0: torch_xla without a TPU; None: neither."""
    return LocalDevices(gpus, tpus is not None, tpus or 0)


@pytest.mark.parametrize(
    ("kind", "workers", "devices", "label", "device_type", "count", "rehearsed"),
    [
        # auto: all GPUs, or one worker on the CPU
        ("auto", None, machine(), "cpu", "cpu", 1, False),
        ("auto", None, machine(4, tpus=4), "gpu4", "cuda", 4, False),
        ("auto", 8, machine(4), "gpu8", "cpu", 8, True),
        # cpu: never a rehearsal
        ("cpu", 8, machine(8), "cpu8", "cpu", 8, False),
        # gpu: real if each worker has its own
        ("gpu", 4, machine(8), "gpu4", "cuda", 4, False),
        ("gpu", 4, machine(3), "gpu4", "cpu", 4, True),
        ("gpu", None, machine(2), "gpu2", "cuda", 2, False),
        ("gpu", None, machine(), "gpu", "cpu", 1, True),
        # tpu: rehearsed on the CPU, with torch_xla on XLA's CPU device
        ("tpu", 8, machine(8), "tpu8", "cpu", 8, True),
        ("tpu", 8, machine(8, tpus=0), "tpu8", "xla", 8, True),
        ("tpu", None, machine(tpus=0), "tpu", "xla", 1, True),
        # a TPU of four: all of it, or one worker
        ("tpu", None, machine(8, tpus=4), "tpu4", "xla", 4, False),
        ("tpu", 1, machine(tpus=4), "tpu", "xla", 1, False),
    ],
)
def test_where_a_setup_runs(
    kind: str, workers: int | None, devices: LocalDevices, label: str, device_type: str, count: int, rehearsed: bool
) -> None:
    """A device that exists is used; a missing one is rehearsed on the CPU with as many workers."""
    placed = place(Device(DeviceKind[kind], workers), None, devices)
    assert (placed.label, placed.device_type, placed.rehearsed) == (label, device_type, rehearsed)
    assert placed.workers == placed.local_workers == count
    never = Device(DeviceKind[kind], workers, Rehearse.never)
    if rehearsed:
        with pytest.raises(UserError, match=rf"device\.kind={placed.kind} .*device=cpu.*device\.rehearse=auto"):
            place(never, None, devices)
    else:
        assert place(never, None, devices) == placed


@pytest.mark.parametrize(
    ("kind", "workers", "devices", "world_size", "local", "label", "device_type"),
    [
        ("auto", None, machine(), 4, 4, "cpu4", "cpu"),
        ("gpu", 4, machine(2), 4, 2, "gpu4", "cuda"),  # two nodes with two GPUs each
        ("gpu", 4, machine(2), 4, 4, "gpu4", "cpu"),  # four processes on one node with two GPUs
        ("gpu", None, machine(8), 2, 2, "gpu2", "cuda"),  # fewer processes than GPUs
        ("tpu", 16, machine(tpus=4), 16, 4, "tpu16", "xla"),
        ("tpu", None, machine(tpus=4), 1, 1, "tpu", "xla"),
        ("tpu", None, machine(tpus=0), 4, 2, "tpu4", "xla"),
    ],
)
def test_workers_that_torchrun_started(
    kind: str, workers: int | None, devices: LocalDevices, world_size: int, local: int, label: str, device_type: str
) -> None:
    """There are as many workers as processes; devices are counted for those of this node."""
    placed = place(Device(DeviceKind[kind], workers), world_size, devices, local)
    assert (placed.label, placed.device_type) == (label, device_type)
    assert (placed.workers, placed.local_workers) == (world_size, local)


@pytest.mark.parametrize(
    ("device", "world_size", "local", "parts"),
    [
        (Device(DeviceKind.cpu, 4), 2, 2, ["device.workers=4", "device.workers=2"]),
        (Device(DeviceKind.tpu, 3), None, None, ["device.workers=3", "device.workers=4"]),
        (Device(DeviceKind.tpu, 8, Rehearse.never), None, None, ["device.workers=8", "device.workers=4"]),
        (Device(DeviceKind.tpu), 16, 8, ["8 processes", "--nproc-per-node=4"]),
    ],
)
def test_workers_that_do_not_fit(device: Device, world_size: int | None, local: int | None, parts: list[str]) -> None:
    """A TPU of four serves four workers or one; the number of processes must be the number of workers."""
    with pytest.raises(UserError) as caught:
        place(device, world_size, machine(tpus=4), local)
    assert all(part in str(caught.value) for part in parts)


def test_why_a_tpu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(DeviceKind.tpu, 8, Rehearse.never)
    with pytest.raises(UserError, match="torch_xla is not installed"):
        place(device, None, machine())
    with pytest.raises(UserError, match="no TPU"):
        place(device, None, machine(tpus=0))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(UserError, match="PJRT_DEVICE=CPU"):
        place(device, None, machine(tpus=0))


@pytest.mark.parametrize(
    ("kind", "devices", "parts"),
    [
        ("cpu", machine(8, tpus=4), None),
        ("gpu", machine(4), None),
        ("gpu", machine(1, tpus=4), ["Rehearsal:", "gpu4", "this machine's CPU"]),
        ("tpu", machine(8), ["Rehearsal:", "tpu4", "without torch_xla"]),
        ("tpu", machine(tpus=0), ["Rehearsal:", "tpu4", "XLA's CPU device"]),
        ("tpu", machine(tpus=4), ["tpu4: 4 TPU worker(s)"]),
    ],
)
def test_banner(kind: str, devices: LocalDevices, parts: list[str] | None) -> None:
    """A rehearsal and a TPU are announced."""
    banner = place(Device(DeviceKind[kind], 4), None, devices).banner()
    assert banner is None if parts is None else all(part in (banner or "") for part in parts)


CPU, CUDA = Placement("cpu2", "cpu", "cpu", 2, 2, False), Placement("gpu", "gpu", "cuda", 1, 1, False)
NO_GPU = Placement("gpu4", "gpu", "cpu", 4, 4, True)
TPU, NO_TPU = Placement("tpu4", "tpu", "xla", 4, 4, False), Placement("tpu4", "tpu", "cpu", 4, 4, True)


@pytest.mark.parametrize(
    ("overrides", "served", "refused"),
    [
        ("precision=tf32", [CUDA], [CPU, NO_GPU, TPU, NO_TPU]),
        ("precision=fp16", [CPU, CUDA, NO_GPU], [TPU, NO_TPU]),
        ("precision=fp64", [CPU, CUDA, NO_TPU], [TPU]),
        ("precision=bf16", [CPU, CUDA, TPU, NO_TPU], []),
        ("gradient_checkpointing=true", [CPU, CUDA, NO_GPU], [TPU, NO_TPU]),
        ("compile=true", [CPU, CUDA, NO_GPU], [TPU, NO_TPU]),
        ("equivalence=identical", [CPU, CUDA, NO_GPU, NO_TPU], [TPU]),
    ],
)
def test_settings_that_a_device_does_not_support(
    overrides: str, served: list[Placement], refused: list[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a TPU does not support is refused in its rehearsals too, but for fp64 and identical bits."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/usr/bin/g++")
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    config = configured(overrides)
    for placement in served:
        check_device_serves(config, placement)
    for placement in refused:
        with pytest.raises(UserError, match=f"^{overrides} "):
            check_device_serves(config, placement)


def test_tf32_needs_a_newer_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(UserError, match=r"^precision=tf32 .*8\.0"):
        check_device_serves(configured("precision=tf32"), CUDA)


@pytest.mark.parametrize(("placement", "missing"), [(CPU, "g\\+\\+"), (NO_GPU, "g\\+\\+"), (CUDA, "triton")])
def test_compiling_needs_a_compiler(placement: Placement, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    monkeypatch.setattr(shutil, "which", lambda *_, **__: nothing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: nothing)
    with pytest.raises(UserError, match=f"^compile=true .*{missing}"):
        check_device_serves(configured("compile=true"), placement)
