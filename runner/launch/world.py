"""A world of processes that somebody else started: torchrun, or Slurm with torch's environment variables."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

_JOB_KEY = "runner/job"
#: How long the others wait for rank 0's message: it may have to tokenise a whole data set first.
_PREFLIGHT = datetime.timedelta(hours=2)


@dataclass(frozen=True)
class ExternalWorld:
    """This process's place in it, and the store through which rank 0 tells the others what to do."""

    rank: int
    world_size: int
    local_rank: int
    store: dist.Store

    def post(self, message: dict[str, Any]) -> None:
        """Rank 0's one message: the job, or the error that ends it before it began."""
        self.store.set(_JOB_KEY, json.dumps(message))

    def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.store.get(_JOB_KEY))
        return message


def join_external() -> ExternalWorld:
    """Meet the others at MASTER_ADDR and MASTER_PORT. Raises UserError where these are not set."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise UserError(f"RANK and WORLD_SIZE are set and {', '.join(missing)} not: start the processes with torchrun")

    import torch.distributed as dist  # here, so that asking `is_external` costs no second

    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    store.set_timeout(_PREFLIGHT)
    return ExternalWorld(rank, world_size, int(os.environ["LOCAL_RANK"]), store)
