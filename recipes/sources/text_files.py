"""Labelled texts, alone or in pairs, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipes.sources.columns import infer_columns
from recipes.sources.rows import Rows, check_columns, is_table
from recipes.sources.source import Part, Source
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import UserError, did_you_mean, require

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: A position from 0 in a file without a header, else the name of a column or field.
Column = int | str

#: More classes than this, and fewer than two rows of each, are not classes.
_MANY_CLASSES = 20

#: Classes that a note lists.
_CLASSES_SHOWN = 12


@dataclass(frozen=True)
class TextFiles(Source):
    """Rows with a text, or a pair of texts, and a label.

    `text_column`, `label_column`, and for pairs of texts `pair_column`: positions from 0 in tables without a header,
    which have `columns` columns; else names; without them they are inferred from the training file. `label_names`: the
    classes in the order of their numbers; without them the labels are sorted and numbered. Rows with a label in
    `skip_labels` are left out before `max_*_samples` are chosen. `hub_text`, `hub_pair`, `hub_label`: the Hub's names.
    """

    text_column: int | str | None = None
    label_column: int | str | None = None
    pair_column: int | str | None = None
    columns: int | None = None
    label_names: Sequence[str] | None = None
    skip_labels: Sequence[str] = ()
    hub_text: str = "text"
    hub_pair: str | None = None
    hub_label: str = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        text = self.text_column
        rule = "recipe.data.text_column=null infers the text: set recipe.data.text_column too"
        require(text is not None or self.pair_column is None, "recipe.data.pair_column", self.pair_column, rule)
        for role, column in self._given.items():
            if isinstance(column, int) != isinstance(text, int):
                raise UserError(
                    f"recipe.data.{role}_column={column} is invalid with recipe.data.text_column={text}: "
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

    @property
    def _given(self) -> dict[str, Column]:
        """The columns that are set, by role."""
        columns = {"text": self.text_column, "label": self.label_column, "pair": self.pair_column}
        return {role: column for role, column in columns.items() if column is not None}

    def read(self) -> Corpus:
        self.check_both()
        train = self._rows("train", labelled=True)
        evaluation = self._rows("eval", labelled=True, columns=train.columns)
        names, inferred = self.label_names or train.label_names, tuple[str, ...]()
        if names is None:
            names, inferred = self._infer_names(train)
        lacking = "is not in recipe.data.label_names" if self.label_names else "recipe.data.train lacks"
        learned = self._labelled(train, names, f"which {lacking}", numbers=not inferred)
        self._check_classes(learned, names)
        evaluated = self._labelled(evaluation, names, f"which {lacking}", numbers=not inferred)
        learned = dataclasses.replace(learned, notes=self.notes + train.notes + inferred)
        return Corpus(learned, evaluated, self.described("train", "eval"), names)

    def read_part(self, part: Part, file: str | None = None, label_names: Sequence[str] | None = None) -> LabelledText:
        """The training or evaluation set by itself. Raises UserError, and Unavailable as `read` does.

        `file`: in place of the configured one (or the Hub's split). `label_names`: the classes in the order of their
        numbers, such as those of a saved model; labels must be among them, or be numbers of classes if no name looks
        like a number; `skip_labels` and `max_*_samples` hold. None: all texts, without labels, for predictions; no
        label column is needed, and of columns by position only a single one of texts.
        """
        rows = self._rows(part, label_names is not None, file)
        if label_names is None:
            texts, pairs = rows.texts()
            return LabelledText(texts, None, pairs, rows.notes)
        return self._labelled(rows, label_names, "which the model does not know", numbers=True)

    def _rows(
        self, part: Part, labelled: bool, file: str | None = None, columns: Mapping[str, Column] | None = None
    ) -> _Rows:
        """`columns`: by role; by default those that are set, and the others inferred."""
        found = self.file(part, file)
        if found is None:
            return self._hub_rows(part, labelled)
        name, setting = found
        self._check_pairs("hub_pair", "pair_column")
        given = {role: column for role, column in self._given.items() if labelled or role != "label"}
        positions = isinstance(self.text_column, int)
        rows = self.rows(part, file, header=not positions)
        if positions and not is_table(name):
            raise UserError(f"recipe.data.text_column={self.text_column} is invalid for {name}: use column names")
        if positions and not labelled and len(rows.names) == 1 and "pair" not in given:
            given = {"text": 0}  # a file of texts alone
        elif self.columns is not None and len(rows.names) != self.columns:
            raise UserError(f"recipe.data.columns={self.columns} is invalid: {setting} has {len(rows.names)} columns")
        if not len(rows):
            raise _no_rows(setting)
        notes: tuple[str, ...] = ()
        if columns is None:
            require(not positions or len(given) > labelled, "recipe.data.label_column", None, "give its position")
            columns = given if positions else infer_columns(rows.dataset, setting, labelled, given)
            if inferred := [f"{role} '{column}'" for role, column in columns.items() if role not in given]:
                notes = ("columns inferred: " + ", ".join(inferred),)
        places = {role: f"recipe.data.{role}_column={column}" for role, column in columns.items()}
        for role, column in columns.items():
            if str(column) not in rows.names:
                raise UserError(f"{places[role]} is not a column of {setting}{did_you_mean(str(column), rows.names)}")
        return _Rows.of(rows, part, columns, places, notes)

    def _hub_rows(self, part: Part, labelled: bool) -> _Rows:
        self._check_pairs("pair_column", "hub_pair")
        columns = {"text": self.hub_text}
        if self.hub_pair is not None:
            columns["pair"] = self.hub_pair
        if labelled:
            columns["label"] = self.hub_label
        rows = self.rows(part)
        check_columns(rows, list(columns.values()))
        places = {role: f"recipe.data.hub_{role}={column}" for role, column in columns.items()}
        return _Rows.of(rows, part, columns, places)

    def _check_pairs(self, given: str, missing: str) -> None:
        """A pair column that is only configured for the other source would silently train on single texts."""
        column = getattr(self, given)
        if column is not None and getattr(self, missing) is None and self.text_column is not None:
            raise UserError(
                f"recipe.data.{missing}=null is invalid with recipe.data.{given}={column}: set recipe.data.{missing}, "
                f"or recipe.data.{given}=null for single texts"
            )

    def _kept(self, rows: _Rows) -> _Rows:
        """The rows whose label is not skipped."""
        skipped = rows.labels.isin([str(label) for label in self.skip_labels])
        if skipped.all():
            raise _no_rows(rows.setting, f" outside recipe.data.skip_labels={list(self.skip_labels)}")
        return dataclasses.replace(rows, cells=rows.cells[~skipped])

    def _infer_names(self, rows: _Rows) -> tuple[list[str], tuple[str, ...]]:
        """The different labels in order, numbers by value; and a note unless they are 0, 1, 2, …"""
        labels = self._kept(rows).labels
        empty = labels.eq("")
        if empty.any():
            raise UserError(f"{rows.where} {empty.idxmax()} has no label in {rows.places['label']}")
        names = sorted(labels.unique())
        if all(re.fullmatch(r"-?\d+", name) for name in names):
            names.sort(key=int)
        if len(names) > max(_MANY_CLASSES, len(labels) / 2):
            raise UserError(
                f"{rows.places['label']} has {len(names):,} different values in {len(labels):,} rows of "
                f"{rows.setting}: name a column of classes"
            )
        if names == [str(number) for number in range(len(names))]:
            return names, ()
        shown = ", ".join(f"{name} = {number}" for number, name in enumerate(names[:_CLASSES_SHOWN]))
        more = f" and {len(names) - _CLASSES_SHOWN} more" if len(names) > _CLASSES_SHOWN else ""
        return names, (f"labels inferred: {shown}{more}",)

    def _labelled(self, rows: _Rows, names: Sequence[str], lacking: str, numbers: bool) -> LabelledText:
        """The texts and classes that are kept. `lacking` follows a wrong label; `numbers`: labels may be numbers."""
        rows = self._kept(rows)
        # The Hub's copies have numbers where files have names. They are ambiguous only if a name looks like a number.
        classes = {str(number): number for number in range(len(names))} if numbers else {}
        if any(name.isdecimal() for name in names):
            classes = {}
        classes |= {name: number for number, name in enumerate(names)}
        labels = rows.labels.map(classes)
        if labels.hasnans:
            line = labels.isna().idxmax()
            label = rows.labels[line]
            wrong = f"{rows.where} {line} has the label '{label}' in {rows.places['label']}"
            raise UserError(f"{wrong}, {lacking}{did_you_mean(label, names)}")
        texts, pairs = rows.texts()
        chosen = self.chosen(rows.part, len(labels))
        return LabelledText(
            [texts[row] for row in chosen],
            labels.iloc[chosen].astype(int).tolist(),
            [pairs[row] for row in chosen] if pairs is not None else None,
            rows.notes,
        )

    def _check_classes(self, train: LabelledText, names: Sequence[str]) -> None:
        found = set(train.labels or ())
        limit = self.max_train_samples
        if len(found) == 1:
            fix = f"raise recipe.data.max_train_samples={limit}" if limit else "give a file with several classes"
            raise UserError(
                f"recipe.data.train has only labels of class {names[found.pop()]}, so there is nothing to learn: {fix}"
            )
        absent = [name for number, name in enumerate(names) if number not in found]
        if absent:
            fix = f"raise recipe.data.max_train_samples={limit}" if limit else "remove it from recipe.data.label_names"
            raise UserError(f"recipe.data.train has no row of the class '{absent[0]}', so it cannot be learned: {fix}")


@dataclass(frozen=True)
class _Rows:
    """The rows of one part, before labels become numbers.

    `cells`: a column for each role, of which the index numbers the rows for people; `columns`, `places`: these columns
    in the source and in messages; `where`: what precedes a row's number; `label_names`: of the data set.
    """

    part: Part
    cells: DataFrame
    columns: Mapping[str, Column]
    places: Mapping[str, str]
    setting: str
    where: str
    label_names: Sequence[str] | None = None
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        rows: Rows, part: Part, columns: Mapping[str, Column], places: Mapping[str, str], notes: tuple[str, ...] = ()
    ) -> _Rows:
        import pandas

        cells = {role: list(rows.dataset[str(column)]) for role, column in columns.items()}
        frame = pandas.DataFrame(cells, index=rows.numbers, dtype=object)
        names = getattr(rows.dataset.features[str(columns["label"])], "names", None) if "label" in columns else None
        return _Rows(part, frame, columns, places, rows.setting, rows.where, names, notes)

    @property
    def labels(self) -> Series[str]:
        return self.cells["label"].map(_as_text)

    def texts(self) -> tuple[list[str], list[str] | None]:
        """The texts and, for pairs, the second texts. Raises UserError if one is empty."""
        for role in ("text", "pair"):
            if role in self.cells:
                missing = self.cells[role].map(lambda cell: not isinstance(cell, str) or not cell)
                if missing.any():
                    raise UserError(f"{self.where} {missing.idxmax()} has no text in {self.places[role]}")
        return self.cells["text"].tolist(), self.cells["pair"].tolist() if "pair" in self.cells else None


def _as_text(label: Any) -> str:
    """A label as the user would write it; some data sets have class numbers such as 1.0 and true, or NaN for none."""
    if isinstance(label, bool) or (isinstance(label, float) and label.is_integer()):
        label = int(label)
    return "" if label is None or label != label else str(label).strip()


def _no_rows(setting: str, why: str = "") -> UserError:
    return UserError(f"{setting} has no rows{why}: give a file with labelled texts")


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) and item for item in value)
