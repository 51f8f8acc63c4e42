"""Rows as flat, memory-mapped arrays.

A column of lists, such as token ids, or of bytes is one long array of values and one of offsets, so that any number of
workers read the same pages and a row costs two index look-ups. The files are `.npy` without pickled objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_INT32 = np.iinfo(np.int32)

#: The column of row numbers that every fetched batch has.
ROW = "row"

#: The column of random numbers, uint64, that batches have in training: each follows from the run's seed, the epoch and
#: the row, so that what a recipe draws with it is the same on any number of workers and after a resume.
SEED = "seed"


def write_table(folder: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns of integers, of floats, or of lists of integers, into a new `folder`."""
    folder.mkdir(parents=True)
    for name, values in columns.items():
        if len(values) and isinstance(values[0], (list, tuple, np.ndarray)):
            offsets = np.zeros(len(values) + 1, dtype=np.int64)
            np.cumsum([len(row) for row in values], out=offsets[1:])
            flat = np.concatenate([np.asarray(row, dtype=np.int64) for row in values])
            if flat.size and not (_INT32.min <= flat.min() and flat.max() <= _INT32.max):
                raise OverflowError(f"column '{name}' has lists with integers of more than 32 bits")
            np.save(folder / f"{name}.npy", flat.astype(np.int32))
            np.save(folder / f"{name}.offsets.npy", offsets)
        else:
            array = np.asarray(values)
            if array.size and array.dtype.kind not in "iubf":
                raise TypeError(f"column '{name}' has dtype {array.dtype}, but tables hold numbers")
            np.save(
                folder / f"{name}.npy", array.astype(np.float64 if array.size and array.dtype.kind == "f" else np.int64)
            )


def write_bytes(folder: Path, name: str, sizes: Sequence[int], values: Iterable[bytes]) -> None:
    """Add a column of bytes to the table in `folder`, value by value: all of them need not fit into memory.

    `sizes`: of the values. Batches have each as an array of uint8.
    """
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    np.save(folder / f"{name}.offsets.npy", offsets.astype(np.int64))
    file = folder / f"{name}.npy"
    if not offsets[-1]:
        np.save(file, np.zeros(0, dtype=np.uint8))  # an empty file cannot be mapped
        return
    flat = np.lib.format.open_memmap(file, "w+", dtype=np.uint8, shape=(int(offsets[-1]),))
    for value, start, end in zip(values, offsets[:-1], offsets[1:], strict=True):
        flat[start:end] = np.frombuffer(value, dtype=np.uint8)
    flat.flush()


class Table:
    """A folder written by `write_table`, memory-mapped. `table[[3, 5]]` returns the columns of these rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(path.name.removesuffix(".npy") for path in folder.glob("*.npy"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
        self._values = {name: array for name, array in arrays.items() if not name.endswith(".offsets")}
        self._offsets = {
            name.removesuffix(".offsets"): array for name, array in arrays.items() if name.endswith(".offsets")
        }
        self._length = len(self.column("length"))

    def __len__(self) -> int:
        return self._length

    def column(self, name: str) -> np.ndarray:
        """A column of single numbers, int64 or float64 of shape [rows]."""
        return self._values[name]

    def groups(self) -> np.ndarray | None:
        """The group of each row, int64 of shape [rows]; None where rows are not grouped."""
        return self._values.get("group")

    def __getitem__(self, rows: Sequence[int]) -> dict[str, Any]:
        # Row numbers are part of the batch, so that the ledger records the rows that were really fetched.
        return {ROW: np.asarray(rows, dtype=np.int64), **{name: self._take(name, rows) for name in self._values}}

    def _take(self, name: str, rows: Sequence[int]) -> Any:
        values, offsets = self._values[name], self._offsets.get(name)
        if offsets is None:
            return values[np.asarray(rows, dtype=np.int64)]
        return [values[offsets[row] : offsets[row + 1]] for row in rows]
