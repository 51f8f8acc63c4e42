"""Compose the configuration with Hydra, and explain in one sentence what is wrong with it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import secrets
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import accelerate
from runner.config.schema import Config, Tracking, hydra_schema
from runner.config.setups import store_setups
from runner.config.trust import refuse_code, typed_settings
from runner.errors import UserError, did_you_mean, first_line, not_installed

CONFIG_NAME = "config"
#: The settings of a run that has ended, to compose others from.
_SAVED = "saved"

#: Names of settings in other tools, where the spelling does not lead to its name here.
ELSEWHERE = {
    "batch_size": "batch.global_batch",
    "bf16": "precision=bf16",
    "eval_steps": "evaluation.every_steps",
    "fp16": "precision=fp16",
    "fsdp": "sharding=fsdp",
    "gradient_accumulation_steps": "accumulation.steps",
    "learning_rate": "optimizer.lr",
    "logging_steps": "log_every",
    "load_in_4bit": "adapter=qlora",
    "lora": "adapter=lora",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_r": "adapter.rank",
    "lr": "optimizer.lr",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "optimizer.clip_norm",
    "max_seq_length": "recipe.max_length",
    "mixed_precision": "precision",
    "model": "recipe.model.name",
    "model_name_or_path": "recipe.model.name",
    "nproc_per_node": "device.workers",
    "num_processes": "device.workers",
    "num_train_epochs": "epochs",
    "output_dir": "hydra.run.dir",
    "per_device_train_batch_size": "batch.micro_batch",
    "resume_from_checkpoint": "resume",
    "save_steps": "checkpoint.every_steps",
    "use_peft": "adapter=lora",
    "train_batch_size": "batch.global_batch",
    "warmup_ratio": "schedule.warmup_share",
}


#: Choices that packages add to Hydra -> the extra in pyproject.toml that has the package.
_EXTRAS = {
    "hydra/launcher=joblib": "joblib",
    "hydra/launcher=submitit_local": "slurm",
    "hydra/launcher=submitit_slurm": "slurm",
    "hydra/sweeper=optuna": "optuna",
}


def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed from a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def register() -> None:
    """Register the schema and the runner's resolvers with Hydra. Calling it twice is harmless."""
    ConfigStore.instance().store(name="schema", node=hydra_schema())
    store_setups(ConfigStore.instance())
    # Two runs that start in the same second must not share a folder.
    OmegaConf.register_new_resolver("suffix", lambda: secrets.token_hex(2), use_cache=True, replace=True)


@contextlib.contextmanager
def _conf() -> Iterator[None]:
    """Hydra's compose API on the runner's own configuration folder."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="runner"):
        yield


def hydra_quoted(text: str) -> str:
    """`text` as a value of an override, where Hydra's grammar allows any character in quotes."""
    escaped = text.replace("'", r"\'")
    return f"'{escaped}'"


