"""The one reader of folders that somebody else may have made: what is in them is data, of limited size, without links.

Nothing read here decides where things are sent, which credentials go along, or where files are written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import IO, Any

import yaml

from runner.errors import UserError, first_line

#: Bytes of the largest file that is read as JSON, and as settings: a hundred times what large runs have.
JSON_LIMIT, _SETTINGS_LIMIT = 2**26, 2**20
#: Neither a link that has just been put there is followed, nor is the other end of a pipe waited for.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK
#: Where W&B keeps its log in a run's folder.
_WANDB = "wandb"


def opened(path: Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """Open a regular file of a run's folder. Raises UserError for anything else there, and OSError as `open`."""
    with contextlib.suppress(FileNotFoundError):
        links = _of_a_run(path).st_nlink
        if links > 1 and "r" not in mode:
            raise UserError(f"{path} has {links} names (hard links), and all would change: put a copy in its place")
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | _FLAGS, 0o666), **options)


def _of_a_run(path: Path, folder: bool = False) -> os.stat_result:
    """The state of a regular file, with `folder` also of a folder. Raises UserError for a link, a pipe or a device."""
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        raise UserError(f"{path} is a link, which is not followed in a run's folder: put what it leads to in its place")
    if not (stat.S_ISREG(state.st_mode) or (folder and stat.S_ISDIR(state.st_mode))):
        raise UserError(f"{path} is not a regular file: remove it")
    return state


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and in those below it, sorted. Raises UserError for a link, a pipe or a device among them.

    Without those of W&B, which makes links there; the runner removes that folder, and reads nothing in it.
    """
    found = []
    for root, folders, names in os.walk(folder):
        if Path(root) == folder and _WANDB in folders and not (folder / _WANDB).is_symlink():
            folders.remove(_WANDB)
        for name in (*folders, *names):
            _of_a_run(Path(root, name), folder=True)
        found += [Path(root, name) for name in names]
    return sorted(found)


def folders_with(name: str, root: Path) -> list[Path]:
    """Folders at or below `root` with a file of this name, while running jobs may make and remove others there."""
    # Path.rglob would raise FileNotFoundError.
    return [Path(folder) for folder, _, names in os.walk(root) if name in names]


def parse_json(data: bytes, limit: int = JSON_LIMIT) -> Any:
    """The content of JSON in UTF-8. Raises ValueError, also for more than `limit` bytes and deep nesting."""
    if len(data) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, kind: type = dict) -> Any:
    """The content of a JSON file, an object unless another `kind` is given. Raises UserError."""
    try:
        with opened(path) as file:
            content = parse_json(file.read(JSON_LIMIT + 1))
        if not isinstance(content, kind):
            raise ValueError("it is not what the runner writes there")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path} cannot be read ({reason}): restore it, or start a new run") from error
    return content


class _Loader(yaml.SafeLoader):
    """Reads no aliases, which the runner never writes: a few lines of them can stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"line {self.peek_event().start_mark.line + 1} has an alias")
        return super().compose_node(parent, index)


def read_settings(path: Path) -> dict[str, Any]:
    """The content of a `config.yaml` as plain data. Raises UserError."""
    try:
        with opened(path) as file:
            text = file.read(_SETTINGS_LIMIT + 1)
        if len(text) > _SETTINGS_LIMIT:
            raise ValueError(f"it has more than {_SETTINGS_LIMIT:,} bytes")
        content = yaml.load(text.decode(), _Loader)
        if not isinstance(content, dict):
            raise ValueError("it has no keys")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} does not hold the settings of a run ({first_line(error)}): restore it") from error
    return content


def literal(value: Any) -> Any:
    """Plain settings in which OmegaConf finds no interpolation: `${…}` in them is text."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
