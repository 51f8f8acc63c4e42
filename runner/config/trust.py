"""Limits of files of choices: those from outside `conf/` cannot make the runner, or Hydra, run code.

Hydra instantiates `hydra.callbacks`, launcher and sweeper with all that is below them, `hydra.job_logging` and
`hydra.hydra_logging` name classes, and `hydra.job.env_set` sets environment variables; a launcher writes shell commands
into the scripts of its jobs. `trusted_packages` decides which classes a recipe may name. From a folder given by
`--config-dir` or `hydra.searchpath` none of these is taken, unless the command line sets it as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import OmegaConf

from runner.errors import UserError

#: The names of a setting's nodes, from the root.
Path = tuple[str, ...]

_FOLDERS = (("hydra", "run", "dir"), ("hydra", "sweep", "dir"), ("hydra", "sweep", "subdir"))
_PARAMS = ("hydra", "sweeper", "params")
#: A setting that a sweep may vary, or a group without a package, into which its file would be moved.
_VARIED = re.compile(r"(?!hydra\b|trusted_packages\b)\w[\w./]*")


def refuse_code(file: str, content: Any, typed: Collection[Path]) -> None:
    """Raise UserError if the content of a file from outside sets what can run code, unless it was `typed`, too."""
    plain = OmegaConf.to_container(content, resolve=False)
    for path, value in _settings(plain):
        consented = any(path[: len(one)] == one for one in typed)
        if not (_is_harmless(path, value) or consented):
            name = ".".join(path)
            typed_name = name if path[0] == "trusted_packages" else f"++{name}"
            raise UserError(
                f"{name}={value} in {file} can run code, which only the runner's own conf/ and the command line may: "
                f"remove it, or add {typed_name}=… to the command if you trust it"
            )


def typed_settings(overrides: Sequence[Override]) -> set[Path]:
    """The settings to which a command line gives a value, or which it deletes."""
    return {
        path
        for override in overrides
        for path, _ in _settings(override.value(), tuple(override.get_key_element().lstrip("+~").split(".")))
    }


def _settings(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values below a node; an empty mapping changes nothing."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _settings(value, (*path, key.text if isinstance(key, QuotedString) else str(key)))
    else:
        yield path, node


def _is_harmless(path: Path, value: Any) -> bool:
    if path[0] != "hydra":
        return path[0] != "trusted_packages"
    if path in _FOLDERS:
        return True
    if path[:3] == _PARAMS:
        varied = path[3:] != () and _VARIED.fullmatch(path[3]) is not None
        return value is None or (varied and len(path) == 4 and _is_plain(value))
    return path[1:2] in (("launcher",), ("sweeper",)) and (value is None or isinstance(value, (bool, int, float)))


def _is_plain(value: Any) -> bool:
    """True if nothing is instantiated in it: a reference could stand for a node with a `_target_`."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return not isinstance(value, dict) and "${" not in str(value)
