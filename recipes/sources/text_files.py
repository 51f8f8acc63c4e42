"""Labelled texts, alone or in pairs, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipes.sources.columns import infer_columns, is_header
from recipes.sources.labels import (
    Classes,
    ClassSets,
    LabelCells,
    LabelKind,
    Numbers,
    check_label_names,
    flags_as_sets,
    is_list_of_text,
)
from recipes.sources.rows import Rows, check_columns, is_table
from recipes.sources.source import Part, Source, wrong_text
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import UserError, did_you_mean, require

if TYPE_CHECKING:
    from pandas import DataFrame

#: A position from 0 in a file without a header, else the name of a column or field.
Column = int | str


@dataclass(frozen=True)
class TextFiles(Source):
    """Rows with a text, or a pair of texts, and a label, several or a number, as `problem` says (see `PROBLEMS`).

    `text_column`, `label_column`, and for pairs of texts `pair_column`: positions from 0 in tables without a header,
    which have `columns` columns; else names; without them they are inferred from the training file. `label_names`: the
    classes in the order of their numbers; without them the labels are sorted and numbered. Rows with a label in
    `skip_labels` are left out before `max_*_samples` are chosen. `hub_text`, `hub_pair`, `hub_label`: the Hub's names.
    Several labels are a list; or text, in which `label_separator` separates them; or `label_columns` with 0 and 1.
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
    problem: str = "single_label"
    label_columns: Sequence[int | str] | None = None
    label_separator: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        text = self.text_column
        rule = "recipe.data.text_column=null infers the text: set recipe.data.text_column too"
        require(text is not None or self.pair_column is None, "recipe.data.pair_column", self.pair_column, rule)
        self._check_problem()
        given = [(f"recipe.data.{role}_column", column) for role, column in self._given.items()]
        for setting, column in given + [("recipe.data.label_columns", column) for column in self.label_columns or ()]:
            if isinstance(column, int) != isinstance(text, int):
                raise UserError(
                    f"{setting}={column} is invalid with recipe.data.text_column={text}: "
                    "use positions for all columns, or names for all"
                )
            if isinstance(column, int):
                ok = self.columns is not None
                require(ok, "recipe.data.columns", None, f"{setting}={column} is a position: set it")
                rule = f"use a position from 0 to recipe.data.columns={self.columns} - 1"
                require(0 <= column < (self.columns or 0), setting, column, rule)
        check_label_names(self.label_names)
        rule = "list labels, such as ['-'], or [] for none"
        require(is_list_of_text(self.skip_labels), "recipe.data.skip_labels", self.skip_labels, rule)

    def _check_problem(self) -> None:
        """Check the settings of labels that not every problem has. Raises UserError."""
        several, columns = self.problem == "multi_label", self.label_columns
        only = "only recipe=multi_label has several labels; use null"
        require(several or columns is None, "recipe.data.label_columns", columns, only)
        require(several or self.label_separator is None, "recipe.data.label_separator", self.label_separator, only)
        ok = self.label_separator is None or bool(str(self.label_separator).strip())
        require(ok, "recipe.data.label_separator", self.label_separator, "use a character, such as ';', or null")
        names = self.label_names
        require(
            self.problem != "regression" or names is None, "recipe.data.label_names", names, "numbers have no names"
        )
        rule = "it leaves out rows by their only label; use []"
        require(not (several and self.skip_labels), "recipe.data.skip_labels", self.skip_labels, rule)
        if columns is not None:
            ok = isinstance(columns, (list, tuple)) and len(set(columns)) == len(columns) >= 2
            require(ok, "recipe.data.label_columns", columns, "list two or more different columns of 0 and 1")
            other = self.label_column or self.label_separator
            require(other is None, "recipe.data.label_columns", columns, "leave out label_column and label_separator")
            ok = names is None or len(names) == len(columns)
            rule = f"recipe.data.label_columns has {len(columns)} columns; give a name for each, or null"
            require(ok, "recipe.data.label_names", names, rule)

    @property
    def _kind(self) -> LabelKind:
        kinds = {"single_label": Classes(), "multi_label": ClassSets(self.label_separator), "regression": Numbers()}
        return kinds[self.problem]

    @property
    def _given(self) -> dict[str, Column]:
        """The columns that are set, by role."""
        columns = {"text": self.text_column, "label": self.label_column, "pair": self.pair_column}
        return {role: column for role, column in columns.items() if column is not None}

    @property
    def _flags(self) -> dict[str, str]:
        """The columns of 0 and 1, and the class of each."""
        columns = list(map(str, self.label_columns or ()))
        return dict(zip(columns, self.label_names or columns, strict=False))  # of other lengths only without columns

    def read(self) -> Corpus:
        self.check_both()
        train = self._rows("train", labelled=True)
        evaluation = self._rows("eval", labelled=True, columns=train.columns)
        names, inferred = self.label_names, tuple[str, ...]()
        if names is None:
            names, inferred = self._kind.names(self._kept(train).labels)
        lacking = "is not in recipe.data.label_names" if self.label_names else "recipe.data.train lacks"
        learned = self._labelled(train, names, f"which {lacking}", by_number=not inferred)
        self._kind.check_training(learned.labels, names, self.max_train_samples)
        evaluated = self._labelled(evaluation, names, f"which {lacking}", by_number=not inferred)
        learned = dataclasses.replace(learned, notes=train.notes + inferred)
        leak = self.leak(_samples(learned), _samples(evaluated))
        notes = tuple(dict.fromkeys((*leak, *learned.notes, *evaluated.notes)))
        return Corpus(learned, evaluated, self.described("train", "eval"), names, notes=notes)

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
        return self._labelled(rows, label_names, "which the model does not know", by_number=True)

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
        flags = self._flags if labelled else {}
        positions = isinstance(self.text_column, int)
        rows = self.rows(part, file, header=not positions)
        by_name = positions and not labelled and (not is_table(name) or is_header(rows.dataset[0].values()))
        if by_name:  # a file to predict for may have a header where the training data have none
            rows, positions, given = self.rows(part, file), False, {}
        if missing := [name for name in flags if name not in rows.names]:
            known = did_you_mean(missing[0], rows.names)
            raise UserError(f"recipe.data.label_columns={missing[0]} is not a column of {setting}{known}")
        if positions and not is_table(name):
            raise UserError(f"recipe.data.text_column={self.text_column} is invalid for {name}: use column names")
        if positions and not labelled and len(rows.names) == 1 and "pair" not in given:
            given = {"text": 0}  # a file of texts alone
        elif self.columns is not None and not by_name and len(rows.names) != self.columns:
            commas = " between commas" if name.lower().endswith(".csv") else ""
            wrong = f"{setting} has {len(rows.names)} column{'s' * (len(rows.names) > 1)}{commas}"
            raise UserError(f"recipe.data.columns={self.columns} is invalid: {wrong}")
        if not len(rows):
            raise _no_rows(setting)
        notes: tuple[str, ...] = ()
        if columns is None:
            by_label = labelled and not flags
            has_label = "label" in given or not (positions and by_label)
            require(has_label, "recipe.data.label_column", None, "give its position")
            others = rows.dataset.remove_columns(list(flags))
            columns = given if positions else infer_columns(others, setting, self._kind, by_label, given)
            if inferred := [f"{role} '{column}'" for role, column in columns.items() if role not in given]:
                notes = ("columns inferred: " + ", ".join(inferred),)
            if by_name and ("pair" in columns) != ("pair" in self._given):
                one, other = ("pairs of texts", "single texts")[:: -1 if "pair" in columns else 1]
                raise UserError(f"{setting} has {other} ({notes[0]}), and the recipe has {one}: give a file with these")
        places = {
            role: f"recipe.data.{role}_column={column}{'' if role in given else ' (inferred)'}"
            for role, column in columns.items()
        }
        for role, column in columns.items():
            if str(column) not in rows.names:
                raise UserError(f"{places[role]} is not a column of {setting}{did_you_mean(str(column), rows.names)}")
        return _Rows.of(rows, part, columns, places, flags, notes)

    def _hub_rows(self, part: Part, labelled: bool) -> _Rows:
        self._check_pairs("pair_column", "hub_pair")
        columns = {"text": self.hub_text}
        if self.hub_pair is not None:
            columns["pair"] = self.hub_pair
        flags = self._flags if labelled else {}
        if labelled and not flags:
            columns["label"] = self.hub_label
        rows = self.rows(part)
        check_columns(rows, [*columns.values(), *flags])
        places = {role: f"recipe.data.hub_{role}={column}" for role, column in columns.items()}
        return _Rows.of(rows, part, columns, places, flags)

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
        skipped = rows.labels.texts.isin([str(label) for label in self.skip_labels])
        if skipped.all():
            raise _no_rows(rows.setting, f" outside recipe.data.skip_labels={list(self.skip_labels)}")
        return dataclasses.replace(rows, cells=rows.cells[~skipped])

    def _labelled(self, rows: _Rows, names: Sequence[str], lacking: str, by_number: bool) -> LabelledText:
        """The texts and labels that are kept. `lacking`, `by_number`: as of `LabelKind.labels`."""
        rows = self._kept(rows)
        labels: Any = self._kind.labels(rows.labels, names, lacking, by_number)
        texts, pairs = rows.texts()
        classes = None
        if self.problem != "regression":
            classes = [one if isinstance(one, tuple) else (one,) for one in labels]
        chosen = self.chosen(rows.part, len(labels), classes)
        return LabelledText(
            [texts[row] for row in chosen],
            [labels[row] for row in chosen],
            [pairs[row] for row in chosen] if pairs is not None else None,
            rows.notes,
        )


