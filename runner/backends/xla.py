"""Workers on TPUs, and on XLA's CPU device in their place, through torch_xla. No other file imports it.

Torch_xla records operations and compiles them at the next `mark_step`. So neither this file nor the loop may put a
number that changes from step to step into a program as a constant, or read a tensor in between. Rank and world size
come from the launcher: off a TPU each process has its own XLA runtime, which knows only one worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from runner.backends.protocol import Backend, Compilations, Event
from runner.backends.torch_distributed import TorchBackend
from runner.data.recipe import Batch
from runner.errors import UserError

#: The PCI vendor of TPUs.
_GOOGLE = "0x1ae0"

#: Sums one tensor on the device over all workers, in place.
AllReduce = Callable[[Tensor], None]


def tpu_workers() -> int:
    """The number of workers that the TPU of this host has; 0 without a TPU or if PJRT_DEVICE names another device."""
    if os.environ.get("PJRT_DEVICE", "TPU") != "TPU" or _GOOGLE not in _pci_vendors():
        return 0  # without importing torch_xla, which takes seconds
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")  # or importing torch_xla logs its choice
    from torch_xla._internal import tpu

    return int(tpu.num_local_processes()) if tpu.num_available_chips() else 0


def _pci_vendors() -> set[str]:
    return {path.read_text().strip() for path in Path("/sys/bus/pci/devices").glob("*/vendor")}


def connect(host: TorchBackend, local_workers: int, cache: Path, threads: int) -> XlaBackend:
    """Acquire this worker's device and connect it with the other workers.

    `host`: this worker's backend for objects on the host, with the same rank and world size. `local_workers`: the
    number of workers on this machine. `cache`: a folder for compiled programs. `threads`: of XLA's CPU device.
    """
    on_tpu = tpu_workers() > 0
    os.environ.update(
        PJRT_DEVICE="TPU" if on_tpu else "CPU",
        CPU_NUM_DEVICES="1",
        NPROC=str(threads),  # XLA's CPU device would use all cores otherwise
    )
    import torch_xla
    from torch_xla import runtime
    from torch_xla._internal import pjrt, tpu

    if on_tpu:  # XLA's CPU compiler writes programs that it cannot load again
        # One folder per worker: all of them compile the same programs at the same time.
        runtime.initialize_cache(str(cache / str(host.local_rank)))
    if on_tpu and host.world_size > 1:
        # Check before acquiring the chips: on one host of many, that waits for the others.
        _check_slice(tpu.num_expected_global_devices(), host.world_size)
        # As torch_xla does for workers of its own launcher.
        pjrt.initialize_multiprocess(host.local_rank, local_workers)
        _check_slice(runtime.world_size(), host.world_size)
    elif on_tpu:
        pjrt.initialize_singleprocess()
    _full_matmul_precision()
    return XlaBackend(host, torch_xla.device(), compiled_all_reduce(host.world_size) if on_tpu else host_all_reduce)


def _check_slice(devices: int, workers: int) -> None:
    if devices != workers:
        raise UserError(
            f"torch_xla sees {devices} TPU devices, and {workers} workers were started: start torchrun on every host "
            "of the slice, with one process per chip (chips with two cores, as in TPU v2, are not supported)"
        )


def _full_matmul_precision() -> None:
    """Multiply fp32 matrices in fp32: by default a TPU rounds them to bf16. This does not change precision=bf16."""
    from torch_xla import backends

    logger = logging.getLogger(backends.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about every use of this setting
    backends.set_mat_mul_precision("highest")
    logger.setLevel(level)


def compiled_all_reduce(world_size: int) -> AllReduce:
    """The TPU's own collective, which is part of the program."""
    from torch_xla.core import xla_model

    groups = [list(range(world_size))]

    def all_reduce(tensor: Tensor) -> None:
        xla_model.all_reduce(xla_model.REDUCE_SUM, [tensor], groups=groups)

    return all_reduce


