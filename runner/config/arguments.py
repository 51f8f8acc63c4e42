"""Command lines: the arguments of `python -m runner` as Hydra's own parser reads them, and those of the other tools."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from runner import __version__
from runner.errors import UserError, nearest

#: Names the run, or the sweep, that a command resumes.
RESUME, RESUME_SWEEP = "resume", "resume_sweep"
#: In a sweep: seeds are added until its setups are decided.
_SEED_AUTO = "seed=auto"


def key_of(override: str) -> str:
    """The name of the setting in an override, such as `optimizer.lr`."""
    return override.lstrip("+~").partition("=")[0]


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which raises UserError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        program = self.prog.removeprefix("python -m ").split()[0]
        raise UserError(f"{message}; see python -m {program} --help")


class HydraOptions:
    """The arguments of a run or a sweep. Raises UserError for an option that is unknown or unsafe."""

    def __init__(self, arguments: Sequence[str]) -> None:
        from hydra._internal.utils import get_args_parser

        parser = get_args_parser()
        parser.error = _refuse_option
        options: dict[str, argparse.Action] = parser._option_string_actions
        options["--version"].version = f"runner {__version__}"  # type: ignore[attr-defined]  # it was Hydra's
        _refuse_settings_as_options(arguments, options)
        parsed = parser.parse_intermixed_args(list(arguments))
        #: `resumed`: the id of the sweep, `resumed_run`: the folder or id of the run that is resumed. They are no
        #: settings of a run.
        self.overrides, self.resumed = take_resume(parsed.overrides)
        self.overrides, self.resumed_run = take_resume(self.overrides, RESUME)
        #: True if the sweep adds seeds until its setups are decided. The first one stands for all of them.
        self.adds_seeds = _SEED_AUTO in self.overrides
        self.overrides = ["seed=0" if override == _SEED_AUTO else override for override in self.overrides]
        #: The options alone. Hydra's parser does not accept overrides on both sides of `-m`.
        self.flags = list(arguments)
        for override in parsed.overrides:
            self.flags.remove(override)
        self.multirun: bool = parsed.multirun
        if self.adds_seeds and not self.multirun:
            raise UserError(f"{_SEED_AUTO} is for a sweep, which adds seeds until its setups are decided: add -m")
        if self.adds_seeds and [key_of(override) for override in self.overrides].count("seed") > 1:
            raise UserError(f"{_SEED_AUTO} and other seeds are given together: give one of them")
        for override in () if self.adds_seeds else self.overrides:
            if override.startswith("decide.race=") and not self.multirun:
                raise UserError(f"{override} is for a sweep, whose setups race: add -m")
            if override.startswith("decide.") and not override.startswith("decide.race="):
                raise UserError(f"{override} is for a sweep that adds seeds: add -m {_SEED_AUTO}, or leave it out")
        if self.resumed and not self.multirun:
            raise UserError(f"{RESUME_SWEEP}={self.resumed} resumes a sweep: add -m")
        if self.resumed_run and self.multirun:
            raise UserError(f"{RESUME}={self.resumed_run} resumes one run: leave out -m, or use {RESUME_SWEEP}=…")
        #: Help, completion and printing of the configuration: nothing is run.
        self.only_shows = bool(parsed.help or parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion)
        self.completes = bool(parsed.shell_completion)
        if parsed.experimental_rerun:
            raise UserError("--experimental-rerun unpickles a file, which can run any code: give the overrides instead")
        if parsed.config_path or parsed.config_name:
            raise UserError(
                "--config-path and --config-name replace the runner's own configuration: use --config-dir=FOLDER to "
                "add your own choices"
            )
        self.config_dirs = config_dirs(parsed.config_dir)

    @property
    def for_hydra(self) -> list[str]:
        """The arguments in the order that Hydra's parser accepts."""
        return [*self.flags, *self.overrides]


def take_resume(overrides: list[str], key: str = RESUME_SWEEP) -> tuple[list[str], str | None]:
    """The overrides without `resume_sweep=…`, and its value. Raises UserError if it is given twice or is empty."""
    given = [override for override in overrides if key_of(override) == key]
    if not given:
        return overrides, None
    value = given[0].partition("=")[2].strip("'\"")
    several = len(given) > 1 or ("," in value and not Path(value).exists())
    if several or not value:
        raise UserError(f"{' '.join(given)} is invalid: give one {'run' if key == RESUME else 'sweep'}, {key}=…")
    return [override for override in overrides if override not in given], value


def config_dirs(folder: str | None) -> list[str]:
    """The folders that `--config-dir` adds to the search for choices. Raises UserError if it is not a folder."""
    if not folder:
        return []
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir={folder} is not a folder: check the path")
    return [folder]


def _refuse_settings_as_options(arguments: Sequence[str], options: Collection[str]) -> None:
    """Answer `--epochs 3` or `--lr=1e-4` with the override that was meant. Raises UserError."""
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or option in ("--", *options):
            continue
        following = arguments[number + 1 : number + 2]
        if not equals and following and not following[0].startswith("-") and "=" not in following[0]:
            value, argument = following[0], f"{argument} {following[0]}"
        raise UserError(f"{argument} is not an option: {_meant(option[2:], value or 'VALUE', arguments, options)}")


def _meant(name: str, value: str, arguments: Sequence[str], options: Collection[str]) -> str:
    """The override to write instead of the option `--name value`."""
    from runner.config.compose import ELSEWHERE, known_keys  # imports Hydra

    settings = known_keys(arguments)
    name = name.replace("-", "_")
    if name in (*settings, RESUME, RESUME_SWEEP):
        return f"write {name}={value}"
    words = {option.strip("-").replace("-", "_"): option for option in options if option.startswith("--")}
    found = [ELSEWHERE[name]] if name in ELSEWHERE else nearest(name, [*settings, *words], 1)
    if not found:
        return "write settings as name=value, and see runner --help for their names"
    override = found[0] if "=" in found[0] else f"{found[0]}={value}"
    return f"did you mean {words.get(found[0], override)}?"


def _refuse_option(message: str) -> NoReturn:
    raise UserError(f"{message}; see runner --hydra-help")
