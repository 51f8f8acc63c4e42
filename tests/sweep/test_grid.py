"""The jobs of a command, before Hydra makes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from omegaconf import OmegaConf

from runner.config.compose import compose, parsed, with_sweeper_params
from runner.errors import UserError
from runner.sweep import grid as module
from runner.sweep.grid import Grid, at_once, grid_of, in_process
from tests.replicas import TINY


def grid(*overrides: str) -> Grid:
    """The grid that the command line finds."""
    fixed = [override for override in overrides if "," not in override and "(" not in override]
    hydra = compose([*TINY, *fixed]).hydra
    return grid_of(parsed(with_sweeper_params(list(overrides), hydra)), hydra)


def test_jobs_are_in_hydras_order() -> None:
    """The last setting varies fastest, as Hydra's own numbers of jobs do; what is fixed is in every name."""
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
        ([], 1, ()),
    ],
)
def test_how_many(overrides: list[str], total: int, varied: tuple[str, ...]) -> None:
    """Ranges, choices and lists are counted as Hydra expands them."""
    found = grid(*overrides)
    assert (found.total, found.varied) == (total, varied)
    assert found.jobs is not None
    assert len(found.jobs) == len(set(found.jobs)) == total


def test_a_bundle_has_its_jobs() -> None:
    """`sweep=setups` puts values into `hydra.sweeper.params`: these are jobs, too; Hydra's own settings name none."""
    found = grid("sweep=setups", "seed=0,1", "hydra.sweep.dir=x")
    assert found.varied == ("device.workers", "seed")
    assert found.total == 8
    assert found.jobs is not None
    assert all("hydra" not in job and "batch=fixed_global" in job for job in found.jobs)


def test_a_value_of_ones_own_goes_before_the_bundles() -> None:
    """What is typed takes the place of what the bundle sweeps, and is swept itself where it has several values."""
    assert grid("sweep=setups", "device.workers=2").varied == ()
    found = grid("sweep=setups", "device.workers=1,2", "seed=0,1")
    assert (found.varied, found.total) == (("device.workers", "seed"), 4)


def test_a_range_needs_an_optimizing_sweeper() -> None:
    """`interval` has no values to take one after the other: one sentence that names setting and mend."""
    with pytest.raises(UserError, match=r"^optimizer\.lr=interval\(1e-5,1e-3\) .*hydra/sweeper=optuna") as caught:
        grid("optimizer.lr=interval(1e-5,1e-3)", "seed=0,1")
    assert "\n" not in str(caught.value)


def test_an_optimizing_sweeper_draws_its_jobs() -> None:
    """Optuna says how many it will draw and what varies, but not which."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    found = grid("hydra/sweeper=optuna", "hydra.sweeper.n_trials=7", "optimizer.lr=interval(1e-5,1e-3)")
    assert found == Grid(None, 7, ("optimizer.lr",))


JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
LOCAL = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"


@pytest.mark.parametrize(
    ("target", "n_jobs", "jobs", "together"),
    [
        (BASIC, None, 10, 1),
        (JOBLIB, 2, 10, 2),
        (JOBLIB, 20, 3, 3),  # no more than there are
        (JOBLIB, -1, 10, 4),  # one for each core
        (JOBLIB, -2, 10, 3),
        (JOBLIB, -9, 10, 1),
        (JOBLIB, 20, None, 4),  # nobody knows how many there will be
        (LOCAL, None, 10, 10),
        (SLURM, None, 10, 1),  # each on a machine of its own
    ],
)
def test_jobs_side_by_side(
    target: str, n_jobs: int | None, jobs: int | None, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many share this machine's four cores, under each launcher."""
    monkeypatch.setattr(module, "available_cores", lambda: 4)
    hydra = OmegaConf.create({"launcher": {"_target_": target, "n_jobs": n_jobs}})
    assert at_once(hydra, jobs) == together
    assert in_process(hydra) == (target == BASIC)


def test_no_jobs_at_once_cannot_be() -> None:
    """joblib would fail on `n_jobs=0` when the jobs are started; it is said before."""
    hydra = OmegaConf.create({"launcher": {"_target_": JOBLIB, "n_jobs": 0}})
    with pytest.raises(UserError, match=r"^hydra\.launcher\.n_jobs=0 "):
        at_once(hydra, 3)


def test_names_of_the_launchers_are_those_of_their_plugins() -> None:
    """What is looked for in a launcher's target is there in the plugins as they are installed."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    choices: Sequence[tuple[str, str]] = (("basic", BASIC), ("joblib", JOBLIB), ("submitit_local", LOCAL))
    for choice, target in (*choices, ("submitit_slurm", SLURM)):
        assert compose([*TINY, f"hydra/launcher={choice}"]).hydra.launcher["_target_"] == target
