"""Labelled texts, alone or in pairs, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.sources.files import local_files, read_text, reading
from recipes.sources.hub import load_splits
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import UserError, did_you_mean, first_line, require

#: Digits of a class number. A longer number comes from another column.
_LONGEST_LABEL = 6

#: A position from 0 in a file without a header, else the name of a column or field.
Column = int | str

#: The number of a line (from 1) or row, and its `label`, `text` and perhaps `pair`.
_Row = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class TextFiles:
    """Two local files, or a data set of the Hub.

    `text_column`, `label_column`, and for pairs of texts `pair_column`: positions from 0 in tab-separated files without
    a header, which have `columns` columns; or names in tab-separated files with a header or JSON Lines (`.jsonl`).
    `label_names`: the classes in the order of their numbers; without them labels are class numbers. Rows with a label
    in `skip_labels` are left out, and `max_*_samples` keeps the first of the others. `hub_*`: the Hub's names.
    """

    text_column: int | str
    label_column: int | str
    pair_column: int | str | None = None
    columns: int | None = None
    label_names: Sequence[str] | None = None
    skip_labels: Sequence[str] = ()
    train: str | None = None
    eval: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    hub_name: str | None = None
    hub_config: str | None = None
    hub_train: str = "train"
    hub_eval: str = "validation"
    hub_text: str = "text"
    hub_pair: str | None = None
    hub_label: str = "label"

    def __post_init__(self) -> None:
        for role, column in self._columns.items():
            if isinstance(column, str) != isinstance(self.text_column, str):
                raise UserError(
                    f"recipe.data.{role}_column={column} is invalid with recipe.data.text_column={self.text_column}: "
                    "use positions for all columns, or names for all"
                )
            if isinstance(column, int):
                ok = self.columns is not None
                require(ok, "recipe.data.columns", None, f"recipe.data.{role}_column={column} is a position: set it")
                rule = f"use a position from 0 to recipe.data.columns={self.columns} - 1"
                require(0 <= column < (self.columns or 0), f"recipe.data.{role}_column", column, rule)
        names = self.label_names
        if names is not None:
            # YAML reads a bare yes or no as a boolean.
            ok = _is_list_of_text(names) and len(set(names)) == len(names) >= 2
            require(ok, "recipe.data.label_names", names, "list two or more different names, in quotes if need be")
        rule = "list labels, such as ['-'], or [] for none"
        require(_is_list_of_text(self.skip_labels), "recipe.data.skip_labels", self.skip_labels, rule)
        for name in ("max_train_samples", "max_eval_samples"):
            count = getattr(self, name)
            require(count is None or count >= 1, f"recipe.data.{name}", count, "use at least 1 row, or null")

    @property
    def _columns(self) -> dict[str, Column]:
        columns = {"text": self.text_column, "label": self.label_column}
        return columns if self.pair_column is None else {**columns, "pair": self.pair_column}

    def read(self) -> Corpus:
        files = local_files(self.train, self.eval, self.hub_name)
        if files is None:
            train, evaluation = self._from_hub()
            source = f"Hub: {self.hub_name}" + (f"/{self.hub_config}" if self.hub_config else "")
        else:
            train, evaluation = map(self._from_file, ("train", "eval"), files)
            source = ", ".join(files)
        self._check_classes(train, evaluation)
        return Corpus(train, evaluation, source)

    def _from_file(self, part: str, name: str) -> LabelledText:
        self._check_pairs("hub_pair", "pair_column")
        setting = f"recipe.data.{part}={name}"
        columns = self._columns
        if name.lower().endswith(".jsonl"):
            if isinstance(self.text_column, int):
                raise UserError(f"recipe.data.text_column={self.text_column} is invalid for {name}: use field names")
            rows = _json_lines(name, setting, columns)
        else:
            rows = _tab_separated(name, setting, columns, self.columns)
        places = {role: f"recipe.data.{role}_column={column}" for role, column in columns.items()}
        return self._labelled(rows, part, f"{setting} is malformed: line", places, setting)

    def _from_hub(self) -> list[LabelledText]:
        self._check_pairs("pair_column", "hub_pair")
        assert self.hub_name is not None
        columns = {"text": self.hub_text, "label": self.hub_label}
        if self.hub_pair is not None:
            columns["pair"] = self.hub_pair
        names = (self.hub_train, self.hub_eval)
        setting = f"recipe.data.hub_name={self.hub_name}"
        places = {role: f"recipe.data.hub_{role}={column}" for role, column in columns.items()}
        found = []
        splits = load_splits(self.hub_name, self.hub_config, names, list(columns.values()))
        for part, name, split in zip(("train", "eval"), names, splits, strict=True):
            values = zip(*(split[column] for column in columns.values()), strict=True)
            rows = ((number, dict(zip(columns, row, strict=True))) for number, row in enumerate(values))
            found.append(self._labelled(rows, part, f"{setting} is malformed: '{name}' row", places, setting))
        return found

    def _check_pairs(self, given: str, missing: str) -> None:
        """A pair column that is only configured for the other source would silently train on single texts."""
        column = getattr(self, given)
        if column is not None and getattr(self, missing) is None:
            raise UserError(
                f"recipe.data.{missing}=null is invalid with recipe.data.{given}={column}: set recipe.data.{missing}, "
                f"or recipe.data.{given}=null for single texts"
            )

    def _labelled(
        self, rows: Iterable[_Row], part: str, where: str, places: Mapping[str, str], setting: str
    ) -> LabelledText:
        """The first rows that are not skipped. `where`, `places`: row and columns in messages."""
        limit = getattr(self, f"max_{part}_samples")
        skipped = {str(label) for label in self.skip_labels}
        texts: list[str] = []
        pairs: list[str] = []
        labels: list[int] = []
        for number, values in rows:
            if str(values["label"]).strip() in skipped:
                continue
            for role in ("text", "pair"):
                if role in values and not isinstance(values[role], str):
                    raise UserError(f"{where} {number} has no text in {places[role]}")
            labels.append(self._class(values["label"], f"{where} {number}", places["label"]))
            texts.append(values["text"])
            if "pair" in values:
                pairs.append(values["pair"])
            if len(labels) == limit:
                break
        if not labels:
            why = f" outside recipe.data.skip_labels={list(self.skip_labels)}" if self.skip_labels else ""
            raise UserError(f"{setting} has no rows{why}: give a file with labelled texts")
        return LabelledText(texts, labels, pairs or None)

    def _class(self, given: Any, where: str, column: str) -> int:
        """The number of a label's class. Raises UserError."""
        if isinstance(given, bool) or (isinstance(given, float) and given.is_integer()):
            given = int(given)  # some data sets of the Hub store class numbers like this
        label = "" if given is None else str(given).strip()
        names = self.label_names
        if names and label in names:
            return list(names).index(label)
        is_number = label.isdecimal() and len(label) <= _LONGEST_LABEL
        # The Hub's copies have numbers where files have names. They are ambiguous only if a name looks like a number.
        if is_number and (not names or (int(label) < len(names) and not any(name.isdecimal() for name in names))):
            return int(label)
        wrong = f"is not in recipe.data.label_names{did_you_mean(label, names)}" if names else "is not a class number"
        raise UserError(f"{where} has the label '{label}' in {column}, which {wrong}")

    def _check_classes(self, train: LabelledText, evaluation: LabelledText) -> None:
        found = sorted(set(train.labels))
        if len(found) == 1:
            limit = self.max_train_samples
            fix = f"raise recipe.data.max_train_samples={limit}" if limit else "give a file with several classes"
            raise UserError(
                f"recipe.data.train has only labels of class {found[0]}, so there is nothing to learn: {fix}"
            )
        absent = [name for number, name in enumerate(self.label_names or ()) if number not in found]
        if absent:
            raise UserError(
                f"recipe.data.train has no row labelled '{absent[0]}', which is in recipe.data.label_names: remove the "
                "name, or use more rows"
            )
        if found != list(range(len(found))):
            raise UserError(f"recipe.data.train has the classes {_listed(found)}: number them from 0 without gaps")
        unknown = sorted(set(evaluation.labels) - set(found))
        if unknown:
            raise UserError(f"recipe.data.eval has the classes {_listed(unknown)}, which recipe.data.train lacks")


