"""Which device the workers really run on, for machines that are pretended."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runner.config.choices import DeviceKind, PrecisionName, Rehearse
from runner.config.compose import compose, settings
from runner.config.schema import Config, Device, Precision
from runner.errors import UserError
from runner.plan import placement as placement_module
from runner.plan.placement import available_cores, check_device_serves, place, threads_per_worker


@pytest.fixture(autouse=True)
def _no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


def on_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, capability: tuple[int, int] = (9, 0), tpus: int | None = None
) -> None:
    """Pretend a machine. `tpus`: workers of its TPU, 0 for torch_xla without one, None for neither."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(placement_module, "xla_installed", lambda: tpus is not None)
    monkeypatch.setattr(placement_module, "_tpu_workers", lambda: tpus or 0)


@pytest.mark.parametrize(
    ("kind", "workers", "gpus", "label", "device_type", "count", "rehearsed"),
    [
        # auto: all GPUs, or one worker on the CPU
        ("auto", None, 0, "cpu", "cpu", 1, False),
        ("auto", None, 1, "gpu", "cuda", 1, False),
        ("auto", None, 4, "gpu4", "cuda", 4, False),
        ("auto", 2, 0, "cpu2", "cpu", 2, False),
        ("auto", 2, 4, "gpu2", "cuda", 2, False),
        ("auto", 8, 4, "gpu8", "cpu", 8, True),
        # cpu: never a rehearsal, however many
        ("cpu", 1, 8, "cpu", "cpu", 1, False),
        ("cpu", 8, 0, "cpu8", "cpu", 8, False),
        ("cpu", None, 4, "cpu", "cpu", 1, False),
        # gpu: real if all workers have one of their own
        ("gpu", 4, 4, "gpu4", "cuda", 4, False),
        ("gpu", 4, 8, "gpu4", "cuda", 4, False),
        ("gpu", 4, 3, "gpu4", "cpu", 4, True),
        ("gpu", 1, 0, "gpu", "cpu", 1, True),
        ("gpu", None, 2, "gpu2", "cuda", 2, False),
        ("gpu", None, 0, "gpu", "cpu", 1, True),
        # tpu: without torch_xla rehearsed on the CPU; with it, see below
        ("tpu", None, 0, "tpu", "cpu", 1, True),
        ("tpu", 8, 0, "tpu8", "cpu", 8, True),
        ("tpu", 8, 8, "tpu8", "cpu", 8, True),
    ],
)
def test_where_a_device_setup_runs(
    kind: str,
    workers: int | None,
    gpus: int,
    label: str,
    device_type: str,
    count: int,
    rehearsed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that is there is used, one that is not is rehearsed on the CPU with as many workers."""
    on_machine(monkeypatch, gpus)
    placed = place(Device(DeviceKind[kind], workers), None)
    assert (placed.label, placed.device_type, placed.workers, placed.rehearsed) == (
        label,
        device_type,
        count,
        rehearsed,
    )
    assert label.startswith(placed.kind)


@pytest.mark.parametrize(
    ("kind", "workers", "gpus", "words"),
    [
        ("gpu", 4, 3, ("device.kind=gpu with 4 worker", "3 CUDA device")),
        ("gpu", 1, 0, ("device.kind=gpu with 1 worker", "0 CUDA device")),
        ("tpu", 8, 8, ("device.kind=tpu with 8 worker", "torch_xla is not installed", "`tpu`")),
        ("auto", 8, 4, ("device.kind=gpu with 8 worker", "4 CUDA device")),
    ],
)
def test_rehearsal_forbidden(
    kind: str, workers: int, gpus: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under rehearse=never a device that is not there is an error that says what is missing, and both ways out."""
    on_machine(monkeypatch, gpus)
    with pytest.raises(UserError) as caught:
        place(Device(DeviceKind[kind], workers, Rehearse.never), None)
    for word in (*words, "device=cpu", "device.rehearse=auto"):
        assert word in str(caught.value)


@pytest.mark.parametrize(("kind", "workers", "gpus"), [("gpu", 4, 4), ("cpu", 8, 0), ("auto", None, 0)])
def test_rehearsal_forbidden_and_not_needed(
    kind: str, workers: int | None, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under rehearse=never a device that is there runs as ever."""
    on_machine(monkeypatch, gpus)
    assert not place(Device(DeviceKind[kind], workers, Rehearse.never), None).rehearsed


@pytest.mark.parametrize(
    ("kind", "workers", "gpus", "world_size", "local", "label", "device_type"),
    [
        ("auto", None, 0, 4, 4, "cpu4", "cpu"),
        ("auto", None, 2, 4, 2, "gpu4", "cuda"),  # two nodes with two GPUs each
        ("gpu", 4, 2, 4, 2, "gpu4", "cuda"),
        ("gpu", 4, 2, 4, 4, "gpu4", "cpu"),  # four processes on one node with two GPUs
        ("cpu", 3, 0, 3, 3, "cpu3", "cpu"),
        ("gpu", None, 8, 2, 2, "gpu2", "cuda"),  # fewer processes than GPUs
        ("auto", None, 8, 1, 1, "gpu", "cuda"),
    ],
)
def test_in_a_world_that_torchrun_started(
    kind: str,
    workers: int | None,
    gpus: int,
    world_size: int,
    local: int,
    label: str,
    device_type: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The started world says how many workers there are; GPUs are counted against those of this node."""
    on_machine(monkeypatch, gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    placed = place(Device(DeviceKind[kind], workers), world_size)
    assert (placed.label, placed.device_type, placed.workers) == (label, device_type, world_size)


@pytest.mark.parametrize(("workers", "world_size"), [(4, 2), (1, 2), (2, 4)])
def test_world_of_another_size(workers: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setup for another number of workers than were started is refused with both numbers."""
    on_machine(monkeypatch, 0)
    with pytest.raises(UserError) as caught:
        place(Device(DeviceKind.cpu, workers), world_size)
    message = str(caught.value)
    assert message.startswith(f"device.workers={workers} does not match the {world_size} processes")
    assert f"set device.workers={world_size}" in message


@pytest.mark.parametrize(
    ("workers", "local", "threads"), [(1, None, 8), (2, None, 4), (3, None, 2), (8, None, 1), (16, None, 1), (8, 2, 4)]
)
def test_threads(workers: int, local: int | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores are shared by the workers of this machine, and none is left without a thread."""
    monkeypatch.setattr(placement_module, "available_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local or 1))  # which means something in a world of torchrun's only
    placement = place(Device(DeviceKind.cpu, workers), workers if local is not None else None)
    assert threads_per_worker(placement.local_workers) == threads


def test_cores_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container or a job that owns three of the machine's cores has three."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 6}, raising=False)
    assert available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1


# --- TPUs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "tpus", "label", "count", "rehearsed"),
    [
        # no TPU: rehearsed on XLA's CPU device
        (8, 0, "tpu8", 8, True),
        (1, 0, "tpu", 1, True),
        (None, 0, "tpu", 1, True),
        # a TPU of four: all of it, or one
        (4, 4, "tpu4", 4, False),
        (None, 4, "tpu4", 4, False),
        (1, 4, "tpu", 1, False),
        (1, 1, "tpu", 1, False),
        (8, 8, "tpu8", 8, False),
    ],
)
def test_where_a_tpu_setup_runs_with_torch_xla(
    workers: int | None, tpus: int, label: str, count: int, rehearsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch_xla is installed a TPU's workers are XLA's, on the TPU if there is one, whatever GPUs there are."""
    for gpus in (0, 8):
        on_machine(monkeypatch, gpus, tpus=tpus)
        placed = place(Device(DeviceKind.tpu, workers), None)
        assert (placed.label, placed.kind, placed.device_type) == (label, "tpu", "xla")
        assert (placed.workers, placed.local_workers, placed.rehearsed) == (count, count, rehearsed)


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("rehearse", Rehearse)
def test_a_part_of_a_tpu_cannot_be_had(workers: int, rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TPU of four has all its workers or one: any other number is refused, not rehearsed, with what would do."""
    on_machine(monkeypatch, 0, tpus=4)
    with pytest.raises(UserError) as caught:
        place(Device(DeviceKind.tpu, workers, rehearse), None)
    message = str(caught.value)
    assert message.startswith(f"device.workers={workers} does not fit the TPU of this host, which has 4 worker(s): ")
    assert message.endswith("set device.workers=4, or 1")
    assert "\n" not in message


def test_a_tpu_slice_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun the workers of a slice are counted by host: sixteen, four of them on the TPU of this one."""
    on_machine(monkeypatch, 0, tpus=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for workers in (16, None):
        placed = place(Device(DeviceKind.tpu, workers), 16)
        assert (placed.label, placed.device_type, placed.rehearsed) == ("tpu16", "xla", False)
        assert (placed.workers, placed.local_workers) == (16, 4)


@pytest.mark.parametrize("local", [1, 2, 3, 8, 16])
def test_a_slice_with_other_workers_on_a_host(local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that do not fit this host's TPU are refused with both numbers and the command that would do."""
    on_machine(monkeypatch, 0, tpus=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    with pytest.raises(UserError) as caught:
        place(Device(DeviceKind.tpu), 16)
    message = str(caught.value)
    assert message.startswith(f"{local} processes were started on this host, whose TPU has 4 worker(s): ")
    assert message.endswith("start 4 on each host, torchrun --nproc-per-node=4")


def test_one_worker_under_torchrun_has_one_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one is one worker of this host's TPU, as it is without torchrun."""
    on_machine(monkeypatch, 0, tpus=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    placed = place(Device(DeviceKind.tpu), 1)
    assert (placed.label, placed.device_type, placed.workers, placed.rehearsed) == ("tpu", "xla", 1, False)


def test_a_world_without_a_tpu_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun on hosts without a TPU as many workers rehearse as were started."""
    on_machine(monkeypatch, 0, tpus=0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    placed = place(Device(DeviceKind.tpu), 4)
    assert (placed.label, placed.device_type, placed.local_workers, placed.rehearsed) == ("tpu4", "xla", 2, True)


@pytest.mark.parametrize(
    ("tpus", "missing"), [(None, "torch_xla is not installed (the extra `tpu`)"), (0, "this machine has no TPU")]
)
def test_a_tpu_that_may_not_be_rehearsed(tpus: int | None, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under rehearse=never the sentence says which of the two is missing, torch_xla or the TPU."""
    on_machine(monkeypatch, 0, tpus=tpus)
    with pytest.raises(UserError) as caught:
        place(Device(DeviceKind.tpu, 8, Rehearse.never), None)
    assert str(caught.value) == (
        f"device.kind=tpu with 8 worker(s) cannot run here: {missing}; "
        "choose device=cpu, or device.rehearse=auto to rehearse it on the CPU"
    )


def test_a_tpu_that_another_device_was_chosen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PJRT_DEVICE keeps torch_xla from the TPU, that is what is said to be in the way."""
    on_machine(monkeypatch, 0, tpus=0)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(UserError, match=r"cannot run here: PJRT_DEVICE=CPU is set; choose device=cpu, "):
        place(Device(DeviceKind.tpu, 8, Rehearse.never), None)


@pytest.mark.parametrize("workers", [4, 1, None])
def test_a_tpu_that_is_there_need_not_be_rehearsed(workers: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under rehearse=never a TPU that is there runs as ever."""
    on_machine(monkeypatch, 0, tpus=4)
    assert not place(Device(DeviceKind.tpu, workers, Rehearse.never), None).rehearsed


def test_looking_for_a_tpu_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch_xla is installed and PJRT_DEVICE names another device, the answer comes without importing it."""
    monkeypatch.setattr(placement_module, "xla_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "torch_xla", None)  # an import of it fails
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert placement_module._tpu_workers() == 0


def test_only_a_tpu_setup_looks_for_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a TPU may import torch_xla, which takes seconds: no other device asks."""
    on_machine(monkeypatch, 1, tpus=4)
    asked: list[str] = []
    monkeypatch.setattr(placement_module, "_tpu_workers", lambda: asked.append("TPU") or 4)
    for kind in (DeviceKind.cpu, DeviceKind.gpu, DeviceKind.auto):
        assert place(Device(kind, 1), None).device_type in ("cpu", "cuda")
    assert asked == []
    assert place(Device(DeviceKind.tpu, 4), None).device_type == "xla"
    assert asked == ["TPU"]


# --- banners ------------------------------------------------------------------------------------------------

REHEARSAL = "[bold yellow]Rehearsal:[/] {label} is not here, so its {workers} worker(s) run {where}, not its speed."


@pytest.mark.parametrize(
    ("kind", "workers", "gpus", "tpus", "banner"),
    [
        ("cpu", 1, 0, None, None),
        ("cpu", 8, 8, 4, None),
        ("auto", None, 0, 4, None),
        ("gpu", 4, 4, None, None),
        ("auto", None, 2, None, None),
        (
            *("gpu", 4, 1, None),
            REHEARSAL.format(label="gpu4", workers=4, where="on this machine's CPU: the same plan and semantics"),
        ),
        # A GPU is rehearsed on the plain CPU although torch_xla is there.
        (
            *("gpu", 1, 0, 4),
            REHEARSAL.format(label="gpu", workers=1, where="on this machine's CPU: the same plan and semantics"),
        ),
        (
            *("tpu", 8, 8, None),
            REHEARSAL.format(
                label="tpu8",
                workers=8,
                where="on this machine's CPU, without torch_xla, which is not installed: the same plan and semantics",
            ),
        ),
        (
            *("tpu", 8, 0, 0),
            REHEARSAL.format(
                label="tpu8",
                workers=8,
                where="on XLA's CPU device, through torch_xla: the same plan, semantics and programs",
            ),
        ),
        ("tpu", 4, 0, 4, "tpu4: 4 TPU worker(s), through torch_xla."),
        ("tpu", 1, 0, 4, "tpu: 1 TPU worker(s), through torch_xla."),
    ],
)
def test_banner(
    kind: str, workers: int | None, gpus: int, tpus: int | None, banner: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is rehearsed says so, and on what; a TPU that is there says so; a CPU or GPU that is there says nothing."""
    on_machine(monkeypatch, gpus, tpus=tpus)
    assert place(Device(DeviceKind[kind], workers), None).banner() == banner


# --- settings and devices -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def defaults() -> Config:
    return settings(compose([]))


#: Serves a setup of (kind, workers), precision and compile on a machine with these GPUs.
Serve = Callable[..., None]


@pytest.fixture
def serve(defaults: Config, monkeypatch: pytest.MonkeyPatch) -> Serve:
    def serve(
        gpus: int, device: tuple[str, int], precision: str, compiled: bool = False, capability: tuple[int, int] = (9, 0)
    ) -> None:
        on_machine(monkeypatch, gpus, capability)
        config = dataclasses.replace(
            defaults,
            device=Device(DeviceKind[device[0]], device[1]),
            precision=Precision(PrecisionName[precision]),
            compile=compiled,
        )
        check_device_serves(config, place(config.device, None))

    return serve


@pytest.mark.parametrize(
    ("gpus", "capability", "device", "precision", "compiled", "words"),
    [
        (0, (9, 0), ("cpu", 2), "tf32", False, ("precision=tf32", "not on cpu2", "precision=fp32 or bf16")),
        (1, (9, 0), ("gpu", 4), "tf32", False, ("precision=tf32", "gpu4 rehearsed on a CPU")),
        (1, (7, 5), ("gpu", 1), "tf32", False, ("precision=tf32", "8.0", "fp16")),
        (0, (9, 0), ("tpu", 8), "fp16", False, ("precision=fp16", "TPU", "precision=bf16")),
        (0, (9, 0), ("tpu", 8), "fp32", True, ("compile=true", "TPU", "compile=false")),
    ],
)
def test_settings_that_a_device_does_not_serve(
    gpus: int,
    capability: tuple[int, int],
    device: tuple[str, int],
    precision: str,
    compiled: bool,
    words: tuple[str, ...],
    serve: Serve,
) -> None:
    """A precision or an option that the device does not have is refused by name, with one that it has."""
    with pytest.raises(UserError) as caught:
        serve(gpus, device, precision, compiled, capability)
    assert str(caught.value).startswith(words[0])
    for word in words:
        assert word in str(caught.value)


#: Every place that a TPU setup can be at: without torch_xla, with it alone, and on a TPU of four.
TPUS = pytest.mark.parametrize("tpus", [None, 0, 4])


@TPUS
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": Precision(PrecisionName.fp16)}, ("precision=fp16 is not served by TPUs", "use precision=bf16")),
        ({"precision": Precision(PrecisionName.tf32)}, ("precision=tf32 exists on NVIDIA GPUs only", "fp32 or bf16")),
        ({"compile": True}, ("compile=true is not for TPUs", "leave compile=false")),
        (
            {"gradient_checkpointing": True},
            (
                "gradient_checkpointing=true is not served on TPUs",
                "leave gradient_checkpointing=false, and set a smaller micro-batch with accumulation.steps",
            ),
        ),
    ],
    ids=["fp16", "tf32", "compile", "gradient_checkpointing"],
)
def test_settings_that_a_tpu_does_not_serve(
    tpus: int | None,
    changes: dict[str, Any],
    words: tuple[str, str],
    defaults: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a TPU would not serve is refused in its rehearsals, too, by its setting and with what would do."""
    on_machine(monkeypatch, 8, tpus=tpus)
    config = dataclasses.replace(defaults, device=Device(DeviceKind.tpu, 4), **changes)
    with pytest.raises(UserError) as caught:
        check_device_serves(config, place(config.device, None))
    message = str(caught.value)
    assert message.startswith(words[0])
    assert words[1] in message
    assert "\n" not in message


@TPUS
@pytest.mark.parametrize("precision", [PrecisionName.fp32, PrecisionName.bf16, PrecisionName.fp64])
def test_precisions_that_a_tpu_serves(
    tpus: int | None, precision: PrecisionName, defaults: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other precisions are not refused, on a TPU and in its rehearsals alike, but for fp64, which can be rehearsed."""
    on_machine(monkeypatch, 0, tpus=tpus)
    config = dataclasses.replace(defaults, device=Device(DeviceKind.tpu, 4), precision=Precision(precision))
    if tpus and precision is PrecisionName.fp64:
        with pytest.raises(UserError, match=r"^precision=fp64 is not in a TPU's hardware, .*: use precision=fp32$"):
            check_device_serves(config, place(config.device, None))
        return
    check_device_serves(config, place(config.device, None))


def test_other_devices_serve_gradient_checkpointing(defaults: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs and GPUs recompute activations if they are asked to, with torch_xla beside them or not."""
    for tpus in (None, 4):
        on_machine(monkeypatch, 4, tpus=tpus)
        for kind in (DeviceKind.cpu, DeviceKind.gpu):
            config = dataclasses.replace(defaults, device=Device(kind, 4), gradient_checkpointing=True)
            check_device_serves(config, place(config.device, None))


@pytest.mark.parametrize(
    ("gpus", "device", "precision"),
    [
        (1, ("gpu", 1), "tf32"),
        (0, ("cpu", 1), "fp16"),
        (0, ("gpu", 2), "fp64"),
        (0, ("tpu", 8), "bf16"),
        (0, ("tpu", 8), "fp32"),
    ],
)
def test_settings_that_a_device_serves(gpus: int, device: tuple[str, int], precision: str, serve: Serve) -> None:
    """What the device has is not refused."""
    serve(gpus, device, precision, capability=(8, 0))


@pytest.mark.parametrize(
    ("device", "gpus", "missing"),
    [(("cpu", 1), 0, "C++ compiler"), (("gpu", 4), 0, "C++ compiler"), (("gpu", 1), 1, "triton")],
)
@pytest.mark.parametrize("there", [True, False])
def test_compiling_needs_a_compiler(
    device: tuple[str, int], gpus: int, missing: str, there: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compile=true is refused where the compiler of the device that it runs on is missing, and only there."""
    found: Any = object() if there else None
    monkeypatch.setattr(shutil, "which", lambda *_, **__: found)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: found)
    if there:
        serve(gpus, device, "fp32", compiled=True)
        return
    with pytest.raises(UserError) as caught:
        serve(gpus, device, "fp32", compiled=True)
    assert str(caught.value).startswith("compile=true needs ")
    assert missing in str(caught.value)
