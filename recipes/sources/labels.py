"""What the labels of texts are in a file: one class in each row, any number of classes, or a number."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.errors import UserError, did_you_mean, require

if TYPE_CHECKING:
    from pandas import DataFrame, Series

    from recipes.tasks.problems import Labels

#: More classes than this, and fewer than two rows of each, are not classes.
_MANY_CLASSES = 20

#: Classes that a note lists.
_CLASSES_SHOWN = 12

#: A column of labels has at least this number of rows of each label, on average.
_ROWS_PER_LABEL = 2

#: A cell of a column of 0 and 1 -> whether the row has the label.
_FLAGS = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True)
class LabelCells:
    """Labels as their rows have them.

    `cells`: of which the index numbers the rows for people; `where`: what precedes a row's number in messages; `place`,
    `setting`: the column and its source, as settings of the user; `names`: of the classes, if the source has them.
    """

    cells: Series[Any]
    where: str
    place: str
    setting: str
    names: Sequence[str] | None = None

    @property
    def texts(self) -> Series[str]:
        return self.cells.map(as_text)

    def wrong(self, row: Any, what: str) -> UserError:
        return UserError(f"{self.where} {row} {what} in {self.place}")


class LabelKind(ABC):
    """`usual`: names of columns with such labels, in lower case; `otherwise`: another way to name them."""

    usual: tuple[str, ...] = (
        *("label", "labels", "class", "category", "target", "gold_label", "sentiment", "intent", "topic"),
    )
    otherwise: str = ""

    @abstractmethod
    def like(self, column: Series[Any]) -> bool:
        """Whether the content of a column may be such labels."""

    @abstractmethod
    def names(self, found: LabelCells) -> tuple[Sequence[str], tuple[str, ...]]:
        """The classes of training labels in the order of their numbers, and what was inferred, in sentences."""

    @abstractmethod
    def labels(self, found: LabelCells, names: Sequence[str], lacking: str, by_number: bool) -> Labels:
        """The labels of these rows. `lacking` follows an unknown class; `by_number`: classes may be numbers."""

    @abstractmethod
    def check_training(self, labels: Any, names: Sequence[str], limit: int | None) -> None:
        """Check that there is something to learn. `limit`: `max_train_samples`. Raises UserError."""


class Classes(LabelKind):
    def like(self, column: Series[Any]) -> bool:
        return 2 <= column.astype(str).nunique() <= len(column) / _ROWS_PER_LABEL

    def names(self, found: LabelCells) -> tuple[Sequence[str], tuple[str, ...]]:
        if found.names is not None:
            return found.names, ()
        labels = found.texts
        empty = labels.eq("")
        if empty.any():
            raise found.wrong(empty.idxmax(), "has no label")
        if found.cells.map(_is_list).any():
            raise UserError(f"{found.place} has lists of labels in {found.setting}: use recipe=multi_label")
        numbers = {name: _number(name) for name in labels.unique()}
        broken = [name for name, number in numbers.items() if number is not None and not number.is_integer()]
        if broken and None not in numbers.values():
            raise UserError(
                f"{found.place} has numbers such as {broken[0]} in {found.setting}: use recipe=text_regression "
                "to predict numbers, or list them in recipe.data.label_names if they are classes"
            )
        return _sorted_names(labels.unique(), len(labels), found)

    def labels(self, found: LabelCells, names: Sequence[str], lacking: str, by_number: bool) -> Labels:
        labels = found.texts.map(numbers_of(names, by_number))
        if labels.hasnans:
            row = labels.isna().idxmax()
            raise _unknown(found, row, found.texts[row], names, lacking)
        numbers: list[int] = labels.astype(int).tolist()
        return numbers

    def check_training(self, labels: Any, names: Sequence[str], limit: int | None) -> None:
        classes = set(labels)
        if len(classes) == 1:
            raise UserError(
                f"recipe.data.train has only labels of class {names[classes.pop()]}, so there is nothing to learn: "
                + _more(limit, "give a file with several classes")
            )
        _check_all_classes(classes, names, limit)


@dataclass(frozen=True)
class ClassSets(LabelKind):
    """A list in each row, or the classes between separators: a cell without any has no class."""

    separator: str | None

    otherwise = ", or recipe.data.label_columns to columns of 0 and 1"

    def like(self, column: Series[Any]) -> bool:
        separated = column.map(lambda cell: self.separator is not None and self.separator in str(cell))
        return bool(column.map(_is_list).all() or separated.any())

    def names(self, found: LabelCells) -> tuple[Sequence[str], tuple[str, ...]]:
        if found.names is not None:
            return found.names, ()
        different = {label for labels in self._texts(found) for label in labels}
        if len(different) < 2:
            raise UserError(
                f"{found.place} has {'one class' if different else 'no class'} in {found.setting}: give labels of two "
                "or more; recipe=text_classification is for one class in each row"
            )
        return _sorted_names(different, len(found.cells), found)

    def labels(self, found: LabelCells, names: Sequence[str], lacking: str, by_number: bool) -> Labels:
        numbers = numbers_of(names, by_number)
        rows = []
        for row, labels in zip(found.cells.index, self._texts(found), strict=True):
            unknown = next((label for label in labels if label not in numbers), None)
            if unknown is not None:
                raise _unknown(found, row, unknown, names, lacking)
            rows.append(tuple(sorted({numbers[label] for label in labels})))
        return rows

    def _texts(self, found: LabelCells) -> list[list[str]]:
        rows = []
        for row, cell in found.cells.items():
            if isinstance(cell, str) and self.separator is not None:
                labels = [label.strip() for label in cell.split(self.separator) if label.strip()]
            elif _is_list(cell):
                labels = [as_text(label) for label in cell]
                if "" in labels:
                    raise found.wrong(row, "has an empty label in the list")
            elif isinstance(cell, str):
                raise UserError(
                    f"{found.where} {row} has the text '{cell}' in {found.place}, not a list: set what separates its "
                    "labels, such as \"recipe.data.label_separator=';'\""
                )
            else:
                raise found.wrong(row, "has no list of labels")
            rows.append(labels)
        return rows

    def check_training(self, labels: Any, names: Sequence[str], limit: int | None) -> None:
        _check_all_classes({number for row in labels for number in row}, names, limit)


class Numbers(LabelKind):
    usual = (*LabelKind.usual, "score", "rating", "stars", "similarity", "value")

    def like(self, column: Series[Any]) -> bool:
        return all(_number(as_text(cell)) is not None for cell in column)

    def names(self, found: LabelCells) -> tuple[Sequence[str], tuple[str, ...]]:
        return (), ()

    def labels(self, found: LabelCells, names: Sequence[str], lacking: str, by_number: bool) -> Labels:
        numbers = []
        for row, text in found.texts.items():
            number = _number(text)
            if number is None:
                raise found.wrong(
                    row, f"has the label '{text}', which is not a finite number," if text else "has no label"
                )
            numbers.append(number)
        return numbers

    def check_training(self, labels: Any, names: Sequence[str], limit: int | None) -> None:
        if len(set(labels)) == 1:
            raise UserError(
                f"recipe.data.train has only the number {labels[0]:g}, so there is nothing to learn: "
                + _more(limit, "give a file with different numbers")
            )


def flags_as_sets(cells: DataFrame, classes: Mapping[str, str], where: str) -> list[list[str]]:
    """The classes whose columns have a 1 in each row. Raises UserError for a cell that is neither 0 nor 1."""
    rows: list[list[str]] = [[] for _ in cells.index]
    for column, name in classes.items():
        for row, (number, cell) in zip(rows, cells[column].items(), strict=True):
            flag = _FLAGS.get(as_text(cell).lower())
            if flag is None:
                found = f"'{as_text(cell)}'" if as_text(cell) else "nothing"
                raise UserError(f"{where} {number} has {found} in recipe.data.label_columns={column}: use 0 or 1")
            if flag:
                row.append(name)
    return rows


def check_label_names(names: Any) -> None:
    """Check `recipe.data.label_names`. Raises UserError."""
    # YAML reads a bare yes or no as a boolean.
    ok = names is None or (is_list_of_text(names) and len(set(names)) == len(names) >= 2)
    require(ok, "recipe.data.label_names", names, "list two or more different names, in quotes if need be")


def is_list_of_text(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) and item for item in value)


def as_text(label: Any) -> str:
    """A label as the user would write it; some data sets have class numbers such as 1.0 and true, or NaN for none."""
    if isinstance(label, bool) or (isinstance(label, float) and label.is_integer()):
        label = int(label)
    return "" if label is None or (isinstance(label, float) and label != label) else str(label).strip()


def _is_list(cell: Any) -> bool:
    return isinstance(cell, (list, tuple, np.ndarray))


def _number(text: str) -> float | None:
    """A finite number, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _sorted_names(different: Any, rows: int, found: LabelCells) -> tuple[list[str], tuple[str, ...]]:
    """The classes in order, numbers by value; and a note unless they are 0, 1, 2, …"""
    names = sorted(different)
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        names.sort(key=int)
    if len(names) > max(_MANY_CLASSES, rows / 2):
        raise UserError(
            f"{found.place} has {len(names):,} different values in {rows:,} rows of {found.setting}: name a column of "
            "classes"
        )
    if names == [str(number) for number in range(len(names))]:
        return names, ()
    shown = ", ".join(f"'{name}' is class {number}" for number, name in enumerate(names[:_CLASSES_SHOWN]))
    more = f" and {len(names) - _CLASSES_SHOWN} more" if len(names) > _CLASSES_SHOWN else ""
    return names, (f"labels inferred: {shown}{more}",)


def numbers_of(names: Sequence[str], by_number: bool) -> dict[str, int]:
    # The Hub's copies have numbers where files have names. They are ambiguous only if a name looks like a number.
    classes = {str(number): number for number in range(len(names))} if by_number else {}
    if any(name.isdecimal() for name in names):
        classes = {}
    return classes | {name: number for number, name in enumerate(names)}


def _unknown(found: LabelCells, row: Any, label: str, names: Sequence[str], lacking: str) -> UserError:
    wrong = f"{found.where} {row} has the label '{label}' in {found.place}"
    return UserError(f"{wrong}, {lacking}{did_you_mean(label, names)}")


def _more(limit: int | None, otherwise: str) -> str:
    return f"raise recipe.data.max_train_samples={limit}" if limit else otherwise


def _check_all_classes(found: set[int], names: Sequence[str], limit: int | None) -> None:
    absent = [name for number, name in enumerate(names) if number not in found]
    if absent:
        fix = _more(limit, "remove it from recipe.data.label_names")
        raise UserError(f"recipe.data.train has no row of the class '{absent[0]}', so it cannot be learned: {fix}")
