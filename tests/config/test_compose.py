"""Composing the configuration: every file of `conf/`, documented settings, and errors for misspelt ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore

from runner.config.compose import compose, conf_dir, known_keys, settings, sweep_points
from runner.config.plain import to_plain
from runner.config.schema import Config
from runner.config.setups import COUNTS
from runner.errors import UserError
from runner.plan.experiment import Experiment, prepare, prepare_for_plan
from tests.offline import offline_recipes

GROUPS = (
    *("recipe", "device", "batch", "accumulation", "precision", "sync", "scaling", "optimizer", "schedule"),
    *("adapter", "sharding", "tracking", "checkpoint", "equivalence", "hardware", "link"),
    *("setup", "experiment", "sweep"),
)
FILES = sorted(path.relative_to(conf_dir()).with_suffix("").as_posix() for path in conf_dir().rglob("*.yaml"))
CHOICES = [tuple(name.split("/", 1)) for name in FILES if "/" in name]
GENERATED = [("setup", f"{kind}{n}") for kind in ("acc", "k") for n in COUNTS]
#: The setting that holds the name of a choice of these groups.
NAMED_BY = {
    "batch": "mode",
    "accumulation": "mode",
    "precision": "name",
    "sync": "policy",
    "scaling": "rule",
    "optimizer": "name",
    "schedule": "name",
    "adapter": "kind",
    "sharding": "kind",
    "equivalence": "mode",
}


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return offline_recipes(tmp_path_factory.mktemp("offline"))


@pytest.fixture
def accelerate_file(tmp_path: Path) -> Path:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: bf16\n")
    return path


def prepared(*overrides: str) -> Experiment:
    return prepare(settings(compose(overrides)))


def trackers(config: Config) -> list[str]:
    return [name for name in ("mlflow", "tensorboard", "wandb") if getattr(config.tracking, name)]


def test_several_trackers() -> None:
    """Choices of a new run add up; those of a run that continues replace the ones that it had."""
    config = settings(compose(["tracking=[mlflow,tensorboard]", "tracking.run_name=mine"]))
    assert trackers(config) == ["mlflow", "tensorboard"]
    saved = to_plain(config)
    for overrides, expected in (
        ([], ["mlflow", "tensorboard"]),
        (["tracking=wandb"], ["wandb"]),
        (["tracking=[mlflow,wandb]"], ["mlflow", "wandb"]),
        (["tracking=none"], []),
        (["tracking.wandb=true"], ["mlflow", "tensorboard", "wandb"]),
    ):
        assert trackers(settings(compose(overrides, (), saved))) == expected
    with pytest.raises(UserError, match="tensorbord"):
        compose(["tracking=[mlflow,tensorbord]"])


def test_every_file_is_composed_by_a_test() -> None:
    """No file lies outside the groups, so the next test composes each file but the defaults themselves."""
    assert len(CHOICES) + 1 == len(FILES) == len(list(conf_dir().rglob("*.*")))
    assert set(FILES) - {"/".join(choice) for choice in CHOICES} == {"config"}
    assert {group for group, _ in CHOICES} == set(GROUPS)
    devices = {choice for group, choice in CHOICES if group == "device"}
    assert devices >= {"auto", "cpu", "cpu2", "cpu4", "cpu8", "gpu", "gpu2", "gpu4", "gpu8", "tpu8"}


@pytest.mark.parametrize(("group", "choice"), [*CHOICES, *GENERATED])
def test_every_choice_can_be_composed_and_prepared(
    group: str,
    choice: str,
    offline: dict[str, list[str]],
    accelerate_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every choice composes with the defaults into settings, plan and certificate, and sets what its name says."""
    gpus = 8 if (group, choice) == ("precision", "tf32") else 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    if group in ("hardware", "link"):
        _check_hardware(group, choice)
        return
    overrides = offline.get(choice, [])
    if choice == "from_accelerate":
        overrides = ["device=from_accelerate", f"device.file={accelerate_file}"]
    experiment = prepared(f"{group}={choice}", *overrides)
    assert experiment.plan.optimizer_steps > 0
    json.dumps([experiment.plan.as_json(), experiment.certificate.as_json()])
    config = experiment.config
    if choice == "from_accelerate":
        assert (config.device.kind.name, config.device.workers, config.precision.name.name) == ("cpu", 3, "bf16")
    elif group == "device" and choice != "auto":
        assert experiment.placement.label == choice
        assert experiment.placement.rehearsed is not choice.startswith("cpu")
    elif group == "recipe":
        assert config.recipe["name"] == choice
    elif choice == "streaming":
        assert config.sync.fragments == "auto"
    elif choice in ("diloco", "slowmo"):
        assert config.sync.policy.name == "outer"
    elif group in NAMED_BY:
        assert getattr(getattr(config, group), NAMED_BY[group]).name == choice
    elif group == "tracking":
        assert trackers(config) == ([] if choice == "none" else [choice])


