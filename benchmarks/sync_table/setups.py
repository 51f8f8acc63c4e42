"""The setups that are compared, and their order."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

#: Columns of the published table: steps of accumulation, and optimizer steps between two synchronisations.
COLUMNS = (1, 2, 4, 8, 16)
WORKERS = 4
#: The learning rate of one worker, or that times global batch / one worker's batch.
SCALINGS = ("none", "linear")
K = 16
#: At k = 16. The last one reaches the speed target: averages in bf16, in flight while training continues.
POLICIES = {
    "gradients": ("sync=gradients",),
    "accumulated": ("sync=accumulated",),
    "outer": ("sync=outer",),
    "overlap-bf16": ("sync=periodic", "sync.overlap=true", "sync.compress=bf16"),
}
RECOMMENDED = "overlap-bf16-linear"
ONE = "one"
SEEDS, MANY_SEEDS = 3, 10


@dataclass(frozen=True)
class Setup:
    """One cell of the table. `name`: for files and the command line; `policy`: `periodic` for k = 1, too."""

    name: str
    policy: str
    workers: int
    accumulation: int
    k: int
    scaling: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """One run."""

    setup: Setup
    seed: int


def all_setups() -> list[Setup]:
    """Every cell once: accumulation 1 equals k = 1, and with one worker both learning rates are equal."""
    one = Setup(ONE, "periodic", 1, 1, 1, "none", ("device=cpu", "scaling=none"))
    return [one, *(setup for scaling in SCALINGS for setup in _of_workers(scaling))]


def _of_workers(scaling: str) -> Iterator[Setup]:
    base = (f"device=cpu{WORKERS}", f"scaling={scaling}")
    yield Setup(f"sync-{scaling}", "periodic", WORKERS, 1, 1, scaling, base)
    for steps in COLUMNS[1:]:
        more = (*base, f"accumulation.steps={steps}")
        yield Setup(f"accumulation{steps}-{scaling}", "periodic", WORKERS, steps, 1, scaling, more)
    for k in COLUMNS[1:]:
        yield Setup(f"k{k}-{scaling}", "periodic", WORKERS, 1, k, scaling, (*base, f"sync.k={k}"))
    for name, overrides in POLICIES.items():
        yield Setup(f"{name}-{scaling}", name, WORKERS, 1, K, scaling, (*base, *overrides, f"sync.k={K}"))


def jobs_in_order(setups: Sequence[Setup], recommended: Iterable[str]) -> list[Job]:
    """Most informative first: one worker and the recommended setups, then all setups seed by seed, then further seeds
    of the first. `recommended`: names of setups."""
    names = {ONE, *recommended}
    first = [setup for setup in setups if setup.name in names]
    others = [setup for setup in setups if setup.name not in names]
    return [
        *(Job(setup, seed) for seed in range(SEEDS) for setup in first),
        *(Job(setup, seed) for seed in range(SEEDS) for setup in others),
        *(Job(setup, seed) for seed in range(SEEDS, MANY_SEEDS) for setup in first),
    ]


def chosen(jobs: Iterable[Job], pattern: str) -> list[Job]:
    """The jobs whose setup's name matches a pattern such as `k*-linear`."""
    return [job for job in jobs if fnmatch.fnmatchcase(job.setup.name, pattern)]
