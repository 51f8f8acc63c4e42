"""The software that a run was made with, for `environment.json`."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from runner.config.schema import Config
from runner.track.card import git_commit
from runner.train.build import code_of


def environment_of(config: Config) -> dict[str, Any]:
    """Python, platform, every installed package, the commit of the runner, and digests of the code that trains."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "commit": git_commit(),
        "code": code_of(config),
    }


def _packages() -> dict[str, str]:
    """Version by name. Read from the names of folders: importlib.metadata takes a thousand times as long."""
    found = (path.stem for folder in sys.path for path in Path(folder).glob("*.dist-info"))
    return dict(sorted((name.lower(), version) for name, _, version in (one.rpartition("-") for one in found)))
