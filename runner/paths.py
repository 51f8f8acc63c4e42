"""Where the runner's own files lie, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"