def host_all_reduce(tensor: Tensor) -> None:
    """Gloo on a copy in the host's memory: XLA's CPU devices, one per process, have no link between them.

    This waits for the device and splits the program in two.
    """
    import torch_xla

    # Run everything recorded so far: fetching one tensor would compute only that one now, and the rest again later.
    torch_xla.sync()
    copy = tensor.cpu()
    dist.all_reduce(copy)
    tensor.copy_(copy)


class XlaBackend(Backend):
    """A worker with an XLA device. `host`: its backend on the host; `all_reduce`: sums over the devices."""

    compiles = True

    def __init__(self, host: TorchBackend, device: torch.device, all_reduce: AllReduce) -> None:
        self.rank = host.rank
        self.world_size = host.world_size
        self.local_rank = host.local_rank
        self.device = device
        self._host = host
        self._all_reduce = all_reduce

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            self._all_reduce(tensor)
        return tensor

    def start_all_reduce(self, tensors: Sequence[Tensor], async_op: bool) -> Callable[[], float | None]:
        # On a TPU this is a program that runs while the host records the next one. Elsewhere it waits.
        start = time.perf_counter()
        for tensor in tensors:
            self.all_reduce(tensor)
        self.mark_step()
        if async_op:
            return lambda: None
        self.synchronize()
        seconds = time.perf_counter() - start
        return lambda: seconds

    def new_group(self) -> dist.ProcessGroup:
        raise AssertionError("torch_xla has no process groups")

    def start_sum(self, numbers: Sequence[Tensor], async_op: bool) -> Callable[[], list[float]]:
        import torch_xla

        # Fetch all tensors of the device at once.
        on_device = [number for number in numbers if number.device == self.device]
        copies = iter(torch_xla._XLAC._xla_get_cpu_tensors(on_device))
        on_host = [next(copies) if number.device == self.device else number for number in numbers]
        return self._host.start_sum(on_host, async_op=False)

    def start_host_sum(self, numbers: Sequence[float], async_op: bool) -> Callable[[], list[float]]:
        return self._host.start_host_sum(numbers, async_op)

    def wait_for_all(self, value: Any) -> list[Any]:
        return self._host.wait_for_all(value)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._host.all_gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        return self._host.broadcast_object(value)

    def feed(self, batches: Iterable[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        # One batch ahead, in this thread: the copy overlaps with the program that was started last. (Torch_xla's own
        # ParallelLoader silently ends an epoch early if a batch fails in its thread.)
        ahead: tuple[np.ndarray, Batch] | None = None
        for ids, batch in batches:
            on_device = ids, {name: tensor.to(self.device) for name, tensor in batch.items()}
            if ahead is not None:
                yield ahead
            ahead = on_device
        if ahead is not None:
            yield ahead

    def scalar(self, value: float, dtype: torch.dtype) -> Tensor | float:
        # Squeezed from one dimension: torch_xla makes a constant of a 0-dimensional 0 or 1.
        return torch.tensor([value], dtype=dtype, device=self.device).squeeze(0)

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        # Models read attention masks in order to drop those that hide nothing. That would stop the recording, and give
        # different programs. They do not while torch reports that it is compiling.
        before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before

    def mark_step(self) -> None:
        import torch_xla

        torch_xla.sync()

    def synchronize(self) -> None:
        # Not torch_xla.sync(wait=True), which advances the device's random stream: dropout must not depend on how often
        # the clock is read.
        from torch_xla.core import xla_model

        xla_model.wait_device_ops()

    def record_event(self) -> Event | None:
        return None  # a step is one program

    def compilations(self) -> Compilations | None:
        from torch_xla.debug import metrics

        count, nanoseconds, _ = metrics.metric_data("CompileTime") or (0, 0.0, ())
        return Compilations(count, nanoseconds / 1e9, metrics.counter_value("PersistentCacheHit") or 0)

    def seed(self, seed: int) -> None:
        import torch_xla

        torch_xla.manual_seed(seed)

    def random_state(self) -> Tensor | int | None:
        from torch_xla.core import xla_model

        return int(xla_model.get_rng_state())

    def restore_random_state(self, state: Tensor | int | None) -> None:
        from torch_xla.core import xla_model

        if isinstance(state, int):  # saved on an XLA device
            xla_model.set_rng_state(state)

    def close(self) -> None:
        self._host.close()
