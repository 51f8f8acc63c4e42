"""Composing the configuration: every file of `conf/`, every promised setting, and what is said of misspelt ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config.compose import compose, conf_dir, known_keys, settings, sweep_points
from runner.errors import UserError
from runner.plan.experiment import Experiment, prepare
from tests.recipes import zoo
from tests.recipes.letters import save_gpt2
from tests.tiny_models import save_bert

GROUPS = (
    *("recipe", "device", "batch", "accumulation", "precision", "sync", "scaling", "optimizer", "schedule"),
    *("tracking", "equivalence", "setup", "experiment", "sweep"),
)
FILES = sorted(path.relative_to(conf_dir()).with_suffix("").as_posix() for path in conf_dir().rglob("*.yaml"))
CHOICES = [tuple(name.split("/", 1)) for name in FILES if "/" in name]
#: The setting in which a choice of these groups states its own name.
NAMED_BY = {
    "batch": "mode",
    "accumulation": "mode",
    "precision": "name",
    "sync": "policy",
    "scaling": "rule",
    "optimizer": "name",
    "schedule": "name",
    "tracking": "kind",
    "equivalence": "mode",
}


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What choices need to be prepared without the Hub: small files, and a folder with a model."""
    folder = tmp_path_factory.mktemp("offline")
    model = save_bert(folder / "model", ["It ran.", "It fell.", *zoo.texts()], positions=384)
    rows = "".join(f"It ran.\tIt fell.\t{label}\n" for label in ("neutral", "entailment", "contradiction", "-"))
    contents = {
        "acceptable.tsv": "gj04\t1\t\tThe book fell.\ngj04\t0\t*\tThe book felled.\n" * 30,
        "pairs.tsv": "premise\thypothesis\tlabel\n" + 20 * rows,
        "lines.txt": "It ran.\n" * 200,
    }
    for name, content in contents.items():
        (folder / name).write_text(content)

    def given(train: Path, evaluation: Path, model: Path = model) -> list[str]:
        return [f"recipe.data.train={train}", f"recipe.data.eval={evaluation}", f"recipe.model.name={model}"]

    acceptable, pairs = (given(folder / name, folder / name) for name in ("acceptable.tsv", "pairs.tsv"))
    lines = given(folder / "lines.txt", folder / "lines.txt", save_gpt2(folder / "gpt2", positions=128))
    squad = given(*zoo.write(folder))
    return {"cola": acceptable, "forum_thread": acceptable, "mnli": pairs, "causal_lm": lines, "squad": squad}


@pytest.fixture
def accelerate_file(tmp_path: Path) -> Path:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: bf16\n")
    return path


def prepared(*overrides: str) -> Experiment:
    return prepare(settings(compose(overrides)))


# --- the files ----------------------------------------------------------------------------------------------


def test_every_file_is_composed_by_a_test() -> None:
    """No file lies outside the groups, so the next test composes each file but the defaults themselves."""
    assert len(CHOICES) + 1 == len(FILES) == len(list(conf_dir().rglob("*.*")))
    assert len(set(CHOICES)) == len(CHOICES)
    assert set(FILES) - {"/".join(choice) for choice in CHOICES} == {"config"}
    assert all("/" not in choice for _, choice in CHOICES), "a nested group: compose it as group/choice"


