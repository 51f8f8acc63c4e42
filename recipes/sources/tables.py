"""Files of rows as pandas tables: comma-separated, tab-separated or JSON Lines."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.sources.files import read_text, reading
from runner.errors import UserError, first_line

if TYPE_CHECKING:
    from pandas import DataFrame

#: Files of tables that would otherwise be taken for tab-separated text.
_UNREAD = (".arrow", ".feather", ".json", ".ods", ".parquet", ".xls", ".xlsx")


def read_table(name: str, setting: str, header: bool) -> DataFrame:
    """The rows of a file that are not blank; the index counts the file's lines from 1. Raises UserError.

    `.jsonl` has an object per line, `.csv` commas and quotes as in RFC 4180, any other file tabs, with quotes as
    ordinary characters. `header`: the first line names the columns, which are otherwise numbered from 0. Cells are
    text without spaces around it (JSON: of any type). `setting`: the user's `name=value`.
    """
    suffix = Path(name).suffix.lower()
    if suffix in _UNREAD:
        raise UserError(f"{setting} is a {suffix} file, which is not read: convert it to .csv, .tsv or .jsonl")
    return _json_lines(name, setting) if name.lower().endswith(".jsonl") else _separated(name, setting, header)


def _separated(name: str, setting: str, header: bool) -> DataFrame:
    import pandas

    path = Path(name).expanduser()
    quoted = path.suffix.lower() == ".csv"
    # Without quotes only \n ends a line: texts may contain other line separators.
    form = {"sep": ","} if quoted else {"sep": "\t", "quoting": csv.QUOTE_NONE, "lineterminator": "\n"}
    with reading(path, setting):
        try:
            table = pandas.read_csv(
                path, **form, header=None, dtype=str, na_filter=False, encoding="utf-8-sig", skip_blank_lines=False
            )
        except pandas.errors.EmptyDataError as error:
            raise UserError(f"{setting} is empty: give a file with labelled texts") from error
        except pandas.errors.ParserError as error:
            kind = "comma" if quoted else "tab"
            raise UserError(
                f"{setting} is not a {kind}-separated table ({first_line(error)}): fix that line"
            ) from error
    lines = 1 + table.apply(lambda column: column.str.count("\n")).sum(axis=1)  # quoted cells may contain line ends
    table.index = lines.cumsum() - lines + 1
    table = table.apply(lambda column: column.str.strip())
    table = table[table.ne("").any(axis=1)]
    if header:
        table = table.set_axis(table.iloc[0], axis=1).iloc[1:]
    return table


def _json_lines(name: str, setting: str) -> DataFrame:
    import pandas

    rows = {}
    # pandas.read_json would change some values, and its errors name no line.
    for number, line in enumerate(read_text(name, setting).split("\n"), 1):
        if line.strip():
            where = f"{setting}: line {number}"
            try:
                rows[number] = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where} is not JSON ({error.msg} at character {error.colno})") from error
            if not isinstance(rows[number], dict):
                raise UserError(f"{where} is not a JSON object with fields")
    table = pandas.DataFrame(list(rows.values()), index=list(rows), dtype=object)
    return table.map(lambda cell: cell.strip() if isinstance(cell, str) else cell)