def _check_hardware(group: str, choice: str) -> None:
    """Only runner.plan takes them. A link takes the place of the hardware's own."""
    chosen = [f"{group}={choice}", *(["hardware=t4"] if group == "link" else [])]
    hardware = prepare_for_plan(settings(compose(["device=gpu4", *chosen]))).config.hardware
    assert (hardware.name is None) is (choice == "none")
    if group == "link":
        assert hardware.name == "T4"
        assert ("PCIe 3.0" in str(hardware.link)) is (choice == "pcie3")
    if choice != "none":
        with pytest.raises(UserError, match=r"runner\.plan"):
            prepare(settings(compose(["device=gpu4", *chosen])))


def test_defaults() -> None:
    """One fp32 worker per device, a global batch of 48, synchronous."""
    config = settings(compose([]))
    assert (config.seed, config.max_steps, config.sync.k, config.accumulation.steps) == (0, None, 1, 1)
    assert (config.batch.mode.name, config.batch.global_batch) == ("fixed_global", 48)
    assert (config.device.kind.name, config.device.workers, config.precision.name.name) == ("auto", None, "fp32")
    assert (config.scaling.rule.name, trackers(config)) == ("auto", ["mlflow"])


def test_recipe_brings_what_it_was_tuned_with() -> None:
    config = settings(compose(["recipe=cola"]))
    assert (config.optimizer.lr, config.scaling.reference_batch, config.epochs) == (1e-4, 32, 2)
    assert (config.schedule.warmup_share, config.evaluation.metric) == (0.06, "matthews")
    assert config.evaluation.micro_batch == 64
    large_outputs = settings(compose(["recipe=causal_lm"]))
    assert (large_outputs.batch.global_batch, large_outputs.evaluation.micro_batch) == (8, 16)
    assert settings(compose(["recipe=causal_lm", "evaluation.micro_batch=2"])).evaluation.micro_batch == 2


