"""The devices that the workers run on."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass

import torch

from runner.backends.machine import LocalDevices
from runner.config.choices import DeviceKind, PrecisionName, Rehearse, ShardingKind
from runner.config.schema import Config, Device
from runner.errors import UserError


@dataclass(frozen=True)
class Placement:
    """`label`: the requested device (`tpu8`). `device_type`: torch's name of the device that executes the run."""

    label: str
    kind: str
    device_type: str
    workers: int
    local_workers: int
    rehearsed: bool

    def banner(self) -> str | None:
        """One line with rich's markup about a rehearsal or a TPU; None for other devices."""
        if not self.rehearsed:
            tpu = self.kind == "tpu"
            return f"{self.label}: {self.workers} TPU worker(s), through torch_xla." if tpu else None
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


def place(
    device: Device, world_size: int | None, devices: LocalDevices, local_world_size: int | None = None
) -> Placement:
    """Decide where a device setup runs, given this machine's `devices`.

    `world_size`, `local_world_size`: of workers that torchrun or Slurm has started, on all hosts and on this one; None
    otherwise. Raises UserError if they do not match the setup, or if a missing device may not be rehearsed.
    """
    kind = device.kind
    if kind is DeviceKind.auto:
        kind = DeviceKind.gpu if devices.gpus else DeviceKind.cpu
    tpus = devices.tpu_workers if kind is DeviceKind.tpu else 0
    here = {DeviceKind.gpu: devices.gpus, DeviceKind.tpu: tpus}.get(kind, 1)
    workers = device.workers or world_size or here or 1
    if world_size is not None and world_size != workers:
        raise UserError(
            f"device.workers={workers} does not match the {world_size} processes that were started: "
            f"set device.workers={world_size}, or start {workers}"
        )
    local = workers if world_size is None else local_world_size or workers
    if tpus and local != tpus and workers != 1:
        raise UserError(
            f"device.workers={workers} does not fit the TPU of this host, which has {tpus} worker(s): set "
            f"device.workers={tpus}, or 1"
            if world_size is None
            else f"{local} processes were started on this host, whose TPU has {tpus} worker(s): start {tpus} on each "
            f"host, torchrun --nproc-per-node={tpus}"
        )
    missing = _missing(kind, local, devices)
    if missing and device.rehearse is Rehearse.never:
        raise UserError(
            f"device.kind={kind.name} with {workers} worker(s) cannot run here: {missing}; "
            f"choose device=cpu, or device.rehearse=auto to rehearse it on the CPU"
        )
    if kind is DeviceKind.tpu and devices.xla_installed:
        device_type = "xla"
    else:
        device_type = "cuda" if kind is DeviceKind.gpu and not missing else "cpu"
    label = kind.name if workers == 1 else f"{kind.name}{workers}"
    return Placement(label, kind.name, device_type, workers, local, rehearsed=bool(missing))


def _missing(kind: DeviceKind, local_workers: int, devices: LocalDevices) -> str:
    """Why a device is not on this machine; empty if it is."""
    if kind is DeviceKind.gpu and devices.gpus < local_workers:
        return f"this machine has {devices.gpus} CUDA device(s)"
    if kind is DeviceKind.tpu and not devices.xla_installed:
        return "torch_xla is not installed (the extra `tpu`)"
    if kind is DeviceKind.tpu and not devices.tpu_workers:
        chosen = os.environ.get("PJRT_DEVICE")
        return "this machine has no TPU" if chosen in (None, "TPU") else f"PJRT_DEVICE={chosen} is set"
    return ""


def check_device_serves(config: Config, placement: Placement) -> None:
    """Raise UserError for settings that the device does not support."""
    precision, tpu = config.precision.name, placement.kind == "tpu"
    if precision is PrecisionName.tf32:
        if placement.device_type != "cuda":
            where = f"{placement.label} rehearsed on a CPU" if placement.rehearsed else placement.label
            raise UserError(f"precision=tf32 needs an NVIDIA GPU and is not on {where}: use precision=fp32 or bf16")
        if torch.cuda.get_device_capability()[0] < 8:
            raise UserError("precision=tf32 needs a GPU of compute capability 8.0 or newer: use precision=fp32 or fp16")
    if tpu and precision is PrecisionName.fp64 and not placement.rehearsed:
        raise UserError("precision=fp64 is not supported by TPUs, only in a rehearsal: use precision=fp32")
    if tpu and precision is PrecisionName.fp16:
        raise UserError("precision=fp16 is not supported on TPUs: use precision=bf16")
    if tpu and config.gradient_checkpointing:
        raise UserError(
            "gradient_checkpointing=true is not supported on TPUs, where XLA removes the recomputation: "
            "use gradient_checkpointing=false and a smaller micro-batch with accumulation.steps"
        )
    if tpu and config.sharding.kind is not ShardingKind.none:
        raise UserError(f"sharding={config.sharding.kind.name} is for CPUs and GPUs: use sharding=none")
    if tpu and config.profile.steps is not None:
        raise UserError("profile.steps is not supported on TPUs, whose steps torch.profiler does not see: leave it out")
    if placement.device_type == "xla" and config.equivalence.is_identical:
        raise UserError("equivalence=identical is not supported by torch_xla, which compiles whole steps: use exact")
    offload, fp16 = config.sharding.kind is ShardingKind.fsdp_offload, precision is PrecisionName.fp16
    if offload and fp16 and placement.device_type == "cuda":
        raise UserError(
            "precision=fp16 is not supported with sharding=fsdp_offload, whose optimizer would not wait for the loss "
            "scale: use precision=bf16"
        )
    if config.compile:
        _check_compiler(placement)


def emulated_bf16(config: Config, placement: Placement) -> str | None:
    """A warning if a CPU has no instructions for precision=bf16 (AVX-512 or ARM's), which torch then emulates."""
    known = torch.backends.mkldnn.is_available()
    if config.precision.name is not PrecisionName.bf16 or placement.device_type != "cpu" or not known:
        return None
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return "precision=bf16 is many times slower than fp32 on this processor, which has no instructions for it"


def _check_compiler(placement: Placement) -> None:
    if placement.kind == "tpu":
        raise UserError("compile=true is not supported on TPUs, where XLA compiles the program: use compile=false")
    if placement.device_type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise UserError("compile=true needs a C++ compiler on the CPU: install g++, or use compile=false")
    if placement.device_type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("compile=true needs the package triton on a GPU: install it, or use compile=false")
