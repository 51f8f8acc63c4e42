"""Devices, and collectives between workers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from runner.backends.protocol import Backend, Compilations, World
from runner.backends.torch_distributed import TorchBackend

__all__ = ["Backend", "Compilations", "TorchBackend", "World", "build_backend", "xla_installed"]


def xla_installed() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def build_backend(
    device_type: str, world: World, *, cache: Path, threads: int, timeout_s: float, offloads: bool = False
) -> Backend:
    """Connect one worker with the others.

    `device_type`: `cpu`, `cuda` or `xla`. `cache`: the folder of caches that are shared between runs. `threads`: of
    this worker on a CPU. `timeout_s`: that workers wait for each other. `offloads`: whether weights on GPUs are kept in
    the host's memory.
    """
    if device_type != "xla":
        return TorchBackend(device_type, world, timeout_s, offloads)
    from runner.backends import xla  # imports torch_xla, which is optional and takes seconds

    return xla.connect(TorchBackend("cpu", world, timeout_s), world.local_workers, cache / "xla", threads)