def test_groups_and_devices_of_the_contract() -> None:
    """All groups that the design promises are there, and all devices."""
    assert {group for group, _ in CHOICES} >= set(GROUPS)
    devices = {choice for group, choice in CHOICES if group == "device"}
    assert devices >= {"auto", "cpu", "cpu2", "cpu4", "cpu8", "gpu", "gpu2", "gpu4", "gpu8", "tpu8"}


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_can_be_composed_and_prepared(
    group: str,
    choice: str,
    offline: dict[str, list[str]],
    accelerate_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every file composes with the defaults into checked settings, plan and certificate, and is what it is called."""
    gpus = 8 if (group, choice) == ("precision", "tf32") else 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
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
    elif choice in ("diloco", "slowmo"):
        assert config.sync.policy.name == "outer"
    elif group in NAMED_BY:
        assert getattr(getattr(config, group), NAMED_BY[group]).name == choice


def test_defaults() -> None:
    """Without a word the runner trains one fp32 worker per device on a global batch of 48, synchronously."""
    config = settings(compose([]))
    assert (config.seed, config.max_steps, config.sync.k, config.accumulation.steps) == (0, None, 1, 1)
    assert (config.batch.mode.name, config.batch.global_batch) == ("fixed_global", 48)
    assert (config.device.kind.name, config.device.workers, config.precision.name.name) == ("auto", None, "fp32")
    assert (config.scaling.rule.name, config.tracking.kind.name) == ("linear", "mlflow")


def test_recipe_brings_what_it_was_tuned_with() -> None:
    """Learning rate, reference batch, epochs, warm-up and metric follow the recipe."""
    config = settings(compose(["recipe=cola"]))
    assert (config.optimizer.lr, config.scaling.reference_batch, config.epochs) == (1e-4, 32, 2)
    assert (config.schedule.warmup_share, config.evaluation.metric) == (0.06, "matthews")
    assert config.evaluation.micro_batch == 64
    large_outputs = settings(compose(["recipe=causal_lm"]))
    assert (large_outputs.batch.global_batch, large_outputs.evaluation.micro_batch) == (8, 16)
    assert settings(compose(["recipe=causal_lm", "evaluation.micro_batch=2"])).evaluation.micro_batch == 2


@pytest.mark.parametrize(
    ("overrides", "label", "k", "accumulation_steps"),
    [
        (["setup=one"], "cpu", 1, 1),
        (["setup=k4", "device=cpu4"], "cpu4", 4, 1),
        (["setup=acc4", "device=cpu2"], "cpu2", 1, 4),
        (["experiment=local_sgd"], "tpu8", 4, 1),
        # The command line has the last word.
        (["setup=k4", "sync.k=2", "device=cpu2"], "cpu2", 2, 1),
        (["experiment=local_sgd", "device=cpu2"], "cpu2", 4, 1),
        (["setup=acc4", "accumulation.steps=2"], "cpu", 1, 2),
        (["setup=acc4", "experiment=local_sgd", "batch.global_batch=64"], "tpu8", 1, 4),
        (["experiment=local_sgd", "setup=k8"], "tpu8", 8, 1),  # a setup says how an experiment is done
    ],
)
def test_bundles(
    overrides: list[str], label: str, k: int, accumulation_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle sets what it says, together with other choices, and gives way to the command line."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    experiment = prepared(*overrides)
    assert experiment.placement.label == label
    assert (experiment.plan.k, experiment.plan.accumulation_steps) == (k, accumulation_steps)


# --- settings of the contract -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "in_config", "in_plan"),
    [
        ("sync.k=4", ("sync.k", 4), ("k", 4)),
        ("seed=1", ("seed", 1), None),
        ("epochs=1", ("epochs", 1), ("optimizer_steps", 167)),  # 8000 ÷ 48, the tail counted
        ("max_steps=50", ("max_steps", 50), ("optimizer_steps", 50)),
        ("device.workers=3", ("device.workers", 3), ("world_size", 3)),
        ("device.length_buckets=[8,16,32]", ("device.length_buckets", [8, 16, 32]), None),
        ("batch.global_batch=96", ("batch.global_batch", 96), ("lr_factor", 2.0)),
        ("accumulation.steps=2", ("accumulation.steps", 2), ("micro_batch", 24)),
        ("optimizer.lr=2e-5", ("optimizer.lr", 2e-5), ("lr", 2e-5)),
        ("scaling.reference_batch=24", ("scaling.reference_batch", 24), ("lr_factor", 2.0)),
        ("schedule.warmup_share=0", ("schedule.warmup_share", 0.0), ("warmup_steps", 0)),
        ("batch.drop_last=true", ("batch.drop_last", True), ("optimizer_steps", 6 * 166)),
    ],
)
def test_setting_reaches_config_and_plan(
    override: str, in_config: tuple[str, Any], in_plan: tuple[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each promised setting works on the defaults and arrives where it takes effect."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    experiment = prepared(override)
    value: Any = experiment.config
    for name in in_config[0].split("."):
        value = getattr(value, name)
    assert value == in_config[1]
    assert type(value) is type(in_config[1])
    if in_plan is not None:
        assert getattr(experiment.plan, in_plan[0]) == pytest.approx(in_plan[1])


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("MLFLOW_TRACKING_URI", "http://somewhere:5000", "tracking.uri"),
        ("MLFLOW_EXPERIMENT_NAME", "mine", "tracking.experiment"),
        ("RUNNER_CACHE", "/somewhere/else", "cache_dir"),
    ],
)
def test_environment_variables(variable: str, value: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own variables and the cache's are honoured, and give way to the command line."""
    monkeypatch.setenv(variable, value)
    for overrides, expected in (([], value), ([f"{setting}=other"], "other")):
        found: Any = settings(compose(overrides))
        for name in setting.split("."):
            found = getattr(found, name)
        assert found == expected


def test_runs_have_folders_of_their_own() -> None:
    """A run's folder is named by recipe, time and a suffix that differs from run to run, and stays during one."""
    composed = [compose([]) for _ in range(3)]
    folders = [cfg.hydra.run.dir for cfg in composed]
    pattern = r"outputs/acceptability/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{4}"
    assert all(re.fullmatch(pattern, folder) for folder in folders)
    assert len({folder[-4:] for folder in folders}) > 1
    assert [cfg.hydra.run.dir[-4:] for cfg in composed] == [folder[-4:] for folder in folders]


def test_choices_of_ones_own(tmp_path: Path) -> None:
    """A folder given with --config-dir adds choices to a group, and the misspelt name of one is found there."""
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "workstation.yaml").write_text("kind: gpu\nworkers: 3\nrehearse: auto\n")
    config = settings(compose(["device=workstation"], [str(tmp_path)]))
    assert (config.device.kind.name, config.device.workers) == ("gpu", 3)
    with pytest.raises(UserError, match="did you mean 'workstation'"):
        compose(["device=workstatoin"], [str(tmp_path)])
    with pytest.raises(UserError, match="device=workstation is not a choice"):
        compose(["device=workstation"])


