"""Workers on CPUs (gloo) and on NVIDIA GPUs (nccl), through torch.distributed."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from runner.backends.protocol import Backend, Event, World
from runner.config.schema import Launch
from runner.data.recipe import Batch

#: Time in which workers wait for one that prepares a whole data set, and in training. The launcher notices at once if
#: it dies, and the watchdog if a worker makes no progress in training.
_LONG = datetime.timedelta(days=1)

#: glibc's M_MMAP_THRESHOLD (its maximum), M_TRIM_THRESHOLD and M_TOP_PAD, in bytes. Larger blocks, such as
#: gradients of embeddings, are mapped separately: in a heap they would not always find their old place again.
_MALLOC = {-3: 2**25, -1: 2**31 - 1, -2: 2**26}

#: Kernels that oneDNN and torch's interface to it keep. They have some for every number of tokens, a thousand by
#: default, and memory would grow by hundreds of MiB in the first hundred steps.
_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}

#: The libraries for collectives, by the type of the device and whether weights are in the host's memory.
_GROUPS = {
    ("cpu", False): "gloo",
    ("cpu", True): "gloo",
    ("cuda", False): "nccl",
    ("cuda", True): "cuda:nccl,cpu:gloo",
}


@contextlib.contextmanager
def _quiet_gloo() -> Iterator[None]:
    """Redirect the library's own writes to standard output: until torch 2.10 gloo reports every connection."""
    sys.stdout.flush()
    output = os.dup(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(devnull)
        os.close(output)


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory: gradients are allocated in each step, and new pages take a tenth of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def _peak_resident_bytes() -> int:
    """The most memory of the host that this process has had resident, with the libraries that it shares."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@contextlib.contextmanager
def long_collectives(timeout_s: float) -> Iterator[None]:
    """Within it workers wait for each other for as long as a watchdog lets them, and afterwards for `timeout_s`.

    Gloo's clocks run on while all processes are stopped. Other groups than the default one always wait that long: they
    are used in training only.
    """
    dist.distributed_c10d._set_pg_timeout(_LONG)
    yield
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s))


class _HostEvent:
    """A point in time of the host's clock, with the method of torch.cuda.Event."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return 1000 * (end_event._time - self._time)


class TorchBackend(Backend):
    """A worker in a torch.distributed process group; a single worker is a group of one.

    `device_type`: `cpu` or `cuda`. `timeout_s`: that workers wait for each other. `offloads`: whether workers with a
    GPU also sum tensors that are in the host's memory.
    """

    def __init__(
        self, device_type: str, world: World, timeout_s: float = Launch.timeout_s, offloads: bool = False
    ) -> None:
        self.rank, self.world_size, self.local_rank = world.rank, world.world_size, world.local_rank
        if device_type == "cuda":
            self.device = torch.device("cuda", world.local_rank)
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
            for name, value in _KERNELS.items():  # read when the first of them is made
                os.environ.setdefault(name, value)
            _keep_freed_memory()
        self._store, self._waited = world.store, 0
        self._async_group: dist.ProcessGroup | None = None
        self._host_group: dist.ProcessGroup | None = None
        with _quiet_gloo():
            dist.init_process_group(
                _GROUPS[device_type, offloads],
                store=world.store,
                rank=world.rank,
                world_size=world.world_size,
                device_id=self.device if device_type == "cuda" else None,
                timeout=datetime.timedelta(seconds=timeout_s),
            )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_all_reduce(self, tensors: Sequence[Tensor], async_op: bool) -> Callable[[], float | None]:
        if async_op and self._async_group is None:
            # In the default group nccl would let every small collective wait for this large one.
            self._async_group = self.new_group()
        self.synchronize()
        group = self._async_group if async_op else None
        start, ended = time.perf_counter(), list[float]()
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        on_cpu = self.device.type == "cpu"
        if async_op and on_cpu:
            for work in works:
                work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))

        def wait() -> float | None:
            for work in works:
                work.wait()
            self.synchronize()
            now = time.perf_counter()
            if not async_op:
                return now - start
            # The host is not told when a GPU finished it.
            return max(ended, default=now) - start if on_cpu else None

        return wait

    def new_group(self) -> dist.ProcessGroup:
        with _quiet_gloo():
            return dist.new_group(timeout=_LONG)

    def start_sum(self, numbers: Sequence[Tensor], async_op: bool) -> Callable[[], list[float]]:
        total = torch.cat([number.to(self.device, torch.float64).reshape(-1) for number in numbers])
        wait = self.start_all_reduce([total], async_op)

        def result() -> list[float]:
            wait()
            return list(total.tolist())

        return result

    def start_host_sum(self, numbers: Sequence[float], async_op: bool) -> Callable[[], list[float]]:
        total = torch.tensor(numbers, dtype=torch.float64)
        if self.world_size == 1:
            return total.tolist
        if self._host_group is None:
            # A separate group: the numbers must not wait for what a device or an asynchronous collective is doing.
            with _quiet_gloo():
                self._host_group = dist.new_group(backend="gloo", timeout=_LONG)
        work = dist.all_reduce(total, group=self._host_group, async_op=True)
        if not async_op:
            work.wait()

        def result() -> list[float]:
            work.wait()
            return list(total.tolist())

        return result

    def wait_for_all(self, value: Any) -> list[Any]:
        self._waited += 1
        keys = [f"wait-{self._waited}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._store.wait(keys, _LONG)
        return [json.loads(self._store.get(key)) for key in keys]

    def all_gather_object(self, value: Any) -> list[Any]:
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any) -> Any:
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def feed(self, batches: Iterable[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        for ids, batch in batches:
            yield ids, {name: self._to_device(tensor) for name, tensor in batch.items()}

    def _to_device(self, tensor: Tensor) -> Tensor:
        # A copy from pinned memory is queued on the device, and the host does not wait for it.
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            # Only this stream: an asynchronous collective runs on another.
            torch.cuda.current_stream(self.device).synchronize()

    def record_event(self) -> Event | None:
        if self.device.type == "cpu":
            return _HostEvent()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def peak_memory_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _peak_resident_bytes()

    def random_state(self) -> Tensor | int | None:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def restore_random_state(self, state: Tensor | int | None) -> None:
        if isinstance(state, Tensor):
            torch.cuda.set_rng_state(state, self.device)

    def close(self) -> None:
        # A DDP wrapper that is collected after the process group can hang in the group's destructor: collect it first.
        gc.collect()
        if self.world_size > 1:
            dist.barrier()  # no worker leaves while another still needs the group
        dist.destroy_process_group()
