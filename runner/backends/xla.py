"""Workers on TPUs, and on XLA's CPU device in their place, through torch_xla. No other file imports it.

Torch_xla records what is asked of the device and compiles it at the next `mark_step`, so nothing here, and nothing in
the loop, may put a number that changes from step to step into a program as a constant, or read one back in between.
Rank and world size are the launcher's: off a TPU every process has a runtime of its own, which knows of one worker.
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
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runner.backends.protocol import Compilations
from runner.backends.torch_distributed import TorchBackend
from runner.data.recipe import Batch
from runner.errors import UserError

#: The PCI vendor of TPUs.
_GOOGLE = "0x1ae0"

#: Sums one tensor on the device over all workers, in place.
AllReduce = Callable[[Tensor], None]


def tpu_workers() -> int:
    """How many workers the TPU of this host has; 0 where there is none, or where PJRT_DEVICE names another device."""
    if os.environ.get("PJRT_DEVICE", "TPU") != "TPU" or _GOOGLE not in _pci_vendors():
        return 0  # without importing torch_xla, which takes seconds
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")  # or importing torch_xla says which one it selects
    from torch_xla._internal import tpu

    return int(tpu.num_local_processes()) if tpu.num_available_chips() else 0


def _pci_vendors() -> set[str]:
    return {path.read_text().strip() for path in Path("/sys/bus/pci/devices").glob("*/vendor")}


def connect(host: TorchBackend, local_workers: int, cache: Path, threads: int) -> XlaBackend:
    """Take this worker's device and meet the other workers.

    `host`: the link over which the host's data travel, and whose rank and world size are this worker's.
    `local_workers`: how many of these workers this machine has. `cache`: the folder under which compiled programs are
    kept. `threads`: of XLA's CPU device.
    """
    on_tpu = tpu_workers() > 0
    os.environ.update(
        PJRT_DEVICE="TPU" if on_tpu else "CPU",
        CPU_NUM_DEVICES="1",
        NPROC=str(threads),  # of XLA's CPU device, which takes all cores otherwise
    )
    import torch_xla
    from torch_xla import runtime
    from torch_xla._internal import pjrt, tpu

    if on_tpu:  # XLA's CPU compiler writes programs that it cannot read back
        # One folder for each worker: they all compile the same programs, at the same time.
        runtime.initialize_cache(str(cache / str(host.local_rank)))
    if on_tpu and host.world_size > 1:
        # Before the chips are taken: on one host of many that waits for the others.
        _check_slice(tpu.num_expected_global_devices(), host.world_size)
        # What torch_xla does itself for workers that torch's elastic launcher has started.
        pjrt.initialize_multiprocess(host.local_rank, local_workers)
        _check_slice(runtime.world_size(), host.world_size)
    elif on_tpu:
        pjrt.initialize_singleprocess()
    _full_matmul_precision()
    return XlaBackend(host, torch_xla.device(), compiled_all_reduce(host.world_size) if on_tpu else host_all_reduce)


def _check_slice(there: int, started: int) -> None:
    if there != started:
        raise UserError(
            f"torch_xla sees {there} TPU devices, and {started} workers were started: start torchrun on every host of "
            "the slice, with as many processes as it has chips (chips with two cores, as in TPU v2, are not served)"
        )


def _full_matmul_precision() -> None:
    """Let fp32 mean fp32: a TPU multiplies it as bf16 unless it is told otherwise. Under bf16 this changes nothing."""
    from torch_xla import backends

    logger = logging.getLogger(backends.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns whoever sets this at all
    backends.set_mat_mul_precision("highest")
    logger.setLevel(level)


def compiled_all_reduce(world_size: int) -> AllReduce:
    """The TPU's own collective, part of the program: nothing leaves the device."""
    from torch_xla.core import xla_model

    groups = [list(range(world_size))]

    def all_reduce(tensor: Tensor) -> None:
        xla_model.all_reduce(xla_model.REDUCE_SUM, [tensor], groups=groups)

    return all_reduce


def host_all_reduce(tensor: Tensor) -> None:
    """Gloo on a copy in the host's memory: the replicas of XLA's CPU device, one a process, have no link between them.

    This waits for the device, and cuts the program in two.
    """
    import torch_xla

    # First everything that was asked for: fetching one tensor alone would compute it alone, and the rest once more.
    torch_xla.sync()
    copy = tensor.cpu()
    dist.all_reduce(copy)
    tensor.copy_(copy)


