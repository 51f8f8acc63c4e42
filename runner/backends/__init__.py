"""Devices, and collectives between workers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from runner.backends.protocol import Backend, Compilations
from runner.backends.torch_distributed import TorchBackend

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Backend", "Compilations", "TorchBackend", "build_backend", "xla_installed"]


def xla_installed() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def build_backend(
    device_type: str,
    rank: int,
    world_size: int,
    local_rank: int,
    store: dist.Store,
    *,
    local_workers: int,
    cache: Path,
    threads: int,
    timeout_s: float,
    offloads: bool = False,
) -> Backend:
    """Connect one worker with the others through `store`.

    `device_type`: `cpu`, `cuda` or `xla`. `local_workers`: the number of workers on this machine. `cache`: the folder
    of caches that are shared between runs. `threads`: of this worker on a CPU. `timeout_s`: that workers wait for each
    other. `offloads`: whether weights on GPUs are kept in the host's memory.
    """
    if device_type != "xla":
        return TorchBackend(device_type, rank, world_size, local_rank, store, timeout_s, offloads)
    from runner.backends import xla  # imports torch_xla, which is optional and takes seconds

    host = TorchBackend("cpu", rank, world_size, local_rank, store, timeout_s)
    return xla.connect(host, local_workers, cache / "xla", threads)
