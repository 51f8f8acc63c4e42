"""Labelled texts, alone or in pairs, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.sources.sources import expected_sizes, hub_parts, hub_words, local_files
from recipes.sources.text_rows import Column, in_words, read_rows
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import UserError, did_you_mean, require

#: Digits of a class number: more than that is some other column.
_LONGEST_LABEL = 6

#: Class number, text, and second text of a pair.
Sample = tuple[int, str, str | None]


@dataclass(frozen=True)
class TextFiles:
    """Two local files, or a data set of the Hub.

    `text_column`, `label_column`, and for pairs of texts `pair_column`: positions from 0 in tab-separated files without
    a header, which have `columns` of them; or names in tab-separated files with a header, or in JSON Lines (`.jsonl`).
    `label_names`: the classes in the order of their numbers; without them labels are numbers. Rows with one of
    `skip_labels` are left out, and of the others the first `max_*_samples` are kept. `hub_*`: the Hub's names for the
    same things. `hub_*_samples`: rows that the data set `hub_samples_of` is known to have, for a plan without the data.
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
    hub_samples_of: str | None = None
    hub_train_samples: int | None = None
    hub_eval_samples: int | None = None

    def __post_init__(self) -> None:
        self._check_columns()
        self._check_labels()
        for name in ("max_train_samples", "max_eval_samples", "hub_train_samples", "hub_eval_samples"):
            count = getattr(self, name)
            require(count is None or count >= 1, f"recipe.data.{name}", count, "it must be at least 1 row, or null")

    def _wanted(self) -> dict[str, Column]:
        columns: dict[str, Column] = {"text": self.text_column, "label": self.label_column}
        return columns if self.pair_column is None else {**columns, "pair": self.pair_column}

    def _check_columns(self) -> None:
        wanted = self._wanted()
        for role, column in wanted.items():
            ok = isinstance(column, (int, str)) and not isinstance(column, bool) and column != ""
            require(ok, f"recipe.data.{role}_column", column, "give a position from 0, or a name")
            if isinstance(column, str) != isinstance(self.text_column, str):
                raise UserError(
                    f"recipe.data.text_column={self.text_column} and recipe.data.{role}_column={column} cannot be "
                    "together: give positions for all columns, or names for all"
                )
            twin = next(other for other, value in wanted.items() if value == column)
            require(twin == role, f"recipe.data.{role}_column", column, f"recipe.data.{twin}_column is the same")
        for role, column in wanted.items():
            if isinstance(column, str):
                continue
            if self.columns is None:
                raise UserError(
                    f"recipe.data.columns=null cannot be with recipe.data.{role}_column={column}, a position: give the "
                    "number of columns, or the names that the files' header has"
                )
            rule = f"columns are numbered from 0, and recipe.data.columns={self.columns}"
            require(0 <= column < self.columns, f"recipe.data.{role}_column", column, rule)

    def _check_labels(self) -> None:
        names = self.label_names
        if names is not None:
            ok = _is_list(names) and all(isinstance(name, str) and name and name == name.strip() for name in names)
            require(ok, "recipe.data.label_names", names, "give the classes' names in a list, in quotes if need be")
            ok = len(set(names)) == len(names) >= 2
            require(ok, "recipe.data.label_names", names, "there must be two classes or more, each named once")
        rule = "give labels in a list, such as ['-'], or [] for none"
        require(_is_list(self.skip_labels), "recipe.data.skip_labels", self.skip_labels, rule)

    def read(self) -> Corpus:
        files = local_files(self.train, self.eval, self.hub_name)
        if files is not None:
            self._check_counterpart("hub_pair", "pair_column", "the files")
            train, evaluation = self._file("train", files[0]), self._file("eval", files[1])
            source = ", ".join(files)
        else:
            self._check_counterpart("pair_column", "hub_pair", "the Hub's copy")
            train, evaluation = self._from_hub()
            source = f"Hub: {self._hub_words}"
        self._check_classes(train, evaluation)
        return Corpus(train, evaluation, source)

    def expected_sizes(self) -> tuple[int, int, str] | None:
        """Rows of training and evaluation part of the Hub's copy, and who says so; None if that is not known."""
        if self.train is not None or self.eval is not None:
            return None
        known = (self.hub_train_samples, self.hub_eval_samples)
        limits = (self.max_train_samples, self.max_eval_samples)
        return expected_sizes(self._hub_words, self.hub_samples_of, known, limits)

    @property
    def _hub_words(self) -> str:
        return hub_words(self.hub_name, self.hub_config, self.hub_train, self.hub_eval)

    def _check_counterpart(self, given: str, missing: str, where: str) -> None:
        if getattr(self, given) is not None and getattr(self, missing) is None:
            raise UserError(
                f"recipe.data.{given}={getattr(self, given)} is given and recipe.data.{missing} is not, so {where} "
                f"would have no pairs: set recipe.data.{missing}, or recipe.data.{given}=null"
            )

    def _file(self, part: str, name: str) -> LabelledText:
        setting = f"recipe.data.{part}={name}"
        wanted = self._wanted()

        def rows() -> Iterator[Sample]:
            for number, values in read_rows(setting, name, wanted, self.columns):
                if self._skips(values["label"]):
                    continue
                place = f"{setting} is malformed: line {number}"
                label = self._class(values["label"], place, in_words(self.label_column))
                for role in ("text", "pair"):
                    if values.get(role) == "":
                        raise UserError(f"{place} has no text in {in_words(wanted[role])}")
                yield label, values["text"], values.get("pair")

        return self._labelled(rows(), part, setting)

    def _from_hub(self) -> list[LabelledText]:
        assert self.hub_name is not None
        columns = [column for column in (self.hub_label, self.hub_text, self.hub_pair) if column is not None]
        names = (self.hub_train, self.hub_eval)
        parts = hub_parts(self.hub_name, self.hub_config, names, columns)
        setting = f"recipe.data.hub_name={self.hub_name}"

        def rows(name: str, part: Any) -> Iterator[Sample]:
            for number, (given, *texts) in enumerate(zip(*(part[column] for column in columns), strict=True)):
                if self._skips(given):
                    continue
                place = f"{setting} is malformed: row {number} of '{name}'"
                label = self._class(given, place, f"column '{self.hub_label}'")
                for column, text in zip(columns[1:], texts, strict=True):
                    if not isinstance(text, str):
                        raise UserError(f"{place} has no text in column '{column}'")
                text, *pair = texts
                yield label, text, pair[0] if pair else None

        return [
            self._labelled(rows(name, part), which, setting)
            for which, name, part in zip(("train", "eval"), names, parts, strict=True)
        ]

    def _labelled(self, rows: Iterable[Sample], part: str, setting: str) -> LabelledText:
        """The first of these rows, as many as are wanted."""
        kept = list(itertools.islice(rows, getattr(self, f"max_{part}_samples")))
        if not kept:
            why = f": recipe.data.skip_labels={list(self.skip_labels)} leaves them all out" if self.skip_labels else ""
            raise UserError(f"{setting} has no rows{why}")
        pairs = [pair for _, _, pair in kept if pair is not None]
        return LabelledText([text for _, text, _ in kept], [label for label, _, _ in kept], pairs or None)

    def _skips(self, label: Any) -> bool:
        return str(label).strip() in map(str, self.skip_labels)

    def _class(self, given: Any, place: str, where: str) -> int:
        """The number of a label's class. Raises UserError."""
        if isinstance(given, bool) or (isinstance(given, float) and given.is_integer()):
            given = int(given)  # as some data sets of the Hub store class numbers
        label = str(given).strip()
        names = self.label_names
        if names and label in names:
            return list(names).index(label)
        is_number = label.isdecimal() and len(label) <= _LONGEST_LABEL
        # Numbers will do beside names, as in the Hub's copies, unless a name reads like a number itself.
        if is_number and (not names or (int(label) < len(names) and not any(name.isdecimal() for name in names))):
            return int(label)
        wrong = "is not a class number" if not names else f"recipe.data.label_names has not{did_you_mean(label, names)}"
        mend = "" if not names else " (recipe.data.skip_labels leaves rows out)"
        raise UserError(f"{place} has the label '{label}' in {where}, which {wrong}{mend}")

    def _check_classes(self, train: LabelledText, evaluation: LabelledText) -> None:
        found = sorted(set(train.labels))
        if len(found) == 1:
            limit = self.max_train_samples
            mend = f"take more rows than recipe.data.max_train_samples={limit}" if limit else "give a file with more"
            raise UserError(
                f"recipe.data.train has one class only: all {len(train)} labels are {found[0]}, so there is nothing to "
                f"learn; {mend}"
            )
        absent = [name for number, name in enumerate(self.label_names or ()) if number not in found]
        if absent:
            raise UserError(
                f"recipe.data.train has no row labelled '{absent[0]}', which recipe.data.label_names lists: leave the "
                "name out, or take more rows"
            )
        if found != list(range(len(found))):
            raise UserError(f"recipe.data.train has the classes {_listed(found)}: number them from 0 without gaps")
        unknown = sorted(set(evaluation.labels) - set(found))
        if unknown:
            raise UserError(f"recipe.data.eval has classes that recipe.data.train has not: {_listed(unknown)}")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _listed(classes: Sequence[int]) -> str:
    return ", ".join(map(str, classes[:8])) + (" …" if len(classes) > 8 else "")
