"""The GPUs or cores of this machine, divided between the jobs of a sweep that run on it at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.backends.machine import available_cores, local_devices, visible_gpus
from runner.config.choices import DeviceKind
from runner.config.schema import Config
from runner.folder.lock import locked_path
from runner.launch.local import workers_see
from runner.plan.placement import Placement, place

GPU, TPU, CORE = "GPU", "TPU", "core"
#: The scope of locks on GPUs and TPUs: all sweeps of a user on this machine. No file has this name.
_MACHINE = Path("/dev/runner")
#: Seconds between two looks for what other jobs have released.
_POLL_S = 0.1


@dataclass(frozen=True)
class Needed:
    """What a job takes of this machine: `count` of the slots `names`, which are of one `kind`."""

    kind: str
    names: tuple[str, ...]
    count: int

    @property
    def jobs(self) -> int:
        """How many such jobs can run at the same time."""
        return max(1, len(self.names) // self.count)

    def __str__(self) -> str:
        return f"{len(self.names)} {self.kind}{'s' * (len(self.names) > 1)}"


def needed(placement: Placement, threads: int) -> Needed:
    """A GPU for each worker, the TPU of this host, or a core for each thread. `threads`: of each worker."""
    if placement.device_type == "cuda":
        return Needed(GPU, tuple(visible_gpus()), placement.local_workers)
    if placement.kind == DeviceKind.tpu.name and not placement.rehearsed:
        return Needed(TPU, ("0",), 1)
    cores = available_cores()  # a rehearsal may have more workers
    return Needed(CORE, tuple(map(str, range(cores))), min(cores, placement.local_workers * threads))


def smallest_job(configs: Sequence[Config]) -> Needed:
    """What the job takes of which the most can run at the same time. `configs`: with every value that is swept."""
    threads = min(config.equivalence.threads or 1 for config in configs)
    placements = []
    for config in configs:
        devices = local_devices(look_for_tpu=config.device.kind is DeviceKind.tpu)
        placements.append(place(config.device, None, devices))
    return max((needed(placement, threads) for placement in placements), key=lambda one: one.jobs)


@contextlib.contextmanager
def taken(own: Needed, sweep_folder: Path) -> Iterator[list[str]]:
    """Wait until the slots that a job needs are free, and lock them; their names. Its workers see no other GPUs.

    The operating system releases them if the process is killed. Cores are divided within a sweep only, since other
    programs use them as well; GPUs and TPUs between all sweeps of a user.
    """
    scope = (sweep_folder if own.kind == CORE else _MACHINE) / own.kind
    with contextlib.ExitStack() as held:
        with contextlib.ExitStack() as turn:
            # One job after the other: two that have each locked a part of what they need would wait for ever.
            _lock(turn, scope, ["turn"], 1)
            names = _lock(held, scope, own.names, own.count)
        if own.kind == GPU:
            held.enter_context(workers_see(names))
        yield names


def _lock(held: contextlib.ExitStack, scope: Path, names: Sequence[str], count: int) -> list[str]:
    found: list[str] = []
    while True:
        for name in names:
            if name not in found and _lock_if_free(held, scope / name):
                found.append(name)
            if len(found) == count:
                return found
        time.sleep(_POLL_S)


def _lock_if_free(held: contextlib.ExitStack, path: Path) -> bool:
    try:
        held.enter_context(locked_path(path))
    except BlockingIOError:
        return False
    return True


def in_use(own: Needed) -> list[str]:
    """The slots that jobs of other sweeps use now."""
    with contextlib.ExitStack() as held:
        return [name for name in own.names if not _lock_if_free(held, _MACHINE / own.kind / name)]
