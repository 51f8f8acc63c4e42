"""Setups and sweeps as configuration: the plan of every setup, and the jobs of every sweep, on any device."""

from __future__ import annotations

import pytest
import torch

from runner.config.compose import compose, parsed, settings, with_sweeper_params
from runner.plan.experiment import Experiment, prepare
from runner.sweep.grid import grid_of


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def prepared(*overrides: str) -> Experiment:
    return prepare(settings(compose(overrides)))


def numbers(*overrides: str) -> tuple[int, int, int, int]:
    """Workers, k, accumulation steps and global batch."""
    plan = prepared(*overrides).plan
    return plan.world_size, plan.k, plan.accumulation_steps, plan.global_batch


def jobs(*overrides: str) -> list[list[str]]:
    """The overrides of each job of a sweep, as the command line finds them."""
    fixed = [override for override in overrides if "," not in override]
    hydra = compose(fixed).hydra
    found = grid_of(parsed(with_sweeper_params(list(overrides), hydra)), hydra).jobs
    assert found is not None
    return [job.split() for job in found]


# --- setups -------------------------------------------------------------------------------------------------

#: Setup -> k and accumulation steps, on all workers of the device.
ALL_WORKERS = {
    **{f"acc{steps}": (1, steps) for steps in (1, 2, 4, 8, 16)},
    **{f"k{k}": (k, 1) for k in (1, 2, 4, 8, 16)},
}


@pytest.mark.parametrize(("device", "workers"), [("cpu2", 2), ("gpu4", 4), ("tpu8", 8)])
@pytest.mark.parametrize("setup", ALL_WORKERS)
def test_setups_of_all_workers(setup: str, device: str, workers: int) -> None:
    """Each sets accumulation or k and leaves the device as it is; the batch per device grows with the former only."""
    k, steps = ALL_WORKERS[setup]
    found = numbers(f"setup={setup}", f"device={device}", "batch=per_device", "batch.micro_batch=8")
    assert found == (workers, k, steps, 8 * steps * workers)


@pytest.mark.parametrize(
    ("device", "label"), [("cpu2", "cpu"), ("cpu8", "cpu"), ("gpu4", "gpu"), ("tpu8", "tpu"), ("auto", "cpu")]
)
def test_one_worker_of_any_device(device: str, label: str) -> None:
    """`setup=one` is one synchronous worker of the kind that is chosen, in whatever order it is written."""
    for overrides in ([f"device={device}", "setup=one"], ["setup=one", f"device={device}"]):
        experiment = prepared(*overrides, "batch=per_device")
        assert experiment.placement.label == label
        plan = experiment.plan
        assert (plan.world_size, plan.k, plan.accumulation_steps, plan.global_batch) == (1, 1, 1, 32)


def test_one_and_the_others_side_by_side() -> None:
    """In one sweep over setups on one device, `one` has one worker and the others have all."""
    found = [numbers(*job) for job in jobs("setup=one,k4,acc2", "device=cpu2", "batch=per_device")]
    assert found == [(1, 1, 1, 32), (2, 4, 1, 64), (2, 1, 2, 128)]


@pytest.mark.parametrize("sync", ["gradients", "accumulated"])
@pytest.mark.parametrize("steps", [1, 2, 4, 8, 16])
def test_accumulation_meets_at_every_step(sync: str, steps: int) -> None:
    """Setups that accumulate have k = 1, though the policy's own is 16; those with a k keep the policy."""
    found = numbers(f"setup=acc{steps}", f"sync={sync}", "device=cpu2", "batch=per_device")
    assert found == (2, 1, steps, 64 * steps)
    experiment = prepared("setup=k4", f"sync={sync}", "device=cpu2", "batch=per_device")
    assert (experiment.config.sync.policy.name, experiment.plan.k) == (sync, 4)


def test_the_command_line_wins() -> None:
    """Single settings win over a setup's."""
    assert numbers("setup=acc4", "accumulation.steps=2", "device=cpu2", "batch.global_batch=48") == (2, 1, 2, 48)
    assert numbers("setup=k8", "sync.k=2", "device=cpu2") == (2, 2, 1, 48)
    assert numbers("setup=one", "device.workers=2", "device=cpu8") == (2, 1, 1, 48)


