"""Tables of tokenised rows: what is written is what is read, memory-mapped and without pickles."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data.table import ROW, Table, write_table

COLUMNS = {
    "input_ids": [[5, 6, 7], [], [8], [2**31 - 1, -100]],
    "label": [1, 0, 2, 2**40],
    "length": [3, 0, 1, 2],
}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    write_table(tmp_path / "table", COLUMNS)
    return Table(tmp_path / "table")


@pytest.mark.parametrize("rows", [[0], [3, 0], [1], [0, 1, 2, 3], [2, 2], []])
def test_rows_come_back_in_the_order_asked_for(table: Table, rows: list[int]) -> None:
    """Any selection of rows gives their values in that order: empty rows, the last one and repeats too."""
    taken = table[rows]
    assert taken.pop(ROW).tolist() == rows
    assert set(taken) == set(COLUMNS)
    assert [row.tolist() for row in taken["input_ids"]] == [COLUMNS["input_ids"][row] for row in rows]
    for name in ("label", "length"):
        assert taken[name].tolist() == [COLUMNS[name][row] for row in rows]


def test_columns_and_size(table: Table) -> None:
    """A column of single numbers is int64 and as long as the table."""
    assert len(table) == 4
    assert table.column("length").tolist() == [3, 0, 1, 2]
    assert table.column("label").dtype == np.int64


def test_everything_is_memory_mapped(table: Table) -> None:
    """No column is read into memory: single numbers, values of lists and the rows cut out of them are maps of files."""
    assert isinstance(table.column("label"), np.memmap)
    assert all(isinstance(row, np.memmap) for row in table[[0, 3]]["input_ids"])
    with pytest.raises(ValueError, match="read-only"):
        table.column("label")[0] = 7


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lists_may_be_of_any_kind(tmp_path: Path, kind: Any) -> None:
    """Lists, tuples and arrays of ids are all read as ragged columns."""
    write_table(tmp_path / "table", {"input_ids": [kind([4, 5]), kind([6])], "length": [2, 1]})
    assert [row.tolist() for row in Table(tmp_path / "table")[[1, 0]]["input_ids"]] == [[6], [4, 5]]


def test_first_row_may_be_empty(tmp_path: Path) -> None:
    """An empty first row does not turn a column of lists into one of numbers."""
    write_table(tmp_path / "table", {"input_ids": [[], [6, 7]], "length": [0, 2]})
    assert [row.tolist() for row in Table(tmp_path / "table")[[0, 1]]["input_ids"]] == [[], [6, 7]]


def test_table_without_rows(tmp_path: Path) -> None:
    """A table of no rows can be written and mapped."""
    write_table(tmp_path / "table", {"length": [], "label": []})
    assert len(Table(tmp_path / "table")) == 0


def test_existing_folder_is_left_alone(tmp_path: Path) -> None:
    """A table is only ever written into a new folder, so that two never mix."""
    write_table(tmp_path / "table", {"length": [1]})
    with pytest.raises(FileExistsError):
        write_table(tmp_path / "table", {"length": [2]})
    assert Table(tmp_path / "table").column("length").tolist() == [1]


def test_token_ids_that_do_not_fit_are_no_other_ids(tmp_path: Path) -> None:
    """An id beyond 32 bits fails instead of wrapping round to another token."""
    with pytest.raises(OverflowError):
        write_table(tmp_path / "table", {"input_ids": [[2**31]], "length": [1]})


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    """A file that holds pickled objects is refused, and what is pickled in it is never run."""
    write_table(tmp_path / "table", {"length": [1]})
    np.save(tmp_path / "table" / "label.npy", np.array([Trap(tmp_path / "sprung")], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"[Pp]ickle|[Oo]bject"):
        Table(tmp_path / "table")
    assert not (tmp_path / "sprung").exists()
    (tmp_path / "table" / "label.npy").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match="pickle"):
        Table(tmp_path / "table")
    assert not (tmp_path / "sprung").exists()


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_groups_are_a_column_like_others(tmp_path: Path) -> None:
    """Rows may belong together; where they do not, there are no groups."""
    write_table(tmp_path / "windows", {"length": [1, 2, 3], "group": [0, 0, 1]})
    groups = Table(tmp_path / "windows").groups()
    assert groups is not None
    assert groups.tolist() == [0, 0, 1]
    write_table(tmp_path / "samples", {"length": [1, 2, 3]})
    assert Table(tmp_path / "samples").groups() is None
