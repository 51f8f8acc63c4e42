"""Keeps the metrics of the weights that would be saved, by evaluation row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from runner.errors import RunFailed
from runner.folder.evaluation_rows import write_rows


class KeptRows:
    """Writes them to a run's folder. Training does not end for lack of them, so that a full disk is a warning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problem: str | None = None

    def write(self, metrics: Mapping[str, Tensor]) -> None:
        """Write the values of each metric, float of shape [rows]."""
        try:
            if metrics:
                write_rows(self._folder, {name: values.numpy() for name, values in metrics.items()})
        except RunFailed as error:
            self._problem = str(error)

    def warning(self) -> str | None:
        """The reason why the latest ones were not kept, if they were not."""
        return self._problem