def compose(
    overrides: Sequence[str], config_dirs: Sequence[str] = (), saved: Mapping[str, Any] | None = None
) -> DictConfig:
    """The composed configuration, Hydra's own node included.

    `config_dirs`: further folders to search for choices, as given by `--config-dir`. `saved`: the settings of a run, to
    start from instead of the defaults. Raises UserError, also for a file there that sets what can run code.
    """
    name = CONFIG_NAME
    if saved is not None:
        name = _SAVED
        # A choice, by default none, comes after the run's settings and so replaces them. The device comes last, because
        # some of its choices override another group.
        if any(override.key_or_group == "tracking" for override in parsed(overrides)):
            saved = {name: value for name, value in saved.items() if name != "tracking"}  # choices of trackers add up
        groups = [path.name for path in sorted(conf_dir().iterdir()) if path.is_dir() and path.name != "device"]
        defaults = ["schema", "_self_", *({group: None} for group in (*groups, "device"))]
        own = OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{CONFIG_NAME}.yaml"))
        assert isinstance(own, dict)
        # Where files are written is not up to the run's folder.
        saved = {"cache_dir": own["cache_dir"], **saved}
        ConfigStore.instance().store(name=_SAVED, node={"defaults": defaults, **saved})
    if config_dirs:
        folders = ",".join(hydra_quoted(f"file://{Path(folder).resolve()}") for folder in config_dirs)
        overrides = [f"hydra.searchpath=[{folders}]", *overrides]
    try:
        with _conf():
            _check_files(overrides)
            return hydra_compose(name, list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: Hydra's answer to `=3`
        raise composition_error(error, overrides, name) from error


def _check_files(overrides: Sequence[str]) -> None:
    """Let Hydra refuse files from outside `conf/` that set what can run code, as it loads them."""
    loader = GlobalHydra.instance().config_loader()
    typed = typed_settings(OverridesParser.create(loader).parse_overrides(list(overrides)))
    load = loader._load_single_config

    def checked(default: Any, repo: Any) -> Any:
        result = load(default, repo)  # with the file's content where its package puts it
        if "command-line" in result.provider:
            refuse_code(f"{result.path}/{default.config_path}.yaml", result.config, typed)
        return result

    loader._load_single_config = checked


def settings(cfg: DictConfig) -> Config:
    """The typed, checked, frozen settings of a composed configuration. Raises UserError."""
    cfg = cfg.copy()
    # Hydra's own node holds no setting of the experiment, and cannot be resolved outside one of its jobs.
    OmegaConf.set_struct(cfg, False)
    cfg.pop("hydra", None)
    OmegaConf.set_readonly(cfg, True)
    _check_keys(cfg, Config, "")
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise composition_error(error) from error
    assert isinstance(config, Config)
    return accelerate.apply(config)


def tracking_of(cfg: DictConfig) -> Tracking:
    """The tracking settings of a composed configuration, even if something else in it is wrong."""
    tracking = OmegaConf.to_object(cfg.tracking)
    assert isinstance(tracking, Tracking)
    return tracking


def _check_keys(node: DictConfig, kind: Any, prefix: str) -> None:
    """Refuse keys that `+` has added to the schema's, and keys that `~` has removed."""
    expected = {field.name for field in dataclasses.fields(kind)}
    present = set(map(str, node))
    for key in sorted(present - expected):
        raise _unknown_key(f"{prefix}{key}", ())
    for key in sorted(expected - present):
        raise UserError(f"~{prefix}{key} removes a setting that is required: leave it out")
    for name, child in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(child):
            _check_keys(node[name], child, f"{prefix}{name}.")


def sweep_points(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Override lists that together use every value of every swept setting at least once.

    A sweep's grid can be large. Composing each value once, with the first value of the other settings, finds every
    misspelt setting or choice before the first job starts.
    """
    values = [_values(o) if o.is_sweep_override() else [o.input_line or ""] for o in parsed(overrides)]
    first = [choices[0] for choices in values]
    yield first
    for number, choices in enumerate(values):
        for value in choices[1:]:
            yield [*first[:number], value, *first[number + 1 :]]


def group_points(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Override lists with every combination of the swept choices of groups, which decide the files that are loaded."""
    given = parsed(overrides)
    fixed = [o.input_line or "" for o in given if not o.is_sweep_override()]
    swept = [_values(o)[: None if _is_group(o) else 1] for o in given if o.is_sweep_override()]
    return (fixed + list(point) for point in itertools.product(*swept))


def _is_group(override: Override) -> bool:
    key = override.get_key_element().lstrip("+")
    kind = typing.get_type_hints(Config).get(key, Any)
    return "." not in key and (kind is Any or dataclasses.is_dataclass(kind))


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_discrete_sweep():  # interval(): only optimizing sweepers accept it, and draw the values
        return [f"{key}={override.value().start}"]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides as Hydra parses them, including sweeps over values. Raises UserError."""
    with _conf():
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # glob() searches the config folders
        try:
            return parser.parse_overrides(list(overrides))
        except HydraException as error:
            raise composition_error(error) from error


def with_sweeper_params(overrides: Sequence[str], hydra: DictConfig) -> list[str]:
    """`overrides`, preceded by what `hydra.sweeper.params` (set by `sweep=…`) adds to them."""
    given = {override.partition("=")[0] for override in overrides}
    params = hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in params.items() if key not in given), *overrides]


def composition_error(error: Exception, overrides: Sequence[str] = (), name: str = CONFIG_NAME) -> UserError:
    """One sentence for what Hydra and OmegaConf report in several lines, with the nearest valid names.

    `overrides`: what was composed; the groups chosen in it decide which names are valid. `name`: of the configuration.
    """
    chain: list[BaseException] = [error]
    # Under a debugger, a profiler or coverage, OmegaConf makes circles of causes.
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for one in chain:
        if isinstance(one, UserError):
            return one
        if isinstance(one, MissingConfigException) and one.missing_cfg_file:
            return _unknown_choice(one)
    if match := re.search(r"Could not override '([^'@]+)", "\n".join(map(str, chain))):
        return _unknown_key(match.group(1), overrides, name)
    for one in chain:
        if isinstance(one, OmegaConfBaseException) and one.full_key:
            if "not in" in first_line(one):
                return _unknown_key(one.full_key, overrides, name)
            text = re.sub(
                r"Value '(.*)' of .*Union\[int, str\].*", r"'\1' is no whole number and no name", first_line(one)
            )
            return UserError(f"{one.full_key} is invalid: {text}")
    if isinstance(error, OverrideParseException):
        return UserError(f"'{error.override}' cannot be parsed as setting=value: {_parse_hint(error.override or '')}")
    if first_line(error).startswith("Ambiguous value"):
        key, _, values = first_line(error).split("'")[1].partition("=")
        one_list = f", or write {key}=[{values}]" if _may_be_list(key) else ""
        return UserError(f"{key}={values} has several values: add -m to sweep over them{one_list}")
    text = " ".join(str(error).split()) if isinstance(error, InstantiationException) else first_line(error)
    return UserError(text + (f" (in {' '.join(overrides)})" if overrides else ""))


def _parse_hint(override: str) -> str:
    name, equals, _ = override.partition("=")
    if not equals:
        return f"write recipe.data.train={name}" if "." in name else "write settings as name=value, without blanks"
    if "=~" in override:
        return "write $HOME instead of ~"
    if override.endswith(","):
        return "leave out the blank after the comma"
    return f"""leave out blanks, or quote the value, '{name}="…"'"""


def _may_be_list(key: str) -> bool:
    """True if the schema has a list for a setting, or, as for those of a recipe, does not say."""
    kind: Any = Config
    for name in key.split("."):
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else Any
    return kind is Any or "list" in str(kind)


def _unknown_choice(error: MissingConfigException) -> UserError:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    # Hydra does not say which there are if the choice is one of several.
    found = error.options or [path.stem for path in (conf_dir() / group).glob("*.yaml")]
    options = [option for option in found if option != "schema"]
    if (extra := _EXTRAS.get(f"{group}={choice}")) is not None:
        return not_installed(f"{group}={choice}", extra)
    if not group:
        return UserError(f"there is no configuration named '{choice}'{did_you_mean(choice, options)}")
    meant = did_you_mean(choice, options)
    if (device := re.fullmatch(r"(cpu|gpu|cuda|tpu)(\d*)", choice)) and group == "device":
        kind = {"cuda": "gpu", "tpu": "tpu8"}.get(device[1], device[1])
        meant = f"; write device={kind}{f' device.workers={device[2]}' if device[2] else ''}"
    return UserError(f"{group}={choice} is not a choice of the group '{group}'{meant}")


def _unknown_key(key: str, overrides: Sequence[str], name: str = CONFIG_NAME) -> UserError:
    key = key.lstrip("+~")
    if key.rpartition(".")[2] == "streaming":
        why = "a ledger needs rows that can be counted and numbered: give files, or a folder written by save_to_disk"
        return UserError(f"there is no setting '{key}': {why}")
    elsewhere = ELSEWHERE.get(key, ELSEWHERE.get(key.rpartition(".")[2]))
    if elsewhere is not None:
        return UserError(f"there is no setting '{key}'; did you mean '{elsewhere}'?")
    # Those of `plan` are refused by every command but runner.plan.
    known = [one for one in known_keys(overrides, name) if key.startswith("plan") or not one.startswith("plan")]
    return UserError(f"there is no setting '{key}'{did_you_mean(key, known)}")


def known_keys(overrides: Sequence[str] = (), name: str = CONFIG_NAME) -> list[str]:
    """Every setting as a dotted path, and every group, under the choices of groups that `overrides` makes."""
    groups = [path.name for path in sorted(conf_dir().iterdir()) if path.is_dir()]
    choices = [o for o in overrides if o.partition("=")[0] in (*groups, "hydra.searchpath")]
    with _conf():
        try:
            cfg = hydra_compose(name, choices)
        except (HydraException, OmegaConfBaseException, ValueError):
            cfg = hydra_compose(name)  # a choice is wrong as well: fall back to the defaults' names
    keys: list[str] = []

    def walk(node: DictConfig, prefix: str) -> None:
        for key in map(str, node):
            keys.append(f"{prefix}{key}")
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none():
                walk(child, f"{prefix}{key}.")

    walk(cfg, "")
    return keys + groups