# --- what is said of mistakes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys() -> list[str]:
    return known_keys()


def said(*overrides: str) -> str:
    """The one sentence with which settings are refused."""
    with pytest.raises(UserError) as caught:
        settings(compose(overrides))
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        # top-level keys
        ("epoch=3", "epochs"),
        ("sed=1", "seed"),
        ("max_step=5", "max_steps"),
        ("+epochz=3", "epochs"),
        # keys of a group
        ("sync.K=4", "sync.k"),
        ("batch.globalbatch=48", "batch.global_batch"),
        ("optimizer.weight_dcay=0", "optimizer.weight_decay"),
        ("evaluation.metrik=loss", "evaluation.metric"),
        ("recipe.model.layer=3", "recipe.model.layers"),
        # the key without its group, or in the wrong one
        ("global_batch=96", "batch.global_batch"),
        ("k=4", "sync.k"),
        ("workers=4", "device.workers"),
        ("schedule.reference_batch=32", "scaling.reference_batch"),
        # groups
        ("optimiser=sgd", "optimizer"),
        ("setups=one", "setup"),
    ],
)
def test_misspelt_settings(override: str, nearest: str, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt key or group is named, and the one that was meant comes first."""
    monkeypatch.setattr(
        "runner.config.compose.known_keys", lambda overrides: keys
    )  # the same here, and slow to compose
    key = override.lstrip("+").partition("=")[0]
    assert said(override).startswith(f"there is no setting '{key}'; did you mean '{nearest}'")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("recipe=colla", "cola"),
        ("device=cpu3", "cpu"),
        ("device=gpu5", "gpu"),
        ("batch=fixed", "fixed_global"),
        ("accumulation=autos", "auto"),
        ("precision=bf61", "bf16"),
        ("scaling=lin", "linear"),
        ("optimizer=adam", "adamw"),
        ("schedule=cosin", "cosine"),
        ("tracking=mlfow", "mlflow"),
        ("setup=acc", "acc4"),
        ("experiment=local", "local_sgd"),
        ("sweep=setup", "setups"),
    ],
)
def test_misspelt_choices(override: str, nearest: str) -> None:
    """A misspelt choice is named with its group, and the one that was meant is proposed."""
    group = override.partition("=")[0]
    message = said(override)
    assert message.startswith(f"{override} is not a choice of the group '{group}'; did you mean '")
    assert f"'{nearest}'" in message


def test_choice_that_reads_like_none() -> None:
    """Where nothing is near, all choices of a small group are listed, without the schema."""
    message = said("schedule=xyz")
    assert message.endswith("; there are: constant, cosine, linear")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sync.k=two", ("sync.k", "'two'", "whole number")),
        ("sync.k=1.5", ("sync.k", "'1.5'", "whole number")),
        ("seed=", ("seed", "whole number")),
        ("epochs=null", ("epochs", "null")),
        ("optimizer.lr=fast", ("optimizer.lr", "'fast'", "number")),
        ("optimizer.betas=[0.9,x]", ("optimizer.betas", "'x'", "number")),
        ("compile=maybe", ("compile", "'maybe'", "true", "false")),
        ("device.kind=npu", ("device.kind", "'npu'", "auto, cpu, gpu, tpu")),
        ("scaling.rule=log", ("scaling.rule", "'log'", "linear, sqrt, none")),
        ("seed=-1", ("seed=-1", "at least 0")),
        ("batch.micro_batch=8", ("batch.micro_batch=8", "batch.global_batch", "batch=per_device")),
        ("seed=${nope}", ("seed", "'nope'")),
        ("seed", ("'seed'", "setting=value")),
        ("seed=[1", ("'seed=[1'", "setting=value")),
        ("cache_dir=~/x", ("'cache_dir=~/x'", "write $HOME for ~")),
        ("trusted_packages=recipes", ("trusted_packages",)),
        ("device.length_buckets=[]", ("device.length_buckets=[]", "[32,64,128]", "null")),
        ("device.length_buckets=[0,16]", ("device.length_buckets=[0, 16]", "at least 1 token")),
        ("device.length_buckets=[16,-1]", ("device.length_buckets=[16, -1]", "at least 1 token")),
        ("device.length_buckets=[16,x]", ("device.length_buckets", "'x'", "whole number")),
        ("device.length_buckets=[16,1.5]", ("device.length_buckets", "'1.5'", "whole number")),
        ("device.length_buckets=[16,null]", ("device.length_buckets[1]",)),
        ("device.length_buckets=16", ("device.length_buckets", "it is a list (device.length_buckets=[…,…])")),
        ("device.length_buckets=long", ("device.length_buckets", "it is a list (device.length_buckets=[…,…])")),
        ("device.length_buckets=16,32", ("device.length_buckets=16,32", "write device.length_buckets=[16,32]", "-m")),
        ("device.length_buckets='[16]'", ("device.length_buckets", "list")),
        ("device.length_buckets={a:16}", ("device.length_buckets",)),
    ],
)
def test_wrong_values(override: str, words: tuple[str, ...]) -> None:
    """A value of the wrong type, outside its range or unreadable is refused by its setting, with what would do."""
    message = said(override)
    assert message.startswith(words[0])
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("override", "word"),
    [
        pytest.param("+optimizer.foo=1", "optimizer.foo", id="added-key"),  # FrozenInstanceError
        pytest.param("+sync.kk=1", "sync.k", id="added-misspelt-key"),  # FrozenInstanceError
        pytest.param("~seed", "seed", id="deleted-key"),  # names no setting
        pytest.param("device=null", "device", id="null-choice"),  # names no setting
        pytest.param("=3", "=3", id="no-key"),  # names no setting
    ],
)
def test_mistakes_that_are_not_yet_said_well(override: str, word: str) -> None:
    """Keys added to a group, deleted keys and empty choices are refused by name too."""
    message = said(override)
    assert word in message
    assert "'<=' not supported" not in message


# --- sweeps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["device=cpu,cpu2,tpu8"], {"device": {"cpu", "cpu2", "tpu8"}}),
        (["seed=range(0,4)"], {"seed": {"0", "1", "2", "3"}}),
        (["seed=choice(3,5)", "sync.k=1,2,4"], {"seed": {"3", "5"}, "sync.k": {"1", "2", "4"}}),
        (["optimizer.lr=1e-3,1e-4", "seed=1,2", "epochs=1,2"], {"seed": {"1", "2"}, "epochs": {"1", "2"}}),
        (["optimizer.betas=[0.9,0.95],[0.8,0.9]"], {"optimizer.betas": {"[0.9,0.95]", "[0.8,0.9]"}}),
        (["setup=one,k4"], {"setup": {"one", "k4"}}),
    ],
)
def test_sweep_points_cover_every_value(overrides: list[str], values: dict[str, set[str]]) -> None:
    """Every swept value is in some point, each point has one value for each setting and can be composed."""
    points = [dict(o.split("=", 1) for o in point) for point in sweep_points(["max_steps=9", *overrides])]
    keys = {"max_steps", *(o.partition("=")[0] for o in overrides)}
    for key, expected in values.items():
        assert {point[key] for point in points} == expected
    for point in points:
        assert set(point) == keys
        assert point["max_steps"] == "9"
    settings(compose([f"{key}={value}" for key, value in points[-1].items()]))


def test_sweep_points_are_few() -> None:
    """A grid of 3 × 4 × 5 jobs is checked with a point for each value, not one for each job."""
    points = list(sweep_points(["seed=1,2,3", "sync.k=1,2,4,8", "epochs=1,2,3,4,5"]))
    assert len(points) == 1 + 2 + 3 + 4


def test_command_without_a_sweep_is_one_point() -> None:
    """Nothing swept leaves the overrides as they are; a value of several sweeps nothing if it is quoted."""
    assert list(sweep_points(["seed=1", "device=cpu"])) == [["seed=1", "device=cpu"]]
    assert list(sweep_points([])) == [[]]
    assert list(sweep_points(["tracking.run_name='a,b'"])) == [["tracking.run_name='a,b'"]]


def test_optimizing_sweepers_interval() -> None:
    """An interval, which only an optimizing sweeper can draw from, is checked at its start."""
    (point,) = sweep_points(["schedule.warmup_share=interval(0.1,0.3)"])
    assert settings(compose(point)).schedule.warmup_share == 0.1


def test_misspelt_value_in_a_sweep() -> None:
    """The last value of a sweep is checked as well as the first."""
    *good, bad = sweep_points(["device=cpu,cpu2,cpu3"])
    for point in good:
        compose(point)
    with pytest.raises(UserError, match="device=cpu3 is not a choice"):
        compose(bad)


def test_glob_sweep() -> None:
    """Hydra's glob() names choices by a pattern, and all of them are points."""
    assert {point[0] for point in sweep_points(["device=glob(cpu*)"])} == {
        "device=cpu",
        "device=cpu2",
        "device=cpu4",
        "device=cpu8",
    }


# --- known keys ---------------------------------------------------------------------------------------------


def test_known_keys(keys: list[str]) -> None:
    """All settings are known by their dotted paths, groups and empty settings among them, and Hydra's own are not."""
    expected = {"seed", "max_steps", "sync.k", "optimizer.lr", "device.workers", "recipe.data.seed", "cache_dir"}
    assert set(keys) >= expected | set(GROUPS)
    assert not [key for key in keys if key.startswith("hydra")]
    assert "schema" not in keys
