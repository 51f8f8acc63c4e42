"""Where runs are logged: the store when nothing else is said, and a store's experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.errors import UserError


def default_store(root: Path) -> str:
    """The SQLite store under `outputs/` of a folder, as a tracking URI."""
    return f"sqlite:///{(root / 'outputs' / 'mlflow.db').absolute()}"


def experiment_in(client: Any, name: str, uri: str) -> str:
    """The id of the experiment `name` in the store of an `MlflowClient`, made if it is not there.

    Raises UserError for one that was deleted, in which MLflow makes no run.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        if experiment.lifecycle_stage == "deleted":
            raise UserError(f"the experiment '{name}' was deleted: restore it in MLflow, or set tracking.experiment=…")
        found: str = experiment.experiment_id
        return found
    made: str = client.create_experiment(
        name,
        artifact_location=_artifacts_of(uri),
        tags={"mlflow.experimentKind": "custom_model_development"},  # MLflow's page shows training, not agents
    )
    return made


def _artifacts_of(uri: str) -> str | None:
    """Beside a SQLite store; MLflow itself would put them below whatever folder is the current one."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()
