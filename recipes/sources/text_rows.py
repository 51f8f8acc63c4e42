"""Rows of text files, tab-separated or JSON Lines: none is lost, and a malformed line is named by its number."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.sources.sources import from_json, is_text, local_path
from runner.errors import UserError, did_you_mean

#: Where a value stands: its position from 0 in a file without a header, else the name of a column or field.
Column = int | str

#: Line number as an editor counts it, and what stands in each wanted column, by what it is wanted as.
Row = tuple[int, dict[str, Any]]


def in_words(column: Column) -> str:
    return f"column {column + 1}" if isinstance(column, int) else f"column '{column}'"


def read_rows(setting: str, name: str, wanted: Mapping[str, Column], width: int | None) -> Iterator[Row]:
    """The wanted values of each line that is not blank.

    `setting`: what messages call the file. `wanted`: `text`, `label` and perhaps `pair`, all by position (a file
    without a header) or all by name (with a header, or JSON Lines where `name` ends in `.jsonl`). `width`: how many
    columns the file has; positions need it. Texts are str; a label of JSON Lines may be int. Raises UserError.
    """
    path = local_path(name, setting)
    if path.is_dir():
        raise UserError(f"{setting} is a folder: give the file itself")
    by_name = any(isinstance(column, str) for column in wanted.values())
    lines = _lines(setting, path)
    if path.suffix.lower() == ".jsonl":
        if not by_name:
            raise UserError(
                f"{setting} is JSON Lines, whose fields have names: give recipe.data.text_column=… and "
                "recipe.data.label_column=… by name"
            )
        if width is not None:
            raise UserError(f"recipe.data.columns={width} cannot be for JSON Lines ({name}): set it to null")
        rows: Iterator[Row] = (_json_row(setting, number, line, wanted) for number, line in lines)
    elif by_name:
        rows = _under_a_header(setting, lines, wanted, width)
    else:
        assert width is not None
        places = {role: column for role, column in wanted.items() if isinstance(column, int)}
        rows = (_cut(setting, number, line, places, width, f"{width} are expected") for number, line in lines)
    anything = False
    for row in rows:
        anything = True
        yield row
    if not anything:
        raise UserError(f"{setting} is empty: give a file with one labelled text per line")


def _lines(setting: str, path: Path) -> Iterator[tuple[int, str]]:
    offset = 0
    try:
        with path.open("rb") as file:
            # Lines of bytes, cut at \n alone: a text may hold other characters that count as line ends elsewhere.
            for number, raw in enumerate(file, 1):
                line = raw.removeprefix(codecs.BOM_UTF8 if number == 1 else b"")
                text = _decoded(setting, line, offset + len(raw) - len(line))
                offset += len(raw)
                if text.strip():
                    yield number, text.removesuffix("\n").removesuffix("\r")
    except FileNotFoundError as error:
        raise UserError(f"{setting} does not exist (looked in {path.absolute().parent}): check the path") from error
    except OSError as error:
        raise UserError(f"{setting} cannot be read: {error.strerror}") from error


def _decoded(setting: str, line: bytes, offset: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{setting} is not UTF-8 text (byte {offset + error.start}): convert it") from error


def _cut(setting: str, number: int, line: str, places: Mapping[str, int], width: int, expected: str) -> Row:
    # Quote characters are plain text in such files; a CSV reader would join lines at an odd one.
    cells = line.split("\t")
    if len(cells) != width:
        raise UserError(f"{setting} is malformed: line {number} has {len(cells)} tab-separated columns, and {expected}")
    return number, {role: cells[place].strip() for role, place in places.items()}


def _under_a_header(
    setting: str, lines: Iterator[tuple[int, str]], wanted: Mapping[str, Column], width: int | None
) -> Iterator[Row]:
    number, line = next(lines, (0, ""))
    if not number:
        return
    header = [cell.strip() for cell in line.split("\t")]
    if width is not None and len(header) != width:
        raise UserError(
            f"recipe.data.columns={width} is not what {setting} has, whose header names {len(header)}: set it to null"
        )
    for role, column in wanted.items():
        if header.count(str(column)) != 1:
            wrong = "twice in the header" if column in header else "not in the header"
            raise UserError(
                f"recipe.data.{role}_column={column} is {wrong} (line {number}) of {setting}"
                f"{'' if column in header else did_you_mean(str(column), header)}"
            )
    places = {role: header.index(str(column)) for role, column in wanted.items()}
    row: tuple[int, str] | None = None
    for row in lines:
        yield _cut(setting, *row, places, len(header), f"the header has {len(header)}")
    if row is None:
        raise UserError(f"{setting} has a header and no rows: give a file with one labelled text per line")


def _json_row(setting: str, number: int, line: str, wanted: Mapping[str, Column]) -> Row:
    place = f"{setting} is malformed: line {number}"
    try:
        found = from_json(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is no JSON ({error.msg}, character {error.colno})") from error
    if not isinstance(found, dict):
        raise UserError(f"{place} is no JSON object: give one with named fields per line")
    values = {}
    for role, field in wanted.items():
        if field not in found:
            raise UserError(
                f"{place} has no field '{field}' (recipe.data.{role}_column){did_you_mean(str(field), found)}"
            )
        value = found[field]
        label = role == "label"
        if isinstance(value, bool) or not (is_text(value) or (label and isinstance(value, int))):
            kind = "neither text nor a whole number" if label else "no text"
            raise UserError(f"{place} has {json.dumps(value)[:40]} in the field '{field}', which is {kind}")
        values[role] = value.strip() if isinstance(value, str) else value
    return number, values
