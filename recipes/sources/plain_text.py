"""Plain text, document by document, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from recipes.sources.files import check_subsets, evaluation_file, local_files, read_text, subset
from recipes.sources.hub import load_splits
from recipes.tasks.language_model import Documents
from runner.errors import UserError, require

#: `documents` -> how a file's text is split into documents. A blank line may contain spaces.
_SPLIT: dict[str, Callable[[str], list[str]]] = {
    "lines": lambda text: text.split("\n"),
    "paragraphs": lambda text: re.split(r"\n(?:[^\S\n]*\n)+", text),
    "files": lambda text: [text],
}


@dataclass(frozen=True)
class PlainText:
    """UTF-8 files, or a data set of the Hub.

    `train`, `eval`: a file each, or a glob pattern such as `corpus/*.txt`, whose files are read in the order of their
    names. `documents`: a document is a line, a paragraph (between blank lines) or a file; a row of a Hub data set is
    split like a file. `max_train_samples`, `max_eval_samples`: keep a random subset of the documents in their order,
    which `subset_seed` determines; None for all.
    """

    train: str | None = None
    eval: str | None = None
    documents: str = "lines"
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    subset_seed: int = 0
    hub_name: str | None = None
    hub_config: str | None = None
    hub_train: str = "train"
    hub_eval: str = "validation"
    hub_text: str = "text"

    def __post_init__(self) -> None:
        ok = self.documents in _SPLIT
        require(ok, "recipe.data.documents", self.documents, f"use one of {', '.join(_SPLIT)}")
        check_subsets(self, "document")

    def read(self) -> Documents:
        """Read and check the data. Raises UserError, Unavailable."""
        files = local_files(self.train, self.eval, self.hub_name)
        if files is None:
            (train, evaluation), source = self._from_hub(self.hub_train, self.hub_eval), f"Hub: {self.hub_name}"
        else:
            train, evaluation = map(self._from_files, ("recipe.data.train", "recipe.data.eval"), files)
            source = ", ".join(files)
        return Documents(
            self._some(train, self.max_train_samples), self._some(evaluation, self.max_eval_samples), source
        )

    def read_evaluation(self, file: str | None = None) -> Documents:
        """The evaluation set, or all documents of `file`, and no training set. Raises UserError, Unavailable."""
        if file is not None:
            return Documents([], self._from_files("--input", file), file)
        name = evaluation_file(self.eval, self.hub_name)
        if name is not None:
            evaluation, source = self._from_files("recipe.data.eval", name), name
        else:
            (evaluation,), source = self._from_hub(self.hub_eval), f"Hub: {self.hub_name}"
        return Documents([], self._some(evaluation, self.max_eval_samples), source)

    def _some(self, documents: list[str], limit: int | None) -> list[str]:
        return [documents[row] for row in subset(len(documents), limit, self.subset_seed)]

    def _from_files(self, setting: str, given: str) -> list[str]:
        setting = f"{setting}={given}"
        path = os.path.expanduser(given)
        found = [given]
        if not os.path.isfile(path) and glob.has_magic(given):
            found = [name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
            if not found:
                raise UserError(
                    f"{setting} matches no file (looked in {os.path.dirname(os.path.abspath(path))}): check the path"
                )
        documents = self._split(read_text(name, setting if name == given else f"{setting} ({name})") for name in found)
        if not documents:
            raise UserError(f"{setting} contains no text: give a file with text")
        return documents

    def _from_hub(self, *names: str) -> list[list[str]]:
        assert self.hub_name is not None
        found = []
        for name, rows in zip(names, load_splits(self.hub_name, self.hub_config, names, [self.hub_text]), strict=True):
            texts = list(rows[self.hub_text])
            if not all(isinstance(text, str) for text in texts):
                raise UserError(f"recipe.data.hub_text={self.hub_text} is invalid: name a column of texts")
            found.append(self._split(texts))
            if not found[-1]:
                raise UserError(f"recipe.data.hub_name={self.hub_name} has no text in split '{name}': choose another")
        return found

    def _split(self, texts: Iterable[str]) -> list[str]:
        """The documents that are not blank, without line ends around them."""
        parts = (part.strip("\r\n") for text in texts for part in _SPLIT[self.documents](text))
        return [part for part in parts if part.strip()]
