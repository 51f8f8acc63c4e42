"""Bundles: the plan of every setup and experiment, and the jobs of every sweep, on any device."""

from __future__ import annotations

import pytest
import torch

from runner.config.compose import compose, parsed, settings, with_sweeper_params
from runner.plan.experiment import Experiment, prepare
from runner.tools.sweep.grid import grid_of
from tests.configured import configured, prepared

#: Setup -> k and accumulation steps, on all workers of the device.
ALL_WORKERS = {
    **{f"acc{steps}": (1, steps) for steps in (1, 2, 4, 8, 16)},
    **{f"k{k}": (k, 1) for k in (1, 2, 4, 8, 16)},
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def numbers(experiment: Experiment) -> tuple[int, int, int, int]:
    """Workers, k, accumulation steps and global batch."""
    plan = experiment.plan
    return plan.world_size, plan.k, plan.accumulation_steps, plan.global_batch


def jobs(*overrides: str) -> list[str]:
    """The overrides of each job of a sweep."""
    fixed = [override for override in overrides if "," not in override]
    hydra = compose(fixed).hydra
    found = grid_of(parsed(with_sweeper_params(list(overrides), hydra)), hydra).jobs
    assert found is not None
    return list(found)


@pytest.mark.parametrize("setup", ALL_WORKERS)
def test_setups_of_all_workers(setup: str) -> None:
    """Each sets accumulation or k and keeps the device; under per_device only accumulation changes the global batch."""
    k, steps = ALL_WORKERS[setup]
    found = prepared(f"setup={setup} device=cpu2 batch=per_device batch.micro_batch=8")
    assert numbers(found) == (2, k, steps, 16 * steps)


@pytest.mark.parametrize(
    ("overrides", "label", "expected"),
    [
        ("setup=one device=tpu8 batch=per_device", "tpu", (1, 1, 1, 32)),
        ("setup=one device=auto batch=per_device", "cpu", (1, 1, 1, 32)),
        # Accumulation is synchronous under a policy whose own k is 16; k keeps the policy.
        ("setup=acc4 sync=gradients device=cpu2 batch=per_device", "cpu2", (2, 1, 4, 256)),
        ("setup=k4 sync=accumulated device=cpu2", "cpu2", (2, 4, 1, 48)),
        ("experiment=local_sgd device=tpu8", "tpu8", (8, 4, 1, 48)),
        ("experiment=local_sgd setup=k8 device=cpu2", "cpu2", (2, 8, 1, 48)),  # a setup executes an experiment
    ],
)
def test_bundles(overrides: str, label: str, expected: tuple[int, int, int, int]) -> None:
    experiment = prepared(overrides)
    assert (experiment.placement.label, numbers(experiment)) == (label, expected)


def test_the_command_line_takes_precedence() -> None:
    config = settings(compose(["setup=acc4", "accumulation.steps=2", "sync.k=2", "device=cpu2"]))
    assert (config.accumulation.steps, config.sync.k) == (2, 2)
    assert settings(compose(["setup=one", "device.workers=2", "device=cpu8"])).device.workers == 2
    assert settings(compose(["experiment=local_sgd"])).device.workers == 8


def test_kbatch() -> None:
    """`sweep=kbatch`: every setup with three seeds, on any device, with one batch per device."""
    found = jobs("sweep=kbatch", "device=gpu4")
    assert len(found) == 11 * 3
    assert {part for job in found for part in job.split() if part.startswith("setup=")} == {
        f"setup={name}" for name in ("one", *ALL_WORKERS)
    }
    seed_0 = {numbers(prepared(f"{job} device=gpu4")) for job in found if "seed=0" in job}
    assert seed_0 == {(1, 1, 1, 32), *((4, k, steps, 128 * steps) for k, steps in ALL_WORKERS.values())}


def test_lists_on_the_command_line_replace_those_of_the_bundle() -> None:
    found = jobs("sweep=kbatch", "recipe=linear", "device=cpu2", "setup=one,acc4", "seed=0")
    assert [numbers(prepare(settings(compose(job.split())))) for job in found] == [(1, 1, 1, 4), (2, 1, 4, 32)]
    assert len(jobs("sweep=kbatch", "seed=7")) == 11


@pytest.mark.parametrize(
    ("sweep", "batches"), [("setups", [48, 48, 48, 48]), ("setups_per_device", [32, 64, 128, 256])]
)
def test_sweeps_over_workers(sweep: str, batches: list[int]) -> None:
    """1, 2, 4 and 8 workers of the chosen kind, with one global batch or one batch per device."""
    experiments = [prepared(f"{job} device=gpu4") for job in jobs(f"sweep={sweep}", "device=gpu4", "seed=1")]
    assert [one.placement.label for one in experiments] == ["gpu", "gpu2", "gpu4", "gpu8"]
    assert [one.plan.global_batch for one in experiments] == batches
    assert {(one.plan.k, one.plan.accumulation_steps) for one in experiments} == {(1, 1)}


def test_forum_thread() -> None:
    """128 sentences per device padded to 64 tokens, GPT-2, 2e-5 for any number of devices, two epochs."""
    for device, workers in (("cpu", 1), ("gpu4", 4)):
        config = configured(f"experiment=forum_thread device={device}")
        assert (config.recipe["name"], config.recipe["model"]["name"]) == ("cola", "gpt2")
        assert (config.recipe["max_length"], config.recipe["padding"]) == (64, "max_length")
        assert (config.optimizer.lr, config.scaling.rule.name, config.epochs) == (2e-5, "none", 2)
        assert (config.batch.mode.name, config.batch.micro_batch) == ("per_device", 128)
        assert config.device.workers == workers
