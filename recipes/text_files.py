"""Labelled texts from tab-separated files, or from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.classification import Corpus, LabelledText
from runner.errors import UserError, first_line

#: Digits of a class number: more than that is some other column.
_LONGEST_LABEL = 6


@dataclass(frozen=True)
class TextFiles:
    """Two local files without header and without quoting, or a data set of the Hub.

    `text_column`, `label_column`: positions in the files, from 0. `hub_*`: the Hub's names for the same things.
    """

    text_column: int
    label_column: int
    columns: int
    train: str | None = None
    eval: str | None = None
    hub_name: str | None = None
    hub_config: str | None = None
    hub_train: str = "train"
    hub_eval: str = "validation"
    hub_text: str = "text"
    hub_label: str = "label"

    def __post_init__(self) -> None:
        for name in ("text_column", "label_column"):
            column = getattr(self, name)
            if not isinstance(column, int) or not 0 <= column < self.columns:
                raise UserError(
                    f"recipe.data.{name}={column} cannot be: columns are numbered from 0, "
                    f"and recipe.data.columns={self.columns}"
                )
        for name in ("train", "eval"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, str):
                raise UserError(f"recipe.data.{name}={path} cannot be: give the path of a file")

    def read(self) -> Corpus:
        if (self.train is None) != (self.eval is None):
            given, missing = ("train", "eval") if self.eval is None else ("eval", "train")
            raise UserError(
                f"recipe.data.{given} is given and recipe.data.{missing} is not: give both files"
                + (f", or neither to take {self.hub_name} from the Hub" if self.hub_name else "")
            )
        if self.train is not None and self.eval is not None:
            train, evaluation = self._file("train", self.train), self._file("eval", self.eval)
            source = f"{self.train}, {self.eval}"
        elif self.hub_name:
            train, evaluation = self._from_hub(self.hub_name)
            source = f"Hub: {self.hub_name}" + (f"/{self.hub_config}" if self.hub_config else "")
        else:
            raise UserError("there are no training data: give recipe.data.train=… and recipe.data.eval=…")
        _check_classes(train, evaluation)
        return Corpus(train, evaluation, source)

    def _file(self, part: str, name: str) -> LabelledText:
        setting = f"recipe.data.{part}={name}"
        path = Path(name).expanduser()
        if path.is_dir():
            raise UserError(f"{setting} is a folder: give the tab-separated file itself")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError as error:
            raise UserError(f"{setting} does not exist (looked in {path.absolute().parent}): check the path") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{setting} is not UTF-8 text (byte {error.start}): convert it") from error
        except OSError as error:
            raise UserError(f"{setting} cannot be read: {error.strerror}") from error
        # Not splitlines(): a text may hold other characters that count as line ends there.
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        rows = [self._row(line, number, setting) for number, line in enumerate(lines, 1) if line.strip()]
        if not rows:
            raise UserError(f"{setting} is empty: give a file with one labelled sentence per line")
        return LabelledText([text for text, _ in rows], [label for _, label in rows])

    def _row(self, line: str, number: int, setting: str) -> tuple[str, int]:
        # Quote characters are plain text in such files; a CSV reader would join lines at an odd one.
        cells = line.split("\t")
        if len(cells) != self.columns:
            raise UserError(
                f"{setting} is malformed: line {number} has {len(cells)} tab-separated columns, "
                f"and {self.columns} are expected"
            )
        label = cells[self.label_column].strip()
        if not label.isdecimal() or len(label) > _LONGEST_LABEL:
            raise UserError(
                f"{setting} is malformed: line {number} has the label '{label}' in column {self.label_column + 1}, "
                f"which is not a class number"
            )
        text = cells[self.text_column].strip()
        if not text:
            raise UserError(f"{setting} is malformed: line {number} has no text in column {self.text_column + 1}")
        return text, int(label)

    def _from_hub(self, name: str) -> tuple[LabelledText, LabelledText]:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError

        from recipes.hub import go_offline_if_unreachable

        go_offline_if_unreachable()
        try:
            parts = load_dataset(name, self.hub_config)
        except (ConnectionError, FileNotFoundError, DatasetNotFoundError, OSError, ValueError) as error:
            raise UserError(
                "there are no training data: give local files with recipe.data.train=… and recipe.data.eval=…, or go "
                f"online so that '{name}' can come from the Hugging Face Hub ({first_line(error)})"
            ) from error
        for part in (self.hub_train, self.hub_eval):
            if part not in parts:
                raise UserError(f"recipe.data has no part '{part}' on the Hub: {name} has {', '.join(parts)}")
            for column in (self.hub_text, self.hub_label):
                if column not in parts[part].column_names:
                    there = ", ".join(parts[part].column_names)
                    raise UserError(f"recipe.data has no column '{column}' on the Hub: {name} has {there}")
        train, evaluation = (
            LabelledText(
                [str(text) for text in parts[part][self.hub_text]],
                [int(x) for x in parts[part][self.hub_label]],
            )
            for part in (self.hub_train, self.hub_eval)
        )
        return train, evaluation


def _check_classes(train: LabelledText, evaluation: LabelledText) -> None:
    found = sorted(set(train.labels))
    if len(found) == 1:
        raise UserError(
            f"recipe.data.train has one class only: all {len(train)} labels are {found[0]}, "
            "so there is nothing to learn; give a file with two classes or more"
        )
    if found != list(range(len(found))):
        raise UserError(f"recipe.data.train has the classes {_listed(found)}: number them from 0 without gaps")
    unknown = sorted(set(evaluation.labels) - set(found))
    if unknown:
        raise UserError(f"recipe.data.eval has classes that recipe.data.train has not: {_listed(unknown)}")


def _listed(classes: Sequence[int]) -> str:
    return ", ".join(map(str, classes[:8])) + (" …" if len(classes) > 8 else "")
