"""Empty MLflow stores: making one takes MLflow a second or more, copying one does not."""

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
    """The tracking URI of a store in this file, which is made unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_empty())
    return f"sqlite:///{path}"