def _tab_separated(name: str, setting: str, columns: Mapping[str, Column], width: int | None) -> Iterator[_Row]:
    """The rows of a tab-separated file that are not blank, with a header if columns are given by name."""
    import pandas

    path = Path(name).expanduser()
    with reading(path, setting):
        try:
            # Quotes are text, and only \n ends a line: texts may contain other line separators.
            frame = pandas.read_csv(
                path,
                sep="\t",
                header=None,
                quoting=csv.QUOTE_NONE,
                dtype=str,
                na_filter=False,
                encoding="utf-8-sig",
                lineterminator="\n",
                skip_blank_lines=False,
            )
        except pandas.errors.EmptyDataError as error:
            raise UserError(f"{setting} is empty: give a file with one labelled text per line") from error
        except pandas.errors.ParserError as error:
            raise UserError(f"{setting} is not a tab-separated table ({first_line(error)}): fix that line") from error
    if width is not None and frame.shape[1] != width:
        raise UserError(f"recipe.data.columns={width} is invalid: {setting} has {frame.shape[1]} columns")
    lines = enumerate(frame.itertuples(index=False, name=None), 1)
    places = {role: column for role, column in columns.items() if isinstance(column, int)}
    if not places:
        header = [cell.strip() for cell in next(lines)[1]]
        for role, column in columns.items():
            if header.count(str(column)) != 1:
                raise UserError(
                    f"recipe.data.{role}_column={column} is not a column of {setting}"
                    f"{did_you_mean(str(column), header)}"
                )
        places = {role: header.index(str(column)) for role, column in columns.items()}
    for number, cells in lines:
        if "".join(cells).strip():
            # pandas pads short lines with empty cells: an empty text is a malformed line either way.
            yield number, {role: cells[place].strip() or None for role, place in places.items()}


def _json_lines(name: str, setting: str, columns: Mapping[str, Column]) -> Iterator[_Row]:
    for number, line in enumerate(read_text(name, setting).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{setting} is malformed: line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON ({error.msg} at character {error.colno})") from error
        values = {}
        for role, field in columns.items():
            if not isinstance(row, dict) or field not in row:
                raise UserError(f"{where} has no field '{field}' (recipe.data.{role}_column)")
            value = row[field]
            values[role] = (value.strip() or None) if isinstance(value, str) else value
        yield number, values


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) and item for item in value)


def _listed(classes: Sequence[int]) -> str:
    return ", ".join(map(str, classes[:8])) + (" …" if len(classes) > 8 else "")