def test_settings_reach_config_and_plan() -> None:
    experiment = prepared(
        *("device=cpu", "device.workers=3", "seed=1", "epochs=2", "max_steps=50", "sync.k=4", "accumulation.steps=2"),
        *("device.length_buckets=[8,16,32]", "batch.global_batch=96", "batch.drop_last=true", "optimizer.lr=2e-5"),
        *("scaling=linear", "scaling.reference_batch=24", "schedule.warmup_share=0", "recipe.data.train_samples=960"),
    )
    config, plan = experiment.config, experiment.plan
    assert (config.seed, config.device.length_buckets, config.optimizer.lr) == (1, [8, 16, 32], 2e-5)
    assert (plan.world_size, plan.k, plan.global_batch, plan.micro_batch) == (3, 4, 96, 16)
    assert (plan.epochs, plan.optimizer_steps, plan.warmup_steps, plan.drop_last) == (2, 20, 0, True)
    assert plan.lr == pytest.approx(4 * 2e-5)


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("MLFLOW_TRACKING_URI", "http://somewhere:5000", "tracking.uri"),
        ("MLFLOW_EXPERIMENT_NAME", "mine", "tracking.experiment"),
        ("RUNNER_CACHE", "/somewhere/else", "cache_dir"),
    ],
)
def test_environment_variables(variable: str, value: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of MLflow and of the cache set defaults; the command line takes precedence."""
    monkeypatch.setenv(variable, value)
    for overrides, expected in (([], value), ([f"{setting}=other"], "other")):
        found: Any = settings(compose(overrides))
        for name in setting.split("."):
            found = getattr(found, name)
        assert found == expected


def test_runs_have_separate_folders() -> None:
    """A run's folder is named by recipe, time and a random suffix, which stays the same during the run."""
    composed = [compose([]) for _ in range(3)]
    folders = [cfg.hydra.run.dir for cfg in composed]
    pattern = r"outputs/acceptability/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{4}"
    assert all(re.fullmatch(pattern, folder) for folder in folders)
    assert len({folder[-4:] for folder in folders}) > 1
    assert [cfg.hydra.run.dir[-4:] for cfg in composed] == [folder[-4:] for folder in folders]


@pytest.mark.parametrize("name", ["mine", "für (uns), it's=1"])
def test_config_dir(tmp_path: Path, name: str) -> None:
    """A folder given with --config-dir adds choices to a group, also to the suggestions for a misspelt name."""
    (tmp_path / name / "device").mkdir(parents=True)
    (tmp_path / name / "device" / "workstation.yaml").write_text("kind: gpu\nworkers: 3\nrehearse: auto\n")
    config = settings(compose(["device=workstation"], [str(tmp_path / name)]))
    assert (config.device.kind.name, config.device.workers) == ("gpu", 3)
    with pytest.raises(UserError, match="did you mean 'workstation'"):
        compose(["device=workstatoin"], [str(tmp_path / name)])
    with pytest.raises(UserError, match="device=workstation is not a choice"):
        compose(["device=workstation"])


def test_a_wrong_value_under_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """OmegaConf then keeps the causes of its errors, which can be a circle."""
    monkeypatch.setenv("OC_CAUSE", "1")
    with pytest.raises(UserError, match=r"optimizer\.betas.*'x'"):
        settings(compose(["optimizer.betas=[0.9,x]"]))


@pytest.fixture(scope="module")
def keys() -> list[str]:
    return known_keys()


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["device=glob(cpu*)"], {"device": {"cpu", "cpu2", "cpu4", "cpu8"}}),
        (["seed=range(0,4)", "sync.k=1,2,4"], {"seed": {"0", "1", "2", "3"}, "sync.k": {"1", "2", "4"}}),
        (["optimizer.betas=[0.9,0.95],[0.8,0.9]", "setup=one,k4"], {"setup": {"one", "k4"}}),
    ],
)
def test_sweep_points_cover_every_value(overrides: list[str], values: dict[str, set[str]]) -> None:
    """Every swept value is in some point; each point has one value for each setting and can be composed."""
    points = [dict(o.split("=", 1) for o in point) for point in sweep_points(["max_steps=9", *overrides])]
    keys = {"max_steps", *(o.partition("=")[0] for o in overrides)}
    for key, expected in values.items():
        assert {point[key] for point in points} == expected
    for point in points:
        assert set(point) == keys
        assert point["max_steps"] == "9"
    settings(compose([f"{key}={value}" for key, value in points[-1].items()]))


def test_sweep_points_are_few() -> None:
    """A grid of 3 × 4 × 5 jobs has a point for each value, not for each job."""
    points = list(sweep_points(["seed=1,2,3", "sync.k=1,2,4,8", "epochs=1,2,3,4,5"]))
    assert len(points) == 1 + 2 + 3 + 4


def test_command_without_a_sweep_is_one_point() -> None:
    assert list(sweep_points(["seed=1", "device=cpu"])) == [["seed=1", "device=cpu"]]
    assert list(sweep_points(["tracking.run_name='a,b'"])) == [["tracking.run_name='a,b'"]]


def test_optimizing_sweepers_interval() -> None:
    """An interval, from which only an optimizing sweeper can draw, is checked at its start."""
    (point,) = sweep_points(["schedule.warmup_share=interval(0.1,0.3)"])
    assert settings(compose(point)).schedule.warmup_share == 0.1


@pytest.mark.parametrize(("choice", "extra"), [("joblib", "joblib"), ("submitit_slurm", "slurm")])
def test_a_launcher_that_is_not_installed(choice: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names the extra that has it."""
    compose([])  # Hydra's plugins register their choices
    monkeypatch.delitem(ConfigStore.instance().repo["hydra"]["launcher"], f"{choice}.yaml")
    with pytest.raises(UserError, match=rf"hydra/launcher={choice} .*pip install -e '\.\[{extra}\]'"):
        compose([f"hydra/launcher={choice}"])


def test_known_keys(keys: list[str]) -> None:
    """All settings by their dotted paths, and the groups; nothing of Hydra."""
    expected = {"seed", "max_steps", "sync.k", "optimizer.lr", "device.workers", "recipe.data.seed", "cache_dir"}
    assert set(keys) >= expected | set(GROUPS)
    assert not [key for key in keys if key.startswith("hydra")]
    assert "schema" not in keys