# --- sweeps -------------------------------------------------------------------------------------------------

SETUPS = ["one", *ALL_WORKERS]


def test_kbatch() -> None:
    """`sweep=kbatch`: every setup with three seeds, on any device, with one batch per device."""
    found = jobs("sweep=kbatch", "device=gpu4")
    assert len(found) == 11 * 3
    assert {override for job in found for override in job if override.startswith("setup=")} == {
        f"setup={name}" for name in SETUPS
    }
    expected = {(1, 1, 1, 32), *((4, k, steps, 128 * steps) for k, steps in ALL_WORKERS.values())}
    assert {numbers(*job) for job in found if "seed=0" in job} == expected
    assert {prepared(*job).config.seed for job in found if "setup=k4" in job} == {0, 1, 2}


def test_lists_of_ones_own_replace_the_bundles() -> None:
    """What is typed takes the place of the bundle's lists, with one value or several; the rest of it stays."""
    found = jobs("sweep=kbatch", "device=cpu2", "setup=one,k4", "seed=0")
    assert [numbers(*job) for job in found] == [(1, 1, 1, 32), (2, 4, 1, 64)]
    assert len(jobs("sweep=kbatch", "device=cpu2", "seed=7")) == 11
    assert [
        numbers(*job)[3] for job in jobs("sweep=kbatch", "device=cpu2", "setup=acc2", "seed=0,1", "batch.micro_batch=8")
    ] == [
        32,
        32,
    ]


def test_kbatch_of_another_recipe() -> None:
    """The sweep has no recipe: it takes the one that is named, with that recipe's batch per device."""
    found = jobs("sweep=kbatch", "recipe=linear", "device=cpu2", "setup=one,acc4", "seed=0")
    assert [numbers(*job) for job in found] == [(1, 1, 1, 4), (2, 1, 4, 32)]


@pytest.mark.parametrize(
    ("sweep", "batches"), [("setups", [48, 48, 48, 48]), ("setups_per_device", [32, 64, 128, 256])]
)
@pytest.mark.parametrize("device", ["auto", "cpu4", "gpu4"])
def test_sweeps_over_workers(sweep: str, batches: list[int], device: str) -> None:
    """The same recipe on 1, 2, 4 and 8 workers of the chosen kind, the global batch or that per device held."""
    experiments = [prepared(*job) for job in jobs(f"sweep={sweep}", f"device={device}", "seed=1")]
    kind = "gpu" if device == "gpu4" else "cpu"
    assert [one.placement.label for one in experiments] == [kind, f"{kind}2", f"{kind}4", f"{kind}8"]
    assert [one.plan.global_batch for one in experiments] == batches
    assert {one.plan.k for one in experiments} == {one.plan.accumulation_steps for one in experiments} == {1}


def test_other_numbers_of_workers() -> None:
    """The bundle's list of workers gives way to one's own."""
    assert [numbers(*job)[0] for job in jobs("sweep=setups", "device.workers=1,3")] == [1, 3]


# --- experiments --------------------------------------------------------------------------------------------


def test_forum_thread() -> None:
    """128 sentences per device padded to 64 tokens, GPT-2, 2e-5 for any number of devices, two epochs."""
    for device, workers in (("cpu", 1), ("gpu4", 4)):
        config = settings(compose(["experiment=forum_thread", f"device={device}"]))
        assert (config.recipe["name"], config.recipe["model"]["name"]) == ("cola", "gpt2")
        assert (config.recipe["max_length"], config.recipe["padding"]) == (64, "max_length")
        assert (config.optimizer.lr, config.scaling.rule.name, config.epochs) == (2e-5, "none", 2)
        assert (config.batch.mode.name, config.batch.micro_batch) == ("per_device", 128)
        assert config.device.workers == workers
    second = settings(compose(["experiment=forum_thread", "recipe.padding=longest", "recipe.model.init=random"]))
    assert (second.recipe["padding"], second.recipe["model"]["init"]) == ("longest", "random")