class XlaBackend:
    """A worker with an XLA device. `host`: the link between the workers' hosts; `all_reduce`: between devices."""

    compiles = True

    def __init__(self, host: TorchBackend, device: torch.device, all_reduce: AllReduce) -> None:
        self.rank = host.rank
        self.world_size = host.world_size
        self.local_rank = host.local_rank
        self.device = device
        self.eager_device = torch.device("cpu")
        self._host = host
        self._all_reduce = all_reduce

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            self._all_reduce(tensor)
        return tensor

    def start_all_reduce(self, tensor: Tensor, beside: bool) -> Callable[[], float | None]:
        # On a TPU this is a part of the program, which runs while the host records the next; elsewhere it waits.
        start = time.perf_counter()
        self.all_reduce(tensor)
        self.mark_step()
        if beside:
            return lambda: None
        self.synchronize()
        seconds = time.perf_counter() - start
        return lambda: seconds

    def sum_numbers(self, numbers: Sequence[Tensor]) -> list[float]:
        return self._host.sum_numbers(self._fetched(numbers))

    def _fetched(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the CPU, all fetched at once."""
        import torch_xla

        there = [tensor for tensor in tensors if tensor.device == self.device]
        copies = iter(torch_xla._XLAC._xla_get_cpu_tensors(there))
        return [next(copies) if tensor.device == self.device else tensor for tensor in tensors]

    def start_sum_numbers(self, numbers: Sequence[Tensor]) -> Callable[[], list[float]]:
        summed = self.sum_numbers(numbers)
        return lambda: summed

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        return self._host.gather_rows(rows.cpu())

    def share(self, value: Any) -> Any:
        return self._host.share(value)

    def data_parallel(self, model: nn.Module, wire: torch.dtype | None) -> nn.Module:
        return model

    @torch.no_grad()
    def average_gradients(self, parameters: Sequence[nn.Parameter], wire: torch.dtype | None) -> None:
        if self.world_size == 1:
            return
        # Workers whose rows are of another length are in another program by now. What follows is the same for all:
        # how a TPU would take to one collective in two programs, nobody could try.
        self.mark_step()
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = _flatten_dense_tensors(gradients)
        flat = flat.div(self.world_size).to(wire) if wire is not None else flat
        flat = self.all_reduce(flat)
        flat = flat.to(gradients[0].dtype) if wire is not None else flat.div_(self.world_size)
        for gradient, average in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(average)

    def feed(self, batches: Iterable[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        # One batch ahead, in this thread: transfers run beside the program that was launched last. (Torch_xla's own
        # ParallelLoader ends an epoch early, in silence, when a batch fails in its thread.)
        ahead: tuple[np.ndarray, Batch] | None = None
        for ids, batch in batches:
            sent = ids, {name: tensor.to(self.device) for name, tensor in batch.items()}
            if ahead is not None:
                yield ahead
            ahead = sent
        if ahead is not None:
            yield ahead

    def number(self, value: float, dtype: torch.dtype) -> Tensor | float:
        # One number of a tensor of one: of a 0 or 1 that comes alone torch_xla makes a constant of the program.
        return torch.tensor([value], dtype=dtype, device=self.device).squeeze(0)

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        # Models look at masks, for one, to leave them out where nothing is hidden: that would stop the recording and
        # make another program of it. While torch says that it compiles, they do not.
        before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before

    def mark_step(self) -> None:
        import torch_xla

        torch_xla.sync()

    def synchronize(self) -> None:
        # Not torch_xla.sync(wait=True): every one of these moves the device's random stream on, and how often the
        # clock is read must not change what is dropped.
        from torch_xla.core import xla_model

        xla_model.wait_device_ops()

    def stamp(self) -> Any:
        return None  # a step is one program

    def seconds_between(self, start: Any, end: Any) -> float:
        raise AssertionError("there are no stamps")

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

        if isinstance(state, int):  # saved on such a device
            xla_model.set_rng_state(state)

    def barrier(self) -> None:
        self._host.barrier()

    def close(self) -> None:
        self._host.close()
