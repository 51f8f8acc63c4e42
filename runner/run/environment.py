"""The software that a run was made with, for `environment.json`."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from runner.config.schema import Config
from runner.errors import UserError, first_line
from runner.folder.reading import read_json
from runner.track.card import git_commit
from runner.train.identity import code_of

FILE_NAME = "environment.json"


def environments(folder: Path, config: Config, after_step: int) -> list[dict[str, Any]]:
    """The content of `environment.json`: an entry for each part of the run, of which one begins after this step.

    Python, platform, every installed package, the commit of the runner, and digests of the code that trains.
    """
    now = {
        "after_step": after_step,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "commit": git_commit(),
        "code": code_of(config),
    }
    return [*(one for one in earlier_environments(folder) if one["after_step"] < after_step), now]


def earlier_environments(folder: Path) -> list[dict[str, Any]]:
    """The entries that a run's folder has. Raises UserError if the file is damaged."""
    path = folder / FILE_NAME
    try:
        found = read_json(path, list) if path.exists() else []
        return [{**one, "after_step": int(one["after_step"])} for one in found]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)})") from error


def _packages() -> dict[str, str]:
    """Version by name. Read from the names of folders: importlib.metadata takes a thousand times as long."""
    found: dict[str, str] = {}
    for path in (path for folder in sys.path for path in Path(folder).glob("*.dist-info")):
        name, _, version = path.stem.rpartition("-")
        found.setdefault(name.lower(), version)  # the first is the one that is imported
    return dict(sorted(found.items()))
