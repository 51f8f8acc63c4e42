"""Tables of rows: what is written is what is read, memory-mapped and without pickles."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data.table import ROW, Table, write_bytes, write_table

COLUMNS = {
    "input_ids": [[], [5, 6, 7], [8], [2**31 - 1, -100]],
    "label": [1, 0, 2, 2**40],
    "score": [0.1, -2.5, 1e300, 3.0],
    "length": [0, 3, 1, 2],
}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    write_table(tmp_path / "table", COLUMNS)
    return Table(tmp_path / "table")


@pytest.mark.parametrize("rows", [[3, 0], [1], [0, 1, 2, 3], [2, 2], []])
def test_rows_come_back_in_the_given_order(table: Table, rows: list[int]) -> None:
    taken = table[rows]
    assert taken.pop(ROW).tolist() == rows
    assert [row.tolist() for row in taken["input_ids"]] == [COLUMNS["input_ids"][row] for row in rows]
    for name in ("label", "score", "length"):
        assert taken[name].tolist() == [COLUMNS[name][row] for row in rows]


def test_columns_are_memory_mapped(table: Table) -> None:
    assert (len(table), table.column("label").dtype) == (4, np.int64)
    assert isinstance(table.column("label"), np.memmap)
    assert all(isinstance(row, np.memmap) for row in table[[1, 3]]["input_ids"])
    with pytest.raises(ValueError, match="read-only"):
        table.column("label")[0] = 7


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lists_of_any_kind(tmp_path: Path, kind: Any) -> None:
    write_table(tmp_path / "table", {"input_ids": [kind([4, 5]), kind([6])], "length": [2, 1]})
    assert [row.tolist() for row in Table(tmp_path / "table")[[1, 0]]["input_ids"]] == [[6], [4, 5]]


def test_a_column_of_bytes(tmp_path: Path) -> None:
    """Written value by value and memory-mapped; another number of values than of sizes is an error."""
    values = [b"", b"\x00\xff", b"abc"]
    write_table(tmp_path / "table", {"length": [1, 1, 1]})
    write_bytes(tmp_path / "table", "image", [0, 2, 3], iter(values))
    found = Table(tmp_path / "table")[[2, 0, 1]]["image"]
    assert [one.tobytes() for one in found] == [values[row] for row in (2, 0, 1)]
    assert isinstance(found[0], np.memmap)
    with pytest.raises(ValueError, match="zip"):
        write_bytes(tmp_path / "table", "more", [0, 2, 3], values[:2])
    write_table(tmp_path / "empty", {"length": []})
    write_bytes(tmp_path / "empty", "image", [], [])
    assert Table(tmp_path / "empty")[[]]["image"] == []


def test_groups_and_empty_tables(tmp_path: Path) -> None:
    write_table(tmp_path / "windows", {"length": [1, 2, 3], "group": [0, 0, 1]})
    groups = Table(tmp_path / "windows").groups()
    assert groups is not None
    assert groups.tolist() == [0, 0, 1]
    write_table(tmp_path / "empty", {"length": [], "label": []})
    assert len(Table(tmp_path / "empty")) == 0
    assert Table(tmp_path / "empty").groups() is None


def test_what_cannot_be_written(table: Table) -> None:
    """Existing folders, ids beyond 32 bits, which would become other ids, and anything but numbers."""
    for columns, error in (
        ({"length": [2]}, FileExistsError),
        ({"input_ids": [[2**31]], "length": [1]}, OverflowError),
        ({"length": ["1"]}, TypeError),
    ):
        folder = table.folder if error is FileExistsError else table.folder.parent / error.__name__
        with pytest.raises(error):
            write_table(folder, columns)
    assert len(Table(table.folder)) == 4


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    """A shared cache folder cannot run code."""
    write_table(tmp_path / "table", {"length": [1]})
    label, sprung = tmp_path / "table" / "label.npy", tmp_path / "sprung"
    np.save(label, np.array([Trap(sprung)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"[Pp]ickle|[Oo]bject"):
        Table(tmp_path / "table")
    label.write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(ValueError, match="pickle"):
        Table(tmp_path / "table")
    assert not sprung.exists()
