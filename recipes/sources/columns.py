"""Which columns of a table hold the texts and their labels, if the settings do not say."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from recipes.sources.rows import SEPARATORS
from runner.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

    from recipes.sources.labels import LabelKind

_TEXTS = ("text", "sentence", "review", "message", "content", "comment", "tweet", "document", "body", "utterance")
_PAIRS = (
    *(("sentence1", "sentence2"), ("sentence_1", "sentence_2"), ("text1", "text2"), ("text_a", "text_b")),
    *(("premise", "hypothesis"), ("question1", "question2"), ("question", "answer"), ("question", "sentence")),
    *(("query", "passage"), ("query", "document")),
)

#: Rows of which the content is looked at.
_LOOKED_AT = 10_000

#: The least number of characters in a column of texts, on average, and the least share of different values.
_TEXT_CHARACTERS, _TEXT_DIFFERENT = 15, 0.5


def is_header(cells: Iterable[str]) -> bool:
    """Whether the first line of a table has a usual name of a column of texts."""
    return not {*_TEXTS, *itertools.chain.from_iterable(_PAIRS)}.isdisjoint(cell.lower() for cell in cells)


def infer_columns(
    rows: Dataset, setting: str, kind: LabelKind, labelled: bool, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The columns by role: `text`, `label` if `labelled`, with labels of this kind, and `pair` for pairs of texts.

    Those that are not `given` by their usual names, else by their content. Raises UserError if several columns, or
    none, fit.
    """
    table = rows.select(range(min(len(rows), _LOOKED_AT))).to_pandas()
    names = [name for name in map(str, table.columns) if name not in given.values()]
    by_lower = {name.lower(): name for name in names}
    columns = dict(given)

    def choose(role: str, fit: list[str]) -> None:
        if len(fit) != 1:
            if len(table.columns) == 1 and any(mark in str(table.columns[0]) for mark in SEPARATORS):
                raise UserError(
                    f"{setting} has one column, '{table.columns[0]}', so its separator is not the one that was read: "
                    "columns of a .csv are separated by commas, or all by semicolons or bars; others by tabs"
                )
            found = f"{' and '.join(map(repr, fit))} could be it" if fit else "none is recognised"
            unlabelled = ", or use runner.predict for texts without labels" if role == "label" and not fit else ""
            unlabelled = kind.otherwise * (role == "label") + unlabelled
            shown = ", ".join(map(repr, names))
            raise UserError(
                f"recipe.data.{role}_column=null is ambiguous: {setting} has the columns {shown}, of which {found}; "
                f"set recipe.data.{role}_column to one of them{unlabelled}"
            )
        if (table[fit[0]].astype(str) == fit[0]).any():
            places = {**columns, role: fit[0]}
            everything = list(map(str, table.columns))
            roles = [one for one in ("text", "pair", "label") if one in places]
            found = " ".join(f"recipe.data.{one}_column={everything.index(places[one])}" for one in roles)
            found += "" if "label" in places else " recipe.data.label_column=…"
            raise UserError(
                f"recipe.data.{role}_column=null cannot be inferred: {setting} has '{fit[0]}' in its first line and "
                f"again, so it may have no header; then name all columns by position, counted from 0: "
                f"recipe.data.columns={len(everything)} {found}"
            )
        columns[role] = fit[0]

    labels = [by_lower[name] for name in kind.usual if name in by_lower]
    if "text" not in given:
        texts = [by_lower[name] for name in _TEXTS if name in by_lower]
        pairs = [[by_lower[name] for name in pair] for pair in _PAIRS if all(name in by_lower for name in pair)]
        fit = list(dict.fromkeys(texts + [name for pair in pairs for name in pair]))
        if len(pairs) == 1 and set(fit) == set(pairs[0]):
            choose("text", pairs[0][:1])
            choose("pair", pairs[0][1:])
        else:
            choose("text", fit or [name for name in names if name not in labels and _like_texts(table[name])])
    if labelled and "label" not in given:
        others = [name for name in names if name not in columns.values()]
        choose("label", labels or [name for name in others if kind.like(table[name])])
    return columns


def _like_texts(column: Any) -> bool:
    if not column.map(lambda cell: isinstance(cell, str)).all():
        return False
    return bool(column.str.len().mean() >= _TEXT_CHARACTERS and column.nunique() >= _TEXT_DIFFERENT * len(column))
