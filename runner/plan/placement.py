"""Which device the workers really run on."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass

import torch

from runner.backends import xla_installed
from runner.config.choices import DeviceKind, PrecisionName, Rehearse
from runner.config.schema import Config, Device
from runner.errors import UserError


@dataclass(frozen=True)
class Placement:
    """`label`: the setup's device as one says it (`tpu8`). `device_type`: torch's name of where it runs."""

    label: str
    kind: str
    device_type: str
    workers: int
    local_workers: int
    rehearsed: bool

    def banner(self) -> str | None:
        """One line about where a device really is, unless it is simply here; with rich's markup."""
        if self.kind == "tpu" and not self.rehearsed:
            return f"{self.label}: {self.workers} TPU worker(s), through torch_xla."
        if not self.rehearsed:
            return None
        if self.device_type == "xla":
            where = "on XLA's CPU device, through torch_xla: the same plan, semantics and programs"
        elif self.kind == "tpu":
            where = "on this machine's CPU, without torch_xla, which is not installed: the same plan and semantics"
        else:
            where = "on this machine's CPU: the same plan and semantics"
        return (
            f"[bold yellow]Rehearsal:[/] {self.label} is not here, so its {self.workers} worker(s) run {where}, "
            "not its speed."
        )


def available_cores() -> int:
    """The cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_worker(local_workers: int) -> int:
    """CPU threads for one of so many workers on this machine."""
    return max(1, available_cores() // local_workers)


def place(device: Device, world_size: int | None) -> Placement:
    """Decide where a device setup runs. `world_size`: of a world that torchrun started, None otherwise.

    Raises UserError for a world of another size, and for a device that is not there and may not be rehearsed.
    """
    gpus = torch.cuda.device_count()
    tpus = _tpu_workers() if device.kind is DeviceKind.tpu else 0
    kind = device.kind
    if kind is DeviceKind.auto:
        kind = DeviceKind.gpu if gpus else DeviceKind.cpu
    here = {DeviceKind.gpu: gpus, DeviceKind.tpu: tpus}.get(kind, 1)
    workers = device.workers or world_size or here or 1
    if world_size is not None and world_size != workers:
        raise UserError(
            f"device.workers={workers} does not match the {world_size} processes that were started: "
            f"set device.workers={world_size}, or start {workers}"
        )
    local = workers if world_size is None else int(os.environ.get("LOCAL_WORLD_SIZE", workers))
    if tpus and local != tpus and workers != 1:
        raise UserError(
            f"device.workers={workers} does not fit the TPU of this host, which has {tpus} worker(s): set "
            f"device.workers={tpus}, or 1"
            if world_size is None
            else f"{local} processes were started on this host, whose TPU has {tpus} worker(s): start {tpus} on each "
            f"host, torchrun --nproc-per-node={tpus}"
        )
    missing = _missing(kind, local, gpus, tpus)
    if missing and device.rehearse is Rehearse.never:
        raise UserError(
            f"device.kind={kind.name} with {workers} worker(s) cannot run here: {missing}; "
            f"choose device=cpu, or device.rehearse=auto to rehearse it on the CPU"
        )
    label = kind.name if workers == 1 else f"{kind.name}{workers}"
    return Placement(label, kind.name, _device_type(kind, missing), workers, local, rehearsed=bool(missing))


def _tpu_workers() -> int:
    """Workers of this host's TPU; 0 without one, or without torch_xla."""
    if not xla_installed():
        return 0
    from runner.backends.xla import tpu_workers

    return tpu_workers()


def _missing(kind: DeviceKind, local_workers: int, gpus: int, tpus: int) -> str:
    if kind is DeviceKind.gpu and gpus < local_workers:
        return f"this machine has {gpus} CUDA device(s)"
    if kind is DeviceKind.tpu and not xla_installed():
        return "torch_xla is not installed (the extra `tpu`)"
    if kind is DeviceKind.tpu and not tpus:
        chosen = os.environ.get("PJRT_DEVICE")
        return "this machine has no TPU" if chosen in (None, "TPU") else f"PJRT_DEVICE={chosen} is set"
    return ""


def _device_type(kind: DeviceKind, missing: str) -> str:
    if kind is DeviceKind.tpu and xla_installed():
        return "xla"
    return "cuda" if kind is DeviceKind.gpu and not missing else "cpu"


def check_device_serves(config: Config, placement: Placement) -> None:
    """Refuse settings that the device cannot serve. Raises UserError."""
    name = config.precision.name
    if name is PrecisionName.tf32:
        if placement.device_type != "cuda":
            where = f"{placement.label} rehearsed on a CPU" if placement.rehearsed else placement.label
            raise UserError(f"precision=tf32 exists on NVIDIA GPUs only, not on {where}: use precision=fp32 or bf16")
        if torch.cuda.get_device_capability()[0] < 8:
            raise UserError("precision=tf32 needs a GPU of compute capability 8.0 or newer: use precision=fp32 or fp16")
    if placement.kind == "tpu" and not placement.rehearsed and name is PrecisionName.fp64:
        raise UserError(
            "precision=fp64 is not in a TPU's hardware, only on the CPU that rehearses it: use precision=fp32"
        )
    if placement.kind == "tpu" and name is PrecisionName.fp16:
        raise UserError("precision=fp16 is not served by TPUs, whose half precision is bf16: use precision=bf16")
    if config.gradient_checkpointing and placement.kind == "tpu":
        raise UserError(
            "gradient_checkpointing=true is not served on TPUs, where XLA would take the second computation out "
            "again: leave gradient_checkpointing=false, and set a smaller micro-batch with accumulation.steps"
        )
    if config.compile:
        _check_compiler(placement)


def _check_compiler(placement: Placement) -> None:
    if placement.kind == "tpu":
        raise UserError("compile=true is not for TPUs, whose programs are compiled anyway: leave compile=false")
    if placement.device_type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise UserError("compile=true needs a C++ compiler on the CPU, and there is no g++: install one")
    if placement.device_type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("compile=true needs the package triton on a GPU: install it, or leave compile=false")
