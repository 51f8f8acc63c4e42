"""Compose the configuration with Hydra, and say in one sentence what is wrong with it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import accelerate
from runner.config.paths import conf_dir
from runner.config.schema import Config, Tracking, hydra_schema
from runner.config.setups import store_setups
from runner.errors import UserError, did_you_mean, first_line

CONFIG_NAME = "config"


def register() -> None:
    """Make the schema and the runner's resolvers known to Hydra. Calling it twice is harmless."""
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


def compose(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """The composed configuration, Hydra's own node included.

    `config_dirs`: further folders to search for choices, as given by `--config-dir`. Raises UserError.
    """
    searchpath = [f"hydra.searchpath=[{','.join(f'file://{Path(d).resolve()}' for d in config_dirs)}]"]
    try:
        with _conf():
            return hydra_compose(
                CONFIG_NAME, [*(searchpath if config_dirs else []), *overrides], return_hydra_config=True
            )
    # A bare ValueError is Hydra's answer to an override such as `=3`.
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise composition_error(error, [*(searchpath if config_dirs else []), *overrides]) from error


def settings(cfg: DictConfig) -> Config:
    """The typed, checked, frozen settings of a composed configuration. Raises UserError."""
    cfg = cfg.copy()
    # Hydra's own node cannot be resolved outside a job, and nothing of it is a setting of the experiment.
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
    """Where a composed configuration logs to, even if something else in it is wrong."""
    tracking = OmegaConf.to_object(cfg.tracking)
    assert isinstance(tracking, Tracking)
    return tracking


def _check_keys(node: DictConfig, kind: Any, prefix: str) -> None:
    """Refuse keys that `+` has added beside the schema's, and keys that `~` has taken from it."""
    expected = {field.name for field in dataclasses.fields(kind)}
    present = set(map(str, node))
    for key in sorted(present - expected):
        raise _unknown_key(f"{prefix}{key}", ())
    for key in sorted(expected - present):
        raise UserError(f"the setting '{prefix}{key}' was taken away and is needed: leave out ~{prefix}{key}")
    for name, child in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(child):
            _check_keys(node[name], child, f"{prefix}{name}.")


def sweep_points(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Override lists that between them use every value of every swept setting at least once.

    A sweep's grid can be large; composing each value once, beside the first value of the others, finds every
    misspelt setting or choice before the first job starts.
    """
    given = parsed(overrides)
    swept = [o for o in given if o.is_sweep_override()]
    fixed = [o.input_line or "" for o in given if not o.is_sweep_override()]
    values = {id(o): _values(o) for o in swept}
    first = {key: choices[0] for key, choices in values.items()}
    yield fixed + list(first.values())
    for override in swept:
        for value in values[id(override)][1:]:
            yield fixed + [value if key == id(override) else choice for key, choice in first.items()]


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_discrete_sweep():  # interval(): only optimizing sweepers take it, and each draws its own
        return [f"{key}={override.value().start}"]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def parsed(overrides: Sequence[str]) -> list[Override]:
    """What Hydra makes of these overrides, sweeps of values among them. Raises UserError."""
    with _conf():
        # glob() looks its choices up in the configuration folders.
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        try:
            return parser.parse_overrides(list(overrides))
        except HydraException as error:
            raise composition_error(error) from error


def with_sweeper_params(overrides: Sequence[str], hydra: DictConfig) -> list[str]:
    """`overrides`, and what a bundle (`sweep=…`) has put into `hydra.sweeper.params` and they do not set themselves."""
    given = {override.partition("=")[0] for override in overrides}
    params = hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in params.items() if key not in given), *overrides]


def composition_error(error: Exception, overrides: Sequence[str] = ()) -> UserError:
    """One sentence for what Hydra and OmegaConf say in several lines, with the nearest valid names.

    `overrides`: what was composed; the groups chosen in it decide which names are valid.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = "\n".join(str(e) for e in chain)

    for e in chain:
        if isinstance(e, UserError):
            return e
        if isinstance(e, MissingConfigException) and e.missing_cfg_file:
            return _unknown_choice(e)
    if match := re.search(r"Could not override '([^'@]+)", text):
        return _unknown_key(match.group(1), overrides)
    if match := re.search(r"InterpolationKeyError: .*?'([^']+)'|Interpolation key '([^']+)'", text):
        return _missing_interpolation(match.group(1) or match.group(2), text)
    if match := re.search(r"full_key: (\S+)", text):
        key = match.group(1)
        what = next(str(e).splitlines()[0] for e in chain if isinstance(e, OmegaConfBaseException))
        if "not in" in what:
            return _unknown_key(key, overrides)
        return UserError(f"{key} is wrong: {_plain_words(what, key)}")
    if isinstance(error, OverrideParseException):
        # A shell leaves the ~ of setting=~/path alone, and Hydra takes it for an operator.
        mend = "write $HOME for ~" if re.match(r"[^=]*=~", error.override or "") else first_line(error)
        return UserError(f"'{error.override}' cannot be read as setting=value: {mend}")
    if match := re.match(r"Ambiguous value for argument '([^=']+)=([^']*)'", text):
        key, values = match.groups()
        return UserError(f"{key}={values} is several values: write {key}=[{values}] for a list, or sweep with -m")
    for override in overrides:
        if empty := re.fullmatch(r"([\w/]*)=(null|[\d.]*)", override):  # Hydra's own message names no setting
            what = f"no choice of the group '{empty.group(1)}'" if empty.group(1) else "no setting=value"
            return UserError(f"{override} is {what}: {first_line(error)}")
    return UserError(first_line(error))


def _plain_words(what: str, key: str) -> str:
    if what.startswith("Missing mandatory value"):
        return f"it needs a value ({key}=…)"
    if match := re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", what):
        kind = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}.get(match.group(2))
        return f"'{match.group(1)}' is not {kind or match.group(2)}"
    if match := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", what):
        return f"'{match.group(1)}' is not one of {match.group(2)}"
    if match := re.match(r"Value '(.*)' is not a valid bool", what):
        return f"'{match.group(1)}' is neither true nor false"
    if "is not a ListConfig" in what:
        return f"it is a list ({key}=[…,…])"
    if "is not Optional" in what:
        return "it cannot be null"
    return what


def _unknown_choice(error: MissingConfigException) -> UserError:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = [option for option in (error.options or []) if option != "schema"]
    if not group:
        return UserError(f"there is no configuration named '{choice}'{did_you_mean(choice, options)}")
    return UserError(f"{group}={choice} is not a choice of the group '{group}'{did_you_mean(choice, options)}")


def _unknown_key(key: str, overrides: Sequence[str]) -> UserError:
    key = key.lstrip("+~")
    return UserError(f"there is no setting '{key}'{did_you_mean(key, known_keys(overrides))}")


def _missing_interpolation(key: str, text: str) -> UserError:
    match = re.search(r"full_key: (\S+)", text)
    return UserError(f"{match.group(1) if match else 'a setting'} refers to '{key}', which has no value: add it")


def known_keys(overrides: Sequence[str] = ()) -> list[str]:
    """Every setting as a dotted path, and every group, under the choices of groups that `overrides` makes."""
    groups = [path.name for path in sorted(conf_dir().iterdir()) if path.is_dir()]
    choices = [o for o in overrides if o.partition("=")[0] in (*groups, "hydra.searchpath")]
    with _conf():
        try:
            cfg = hydra_compose(CONFIG_NAME, choices)
        except (HydraException, OmegaConfBaseException, ValueError):
            cfg = hydra_compose(CONFIG_NAME)  # a choice is wrong as well: the defaults' names are better than none
    keys: list[str] = []

    def walk(node: DictConfig, prefix: str) -> None:
        for key in map(str, node):
            keys.append(f"{prefix}{key}")
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none():
                walk(child, f"{prefix}{key}.")

    walk(cfg, "")
    return keys + groups
