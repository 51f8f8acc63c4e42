"""Where the runner's own files lie, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from runner.errors import UserError


def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def config_dirs(folder: str | None) -> list[str]:
    """The folders that `--config-dir` adds to the search for choices. Raises UserError for one that is none."""
    if not folder:
        return []
    if not Path(folder).is_dir():
        raise UserError(f"--config-dir={folder} is not a folder: check the path")
    return [folder]
