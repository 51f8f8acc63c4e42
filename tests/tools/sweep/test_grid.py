"""The jobs of a command, before Hydra creates them."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from runner.config.choices import Goal
from runner.config.compose import compose, parsed, with_sweeper_params
from runner.errors import UserError
from runner.tools.sweep import grid as module
from runner.tools.sweep import slots
from runner.tools.sweep.grid import Grid, grid_of, launcher_of, sweeper_overrides
from tests.configured import configured
from tests.replicas import TINY


def grid(*overrides: str) -> Grid:
    fixed = [override for override in overrides if "," not in override and "(" not in override]
    hydra = compose([*TINY, *fixed]).hydra
    return grid_of(parsed(with_sweeper_params(list(overrides), hydra)), hydra)


def test_jobs_are_in_hydras_order() -> None:
    """The last setting varies fastest; fixed settings are part of every name."""
    found = grid("device=cpu", "seed=0,1", "max_steps=2,3")
    assert found.jobs == tuple(f"device=cpu max_steps={steps} seed={seed}" for seed in (0, 1) for steps in (2, 3))
    assert (found.total, found.varied) == (4, ("seed", "max_steps"))


@pytest.mark.parametrize(
    ("overrides", "total", "varied"),
    [
        (["seed=range(0,5)"], 5, ("seed",)),
        (["seed=choice(0,1)", "+recipe.note=a,b,c"], 6, ("seed", "recipe.note")),
        (["seed=3"], 1, ()),
        (["device.length_buckets=[8,16],[32]"], 2, ("device.length_buckets",)),
        # A bundle's values are in hydra.sweeper.params; typed values take precedence.
        (["sweep=setups", "seed=0,1", "hydra.sweep.dir=x"], 8, ("device.workers", "seed")),
        (["sweep=setups", "device.workers=2"], 1, ()),
        (["sweep=setups", "device.workers=1,2", "seed=0,1"], 4, ("device.workers", "seed")),
    ],
)
def test_number_of_jobs(overrides: list[str], total: int, varied: tuple[str, ...]) -> None:
    found = grid(*overrides)
    assert (found.total, found.varied) == (total, varied)
    assert found.jobs is not None
    assert len(found.jobs) == len(set(found.jobs)) == total
    assert all("hydra" not in job for job in found.jobs)


def test_an_interval_needs_an_optimizing_sweeper() -> None:
    with pytest.raises(UserError, match=r"^optimizer\.lr=interval\(1e-5,1e-3\) .*hydra/sweeper=optuna"):
        grid("optimizer.lr=interval(1e-5,1e-3)", "seed=0,1")
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    found = grid("hydra/sweeper=optuna", "hydra.sweeper.n_trials=7", "optimizer.lr=interval(1e-5,1e-3)")
    assert found == Grid(None, 7, ("optimizer.lr",))


def test_an_optimizing_sweeper_gets_the_direction_of_the_metric() -> None:
    """It continues after failed jobs; what was typed is respected, unless it optimises in the wrong direction."""
    optuna: Any = OmegaConf.create({"sweeper": {"direction": "minimize", "max_failure_rate": 0.0}})
    direction, failures = "hydra.sweeper.direction", "hydra.sweeper.max_failure_rate"
    assert sweeper_overrides(optuna, Goal.max, []) == [f"{direction}=maximize", f"{failures}=1.0"]
    assert sweeper_overrides(optuna, Goal.min, [f"{failures}=0.5"]) == []
    with pytest.raises(UserError, match=f"^{direction}=minimize "):
        sweeper_overrides(optuna, Goal.max, [f"{direction}=minimize"])
    for several_or_basic in ({"direction": ["minimize", "maximize"]}, {}):
        assert sweeper_overrides(OmegaConf.create({"sweeper": several_or_basic}), Goal.max, []) == []


JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
LOCAL = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"


@pytest.mark.parametrize(
    ("target", "n_jobs", "sweeper", "jobs", "parallel"),
    [
        (BASIC, None, {}, 10, 1),
        (JOBLIB, 2, {"max_batch_size": None}, 10, 2),
        (JOBLIB, 4, {}, 3, 3),  # no more than there are
        (JOBLIB, -1, {}, 10, 4),  # as many as fit
        (JOBLIB, -2, {}, 10, 3),
        (JOBLIB, -9, {}, 10, 1),
        (JOBLIB, -1, {}, None, 4),  # their number is unknown
        (JOBLIB, -1, {"n_jobs": 2}, 10, 2),  # as many as Optuna asks for
        (LOCAL, None, {"max_batch_size": 3}, 10, 3),
        (LOCAL, None, {}, 10, 10),
        (SLURM, None, {}, 10, 1),  # each on its own machine
    ],
)
def test_jobs_in_parallel(
    target: str,
    n_jobs: int | None,
    sweeper: dict[str, int | None],
    jobs: int | None,
    parallel: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine with four cores."""
    for one in (module, slots):
        monkeypatch.setattr(one, "available_cores", lambda: 4)
    hydra = OmegaConf.create({"launcher": {"_target_": target, "n_jobs": n_jobs}, "sweeper": sweeper})
    found = launcher_of(hydra, jobs, [configured()])
    # Joblib runs a single job at a time in the command's process.
    in_process = target == BASIC or (target == JOBLIB and parallel == 1)
    assert (found.at_once, found.here, found.in_process) == (parallel, target != SLURM, in_process)
    assert (found.smallest_job is not None) == (target == JOBLIB)
    assert (f"hydra.launcher.n_jobs={parallel}" in found.overrides) == (target == JOBLIB)


@pytest.mark.parametrize(("n_jobs", "device"), [(0, "cpu"), (5, "cpu"), (3, "cpu2")])
def test_parallel_jobs_that_cannot_be(n_jobs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, or more than four cores are enough for."""
    monkeypatch.setattr(slots, "available_cores", lambda: 4)
    hydra = OmegaConf.create({"launcher": {"_target_": JOBLIB, "n_jobs": n_jobs}, "sweeper": {}})
    with pytest.raises(UserError, match=rf"^hydra\.launcher\.n_jobs={n_jobs} "):
        launcher_of(hydra, 10, [configured(f"device={device}")])


def test_the_launchers_have_these_names() -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    choices = {"basic": BASIC, "joblib": JOBLIB, "submitit_local": LOCAL, "submitit_slurm": SLURM}
    found = {choice: compose([*TINY, f"hydra/launcher={choice}"]).hydra.launcher["_target_"] for choice in choices}
    assert found == choices
