"""Where runs are logged when nothing else is said."""

from __future__ import annotations

from pathlib import Path


def default_store(root: Path) -> str:
    """The SQLite store under `outputs/` of a folder, as a tracking URI."""
    return f"sqlite:///{(root / 'outputs' / 'mlflow.db').absolute()}"
