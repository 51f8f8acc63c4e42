"""Sentences as lists of words with a tag for each: rows with two lists, or CoNLL's form, a word in each line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from recipes.sources.labels import as_text, numbers_of
from recipes.sources.rows import has_columns, read_texts
from recipes.sources.source import Part, Source, wrong_text
from recipes.tasks.token_classification import Sentences, TaggedCorpus
from runner.errors import UserError, did_you_mean, require

#: The first column of a line between the documents of a CoNLL file.
_DOCUMENT = "-DOCSTART-"

#: Tables, whose cells are text.
_TABLES = (".csv", ".xls", ".xlsx")

#: Tags that a note lists.
_TAGS_SHOWN = 12


@dataclass(frozen=True)
class _Row:
    """One sentence. `where`: source and number, for messages; `tags`: None if they are not read."""

    where: str
    words: list[str]
    tags: list[str] | None


@dataclass(frozen=True)
class TaggedWords(Source):
    """Rows of `.json`, `.jsonl`, `.parquet`, `.arrow`, saved data sets and the Hub; any other file is in CoNLL's form.

    `tokens_column`, `tags_column`: names, by default `tokens` and `tags`; in CoNLL's form positions from 0, by default
    the first and the last. `label_names`: the tags in the order of their numbers; without them those of the data set,
    or those of the training set, sorted.
    """

    tokens_column: int | str | None = None
    tags_column: int | str | None = None
    label_names: Sequence[str] | None = None

    unit: ClassVar[str] = "sentence"

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.label_names
        # YAML reads a bare no, and so a tag for no entity, as a boolean.
        ok = names is None or (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names))
        ok = ok and (names is None or len(set(names)) == len(names) >= 2)
        require(ok, "recipe.data.label_names", names, "list two or more different tags, in quotes if need be")

    def read(self) -> TaggedCorpus:
        """Read and check the data. Raises UserError, Unavailable."""
        self.check_both()
        train, own_names = self._part("train")
        evaluation, _ = self._part("eval")
        names, inferred = self.label_names or own_names, tuple[str, ...]()
        if names is None:
            names = sorted({tag for row in train for tag in row.tags or ()})
            shown = ", ".join(names[:_TAGS_SHOWN]) + (
                f" and {len(names) - _TAGS_SHOWN} more" * (len(names) > _TAGS_SHOWN)
            )
            inferred = (f"tags inferred: {shown}",)
        if len(names) < 2:
            raise UserError(f"recipe.data.train has only the tag '{names[0]}', so there is nothing to learn")
        lacking = "which recipe.data.train lacks: name all tags in recipe.data.label_names"
        if self.label_names or own_names:
            lacking = (
                f"which is not in {'recipe.data.label_names' if self.label_names else 'the names of the data set'}"
            )
        learned = self._numbered("train", train, names, lacking)
        evaluated = self._numbered("eval", evaluation, names, lacking)
        leak = self.leak(map(tuple, learned.words), map(tuple, evaluated.words))
        return TaggedCorpus(learned, evaluated, self.described("train", "eval"), tuple(names), notes=leak + inferred)

    def read_evaluation(self, file: str | None = None, label_names: Sequence[str] | None = None) -> Sentences:
        """The evaluation set by itself, or all sentences of `file`. Raises UserError, Unavailable.

        `label_names`: the tags of a saved model in the order of their numbers; None reads no tags.
        """
        rows, _ = self._part("eval", file, tagged=label_names is not None)
        if label_names is None:
            return Sentences([row.words for row in rows], None)
        return self._numbered("eval", rows, label_names, "which the model does not know")

    def _part(self, part: Part, file: str | None = None, tagged: bool = True) -> tuple[list[_Row], list[str] | None]:
        """All sentences, and the names of the tags if the data set has them."""
        found = self.file(part, file)
        names: list[str] | None = None
        if found is None or (has_columns(found[0]) and Path(found[0]).suffix.lower() not in (*_TABLES, ".tsv")):
            rows, names = self._listed(part, file, tagged)
        else:
            rows = list(self._lines(*found, tagged))
        if not rows:
            setting = found[1] if found is not None else f"recipe.data.hub_name={self.hub_name}"
            raise UserError(f"{setting} has no sentences: give a file with words")
        return rows, names

    def _listed(self, part: Part, file: str | None, tagged: bool) -> tuple[list[_Row], list[str] | None]:
        rows = self.rows(part, file)
        given = {"tokens": self.tokens_column, **({"tags": self.tags_column} if tagged else {})}
        columns = {role: role if column is None else str(column) for role, column in given.items()}
        for role, column in columns.items():
            rule = f"{rows.setting} has no such column{did_you_mean(column, rows.names)}"
            require(column in rows.names, f"recipe.data.{role}_column", column, rule)
        words, tags = rows.dataset[columns["tokens"]][:], None
        names: list[str] | None = None
        if tagged:
            feature = rows.dataset.features[columns["tags"]]
            names = getattr(getattr(feature, "feature", feature), "names", None)  # of a list, those of its values
            tags = rows.dataset[columns["tags"]][:]
        found = []
        for row, (number, cell) in enumerate(zip(rows.numbers, words, strict=True)):
            where = f"{rows.where} {number}"
            own = None if tags is None else _list(tags[row], f"{where} has no list of tags in '{columns['tags']}'")
            if own is not None and names is not None and self.label_names is None:
                own = [names[tag] if isinstance(tag, int) and 0 <= tag < len(names) else tag for tag in own]
            found.append(_row(where, _list(cell, f"{where} has no list of words in '{columns['tokens']}'"), own))
        return found, names

    def _lines(self, name: str, setting: str, tagged: bool) -> Iterator[_Row]:
        """The sentences of files with a word in each line and an empty line after each sentence."""
        suffix = Path(name).suffix.lower()
        if suffix in _TABLES or os.path.isdir(os.path.expanduser(name)):
            raise UserError(
                f"{setting} has no lists of words: give .jsonl, .parquet, or a file with a word in each line"
            )
        given = {"tokens": self.tokens_column, **({"tags": self.tags_column} if tagged else {})}
        places: list[int] = []
        for role, place in given.items():
            if isinstance(place, str):
                rule = f"{setting} has a word in each line, whose columns are numbered from 0; give a number, or null"
                raise UserError(f"recipe.data.{role}_column={place} is invalid: {rule}")
            places.append({"tokens": 0, "tags": -1}[role] if place is None else place)
        for text in read_texts(name, setting):
            cells: list[list[str]] = []
            for number, line in enumerate([*text.split("\n"), ""], start=1):
                found = _split(line)
                if found and found[0] != _DOCUMENT:
                    if len(found) < 1 + tagged or not all(-len(found) <= place < len(found) for place in places):
                        wrong = f"{setting}: line {number} has {len(found)} column{'s' * (len(found) > 1)}"
                        raise UserError(f"{wrong}: give a word{' and its tag' * tagged} in each line")
                    cells.append([found[place] for place in places])
                elif cells:
                    words, *tags = (list(column) for column in zip(*cells, strict=True))
                    where = f"{setting}: the sentence from line {number - len(cells)}"
                    yield _row(where, words, tags[0] if tags else None)
                    cells = []

    def _numbered(self, part: Part, rows: Sequence[_Row], names: Sequence[str], lacking: str) -> Sentences:
        """The sentences that are kept, with numbers for their tags. `lacking` follows an unknown tag."""
        numbers = numbers_of(names, by_number=self.label_names is not None)
        tags = []
        for row in rows:
            assert row.tags is not None
            unknown = next((tag for tag in row.tags if tag not in numbers), None)
            if unknown is not None:
                raise UserError(f"{row.where} has the tag '{unknown}', {lacking}{did_you_mean(unknown, names)}")
            tags.append([numbers[tag] for tag in row.tags])
        chosen = self.chosen(part, len(rows))
        return Sentences([rows[row].words for row in chosen], [tags[row] for row in chosen])


def _row(where: str, words: Sequence[Any], tags: Sequence[Any] | None) -> _Row:
    """Raises UserError for words that are no texts, and for tags that are missing."""
    if not words:
        raise UserError(f"{where} has no words: remove it")
    for number, word in enumerate(words, 1):
        if (wrong := wrong_text(word)) is not None:
            raise UserError(f"{where} has {wrong} as word {number}")
    if tags is None:
        return _Row(where, list(words), None)
    if len(tags) != len(words):
        raise UserError(f"{where} has {len(words)} words and {len(tags)} tags: give one for each word")
    texts = [as_text(tag) for tag in tags]
    if "" in texts:
        raise UserError(f"{where} has no tag for word {texts.index('') + 1}, '{words[texts.index('')]}'")
    return _Row(where, list(words), texts)


def _list(cell: Any, wrong: str) -> Sequence[Any]:
    if not isinstance(cell, (list, tuple)):
        raise UserError(f"{wrong}: give a list in each row")
    return cell


def _split(line: str) -> list[str]:
    """The columns of a line, between tabs if it has any. Other white space may be part of a word."""
    columns = line.split("\t") if "\t" in line else line.strip("\r ").split(" ")
    return [column.strip() for column in columns if column or "\t" in line] if line.strip() else []
