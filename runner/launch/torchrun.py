"""Running as one rank of a world that torchrun or Slurm started."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runner.config.hydra_options import HydraOptions
from runner.errors import UserError
from runner.launch.world import ExternalWorld, join_external
from runner.run.preflight import preflight


@dataclass
class _Joined:
    world: ExternalWorld | None = None
    posted: bool = False


_joined = _Joined()


def current_world() -> ExternalWorld | None:
    """The world that this process has joined, if any."""
    return _joined.world


def run_as_rank(arguments: list[str], enter_hydra: Callable[[HydraOptions], int]) -> int:
    """Rank 0 plays the parent; the others never enter Hydra and do what rank 0 tells them."""
    world = _joined.world = join_external()
    if world.rank != 0:
        from runner.launch.worker import leave_quietly

        signal.signal(signal.SIGINT, leave_quietly)
        message = world.receive()
        if "error" in message:
            return 0  # rank 0 says why, and is not cut short by torchrun, which ends all when one fails
        from runner.launch.worker import Job, run

        run(Job.from_json(message), world.rank, world.world_size, world.local_rank, world.store)
        return 0
    try:
        options = HydraOptions(arguments)
        if options.multirun:
            raise UserError(
                "a sweep cannot run under torchrun: start it with python -m runner -m, which starts workers"
            )
        if not options.only_shows:
            preflight(options)
            return enter_hydra(options)
    except BaseException as error:
        if not _joined.posted:
            world.post({"error": str(error)})
        raise
    world.post({"error": "nothing to run"})
    return enter_hydra(options)


def run_joined(world: ExternalWorld, job: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's part: tell the others, and train as one of them."""
    from runner.launch.worker import Job, run

    world.post(job)
    _joined.posted = True
    result = run(Job.from_json(job), world.rank, world.world_size, world.local_rank, world.store)
    assert result is not None
    return result
