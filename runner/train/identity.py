"""The identity of a checkpoint: data, model, code and libraries, each by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from runner import __version__
from runner.backends.machine import library_versions, processor
from runner.config.instantiate import recipe_code
from runner.config.schema import Config
from runner.data.recipe import Prepared
from runner.errors import UserError
from runner.folder.files import digest_of_bytes
from runner.plan.history import PROCESSOR
from runner.train.checkpoint import Saved, sync_digest
from runner.train.job import Job

#: Before the names of modules, in the identity of a checkpoint.
CODE_PREFIX = "code of "


def job_identity(job: Job, rank: int) -> dict[str, Any]:
    """The values that must be the same when the run is resumed; the code only on rank 0, which writes it."""
    config = job.config
    identity: dict[str, Any] = {
        "data": job.facts.digest,
        "sync": sync_digest(config.sync, config.sharding),
        **library_versions(job.device_type),
        **({PROCESSOR: processor(job.device_type)} if config.equivalence.is_identical else {}),
    }
    return identity | {**code_of(config), "experiment": job.experiment} if rank == 0 else identity


def model_identity(prepared: Prepared, model: nn.Module, frozen: str | None) -> dict[str, str]:
    """The values that only a worker knows: tables, layers and frozen weights."""
    layers = digest_of_bytes(repr(model).encode())
    return {"prepared data": prepared.folder.name, "model": layers, **({"frozen weights": frozen} if frozen else {})}


def code_of(config: Config) -> dict[str, str]:
    """Digests of the code that a checkpoint was made with: the runner's, and each module's that defines the recipe."""
    root = Path(__file__).parents[1]
    own = digest_of_bytes(*(path.read_bytes() for path in sorted(root.rglob("*.py"))))
    modules = recipe_code(config.recipe, config.trusted_packages)
    return {
        "runner": f"{__version__} ({own[:8]})",
        **{f"{CODE_PREFIX}{name}": digest for name, digest in modules.items()},
    }


def require_same_model(saved: Saved, identity: Mapping[str, str]) -> None:
    for name, value in identity.items():
        if saved.identity.get(name, value) != value:
            raise UserError(
                f"resume={saved.folder.parents[1]} is invalid: the {name} of the run's recipe changed after step "
                f"{saved.step}; restore it, or start a new run"
            )
