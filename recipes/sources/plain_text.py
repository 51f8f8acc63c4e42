"""Plain text, document by document, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from recipes.sources.rows import check_columns, has_columns, read_texts
from recipes.sources.source import Part, Source, wrong_text
from recipes.tasks.language_model import Documents
from runner.errors import UserError, require

#: `documents` -> how a text is split into documents. A blank line may contain spaces.
_SPLIT: dict[str, Callable[[str], list[str]]] = {
    "lines": lambda text: text.split("\n"),
    "paragraphs": lambda text: re.split(r"\n(?:[^\S\n]*\n)+", text),
    "files": lambda text: [text],
}


@dataclass(frozen=True)
class PlainText(Source):
    """UTF-8 files of text, or rows with a text.

    `documents`: a document is a line, a paragraph (between blank lines) or a file; a row's text is split like a file.
    `text_column`, and `hub_text` of the Hub: the column of texts in files that have columns.
    """

    documents: str = "lines"
    text_column: str = "text"
    hub_text: str = "text"

    unit: ClassVar[str] = "document"

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.documents in _SPLIT
        require(ok, "recipe.data.documents", self.documents, f"use one of {', '.join(_SPLIT)}")

    def read(self) -> Documents:
        """Read and check the data. Raises UserError, Unavailable."""
        self.check_both()
        return Documents(self._documents("train"), self._documents("eval"), self.described("train", "eval"))

    def read_evaluation(self, file: str | None = None) -> Documents:
        """The evaluation set, or all documents of `file`, and no training set. Raises UserError, Unavailable."""
        return Documents([], self._documents("eval", file), file or self.described("eval"))

    def _documents(self, part: Part, file: str | None = None) -> list[str]:
        found = self.file(part, file)
        if found is not None and not has_columns(found[0]):
            documents, setting = self._split(read_texts(*found)), found[1]
        else:
            rows = self.rows(part, file)
            setting, column = rows.setting, self.hub_text if found is None else self.text_column
            check_columns(rows, [column])
            texts = rows.dataset[column][:]
            if not all(isinstance(text, str) for text in texts):
                raise UserError(f"{setting} has a column '{column}' that is not of texts: name another")
            documents = self._split(texts)
        if not documents:
            raise UserError(f"{setting} contains no text: give a file with text")
        for number, document in enumerate(documents, 1):
            if (wrong := wrong_text(document)) is not None:
                raise UserError(f"{setting}: document {number} has {wrong}")
        return documents if file is not None else [documents[row] for row in self.chosen(part, len(documents))]

    def _split(self, texts: Iterable[str]) -> list[str]:
        """The documents that are not blank, without line ends around them."""
        parts = (part.strip("\r\n") for text in texts for part in _SPLIT[self.documents](text))
        return [part for part in parts if part.strip()]
