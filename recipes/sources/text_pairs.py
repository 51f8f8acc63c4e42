"""Texts to read and texts to write, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from recipes.sources.rows import check_columns
from recipes.sources.source import Part, Source, wrong_text
from recipes.tasks.seq2seq import PairCorpus, TextPairs
from runner.errors import UserError


@dataclass(frozen=True)
class TextPairFiles(Source):
    """Rows with two texts.

    `source_column`, `target_column`: of what is read and written; `translation.en` is the field `en` of a column.
    """

    source_column: str = "source"
    target_column: str = "target"

    def read(self) -> PairCorpus:
        """Read and check the data. Raises UserError, Unavailable."""
        self.check_both()
        train, evaluation = self._pairs("train"), self._pairs("eval")
        leak = self.leak(train.sources, evaluation.sources)
        return PairCorpus(train, evaluation, self.described("train", "eval"), notes=leak)

    def read_evaluation(self, file: str | None = None) -> PairCorpus:
        """The evaluation set, or the sources of `file` without their targets, and no training set."""
        return PairCorpus(TextPairs([], []), self._pairs("eval", file), file or self.described("eval"))

    def _pairs(self, part: Part, file: str | None = None) -> TextPairs:
        rows = self.rows(part, file)
        columns = [self.source_column, *([self.target_column] if file is None else [])]
        if not set(columns) <= set(rows.names):
            rows = dataclasses.replace(rows, dataset=rows.dataset.flatten())
        check_columns(rows, columns)
        if not len(rows):
            raise UserError(f"{rows.setting} has no rows: give a file with texts")
        chosen = range(len(rows)) if file is not None else self.chosen(part, len(rows))
        texts = []
        for column in columns:
            cells = rows.dataset[column][:]
            for number, cell in zip(rows.numbers, cells, strict=True):
                if (wrong := wrong_text(cell)) is not None:
                    raise UserError(f"{rows.where} {number} has {wrong} in '{column}'")
            texts.append([cells[row] for row in chosen])
        return TextPairs(texts[0], texts[1] if file is None else None)
