"""Empty MLflow stores: copies of one, since creating one takes MLflow seconds."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path


@functools.lru_cache(maxsize=1)
def _empty() -> bytes:
    from mlflow.tracking import MlflowClient

    folder = Path(tempfile.mkdtemp())
    path = folder / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    content = path.read_bytes()
    shutil.rmtree(folder)
    return content


def empty_store(path: Path) -> str:
    """The tracking URI of a store in this file, created if it does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_empty())
    return f"sqlite:///{path}"
