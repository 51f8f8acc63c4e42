"""`evaluation_rows.safetensors`: the metrics of the saved weights by evaluation row, by which comparisons pair rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from runner.errors import RunFailed, UserError, first_line
from runner.folder.files import write_bytes
from runner.folder.reading import opened

FILE_NAME = "evaluation_rows.safetensors"
#: Rows of the largest evaluation set for which the file is written. What more rows leave open is far below a point.
MOST_ROWS = 50_000
#: Bytes of the largest file that is read: 80 metrics of so many rows.
_LIMIT = 2**24


def write_rows(folder: Path, metrics: Mapping[str, np.ndarray]) -> None:
    """Write the values of each metric, one for each row, as float32. Atomic. Raises RunFailed, as `write_json`."""
    write_bytes(folder / FILE_NAME, save({name: values.astype(np.float32) for name, values in metrics.items()}))


class KeptRows:
    """Writes the rows of the weights that would be saved. A full disk is a warning: training does not end for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problem: str | None = None

    def write(self, metrics: Mapping[str, np.ndarray]) -> None:
        try:
            if metrics:
                write_rows(self._folder, metrics)
        except RunFailed as error:
            self._problem = str(error)

    def warning(self) -> str | None:
        """The reason why the latest ones were not kept, if they were not."""
        return self._problem


def read_rows(folder: Path) -> dict[str, np.ndarray]:
    """Read the rows of a folder; empty without the file. Raises UserError for a damaged one."""
    path = folder / FILE_NAME
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        with opened(path) as file:
            content = file.read(_LIMIT + 1)
        if len(content) > _LIMIT:
            raise ValueError(f"it has more than {_LIMIT:,} bytes")
        return load(content)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}): remove it") from error


def standard_errors(metrics: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The standard error of the mean of each metric over its rows, which are of shape [rows].

    Metrics are left out if their rows give no error: all are equal, as with an accuracy of 100%, or not finite.
    """
    found: dict[str, float] = {}
    for name, values in metrics.items():
        if values.ndim == 1 and len(values) > 1:
            error = float(values.std(ddof=1, dtype=np.float64)) / math.sqrt(len(values))
            if 0 < error < math.inf:
                found[name] = error
    return found
