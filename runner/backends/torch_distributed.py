"""Workers on CPUs (gloo) and on NVIDIA GPUs (nccl), through torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from runner.backends.protocol import Compilations
from runner.data.recipe import Batch

#: How long workers wait for each other. One of them tokenises a whole data set while the others wait; a worker that
#: dies is noticed by the launcher, at once.
_TIMEOUT = datetime.timedelta(hours=2)

_COMPRESS_HOOKS = {torch.bfloat16: bf16_compress_hook, torch.float16: fp16_compress_hook}


@contextlib.contextmanager
def _quiet_gloo() -> Iterator[None]:
    """Keep the library itself from writing to the standard output: until torch 2.10 gloo reports every connection."""
    sys.stdout.flush()
    output = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(nowhere)
        os.close(output)


class TorchBackend:
    """A worker in a torch.distributed process group; a single worker is a group of one.

    `device_type`: `cpu` or `cuda`. `store`: where the workers find each other.
    """

    compiles = False

    def __init__(self, device_type: str, rank: int, world_size: int, local_rank: int, store: dist.Store) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        if device_type == "cuda":
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        self.eager_device = self.device
        self._beside: dist.ProcessGroup | None = None
        with _quiet_gloo():
            dist.init_process_group(
                "nccl" if device_type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                device_id=self.device if device_type == "cuda" else None,
                timeout=_TIMEOUT,
            )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_all_reduce(self, tensor: Tensor, beside: bool) -> Callable[[], float | None]:
        if beside and self._beside is None:
            # A group of its own: within one, nccl would let every small collective wait for this large one.
            with _quiet_gloo():
                self._beside = dist.new_group(timeout=_TIMEOUT)
        self.synchronize()
        start, ended = time.perf_counter(), list[float]()
        work = dist.all_reduce(tensor, group=self._beside if beside else None, async_op=True)
        on_cpu = self.device.type == "cpu"
        if beside and on_cpu:
            work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))

        def wait() -> float | None:
            work.wait()
            self.synchronize()
            now = time.perf_counter()
            if not beside:
                return now - start
            # When a GPU was done with it the host does not learn.
            return (ended[0] if ended else now) - start if on_cpu else None

        return wait

    def sum_numbers(self, numbers: Sequence[Tensor]) -> list[float]:
        return list(self.all_reduce(self._together(numbers)).tolist())

    def _together(self, numbers: Sequence[Tensor]) -> Tensor:
        return torch.stack([number.to(self.device, torch.float64) for number in numbers])

    def start_sum_numbers(self, numbers: Sequence[Tensor]) -> Callable[[], list[float]]:
        together = self._together(numbers)
        wait = self.start_all_reduce(together, beside=True)

        def result() -> list[float]:
            wait()
            return list(together.tolist())

        return result

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        if self.world_size == 1:
            return [rows.cpu()]
        rows = rows.to(self.device)
        count = torch.tensor([len(rows)], device=self.device)
        counts = [torch.zeros_like(count) for _ in range(self.world_size)]
        dist.all_gather(counts, count)
        # Collectives want equal shapes: pad to the longest, and cut the padding off again.
        longest = max(int(c) for c in counts)
        padded = torch.zeros((longest, *rows.shape[1:]), dtype=rows.dtype, device=self.device)
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded)
        return [part[: int(c)].cpu() for part, c in zip(gathered, counts, strict=True)]

    def share(self, value: Any) -> Any:
        if self.world_size == 1:
            return value
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(text)], device=self.device)
        dist.broadcast(size, src=0)
        data = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, src=0)
        return json.loads(bytes(data.cpu().numpy()))

    def data_parallel(self, model: nn.Module, wire: torch.dtype | None) -> nn.Module:
        if self.world_size == 1:
            return model
        ids = [self.local_rank] if self.device.type == "cuda" else None
        # Buffers are each worker's own: broadcasting them would communicate on accumulation micro-batches, too.
        with warnings.catch_warnings():
            # torch 2.13 announces another name for this, and says to stay with the old one for exactly this use.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(
                model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        if wire is not None:
            hook = _COMPRESS_HOOKS[wire]
            # Under its own name torch refuses bf16 anywhere but on nccl, which is not all that can sum it.
            wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        return wrapped

    def average_gradients(self, parameters: Sequence[nn.Parameter], wire: torch.dtype | None) -> None:
        pass  # DistributedDataParallel has, while backward went on

    def feed(self, batches: Iterable[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        for ids, batch in batches:
            yield ids, {name: self._sent(tensor) for name, tensor in batch.items()}

    def _sent(self, tensor: Tensor) -> Tensor:
        # From pinned memory the copy waits its turn on the device, and the host goes on meanwhile.
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def number(self, value: float, dtype: torch.dtype) -> Tensor | float:
        return value

    def forward_pass(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark_step(self) -> None:
        pass  # what is asked of these devices is done at once

    def stamp(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        if self.device.type == "cpu":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000

    def compilations(self) -> Compilations | None:
        return None

    def seed(self, seed: int) -> None:
        pass  # torch.manual_seed seeds the CPU and all CUDA devices

    def random_state(self) -> Tensor | int | None:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def restore_random_state(self, state: Tensor | int | None) -> None:
        if isinstance(state, Tensor):
            torch.cuda.set_rng_state(state, self.device)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            # Of this stream alone: an average that travels beside is nothing to wait for.
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        # A DDP wrapper that dies after the process group can hang in the group's destructor: collect it first, and
        # let no worker leave while another still needs the group.
        gc.collect()
        self.barrier()
        dist.destroy_process_group()