@dataclass(frozen=True)
class _Rows:
    """The rows of one part, before labels become numbers.

    `cells`: a column for each role, of which the index numbers the rows for people; `columns`, `places`: these columns
    in the source and in messages; `where`: what precedes a row's number; `label_names`: of the data set. Columns of 0
    and 1 become one with lists of classes.
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
        rows: Rows,
        part: Part,
        columns: Mapping[str, Column],
        places: Mapping[str, str],
        flags: Mapping[str, str],
        notes: tuple[str, ...] = (),
    ) -> _Rows:
        import pandas

        cells = {role: rows.dataset[str(column)][:] for role, column in columns.items()}
        frame = pandas.DataFrame(cells, index=rows.numbers, dtype=object)
        names: Sequence[str] | None = None
        if flags:
            names, places = list(flags.values()), {**places, "label": f"recipe.data.label_columns={list(flags)}"}
            several = pandas.DataFrame({name: rows.dataset[name][:] for name in flags}, rows.numbers, dtype=object)
            frame["label"] = flags_as_sets(several, flags, rows.where)
        elif "label" in columns:
            feature = rows.dataset.features[str(columns["label"])]
            names = getattr(getattr(feature, "feature", feature), "names", None)  # of a list, those of its values
        return _Rows(part, frame, columns, places, rows.setting, rows.where, names, notes)

    @property
    def labels(self) -> LabelCells:
        return LabelCells(self.cells["label"], self.where, self.places["label"], self.setting, self.label_names)

    def texts(self) -> tuple[list[str], list[str] | None]:
        """The texts and, for pairs, the second texts. Raises UserError for one that cannot be trained on."""
        for role in ("text", "pair"):
            if role in self.cells:
                wrong = self.cells[role].map(lambda cell: wrong_text(cell, blank=True)).dropna()
                if len(wrong):
                    raise UserError(f"{self.where} {wrong.index[0]} has {wrong.iloc[0]} in {self.places[role]}")
        return self.cells["text"].tolist(), self.cells["pair"].tolist() if "pair" in self.cells else None


def _samples(part: LabelledText) -> Iterable[Hashable]:
    """What is classified."""
    return part.texts if part.pairs is None else zip(part.texts, part.pairs, strict=True)


def _no_rows(setting: str, why: str = "") -> UserError:
    return UserError(f"{setting} has no rows{why}: give a file with labelled texts")
