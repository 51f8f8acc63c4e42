"""Plain text, document by document, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.sources.sources import hub_parts, hub_words, local_files, local_path, read_text
from recipes.tasks.language_model import Documents, ExpectedText
from recipes.tasks.packing import Size
from runner.errors import UserError, did_you_mean, require

#: What of a file's text is a document. A blank line may hold blanks.
_SPLIT: dict[str, Callable[[str], list[str]]] = {
    "lines": lambda text: text.split("\n"),
    "paragraphs": lambda text: re.split(r"\n(?:[^\S\n]*\n)+", text),
    "files": lambda text: [text],
}

#: Characters that make a path a pattern.
_PATTERN = set("*?[")


@dataclass(frozen=True)
class KnownSize:
    """How much text a data set of the Hub holds, for a plan that is made without it.

    `of`: the data set with its parts, written `owner/name/config (train part, evaluation part)`: the numbers are of no
    use for another one. `train_documents`, `eval_documents`: its rows that are not blank. `train_tokens`,
    `eval_tokens`: about how many GPT-2's tokenizer makes of them.
    """

    of: str
    train_documents: int
    train_tokens: int
    eval_documents: int
    eval_tokens: int


@dataclass(frozen=True)
class PlainText:
    """UTF-8 files, or a data set of the Hub.

    `train`, `eval`: a file each, or a pattern such as `corpus/*.txt`, whose files are taken in the order of their
    names. `documents`: what is one: a line, what stands between blank lines, or a whole file; of the Hub's data a row
    is what a file is elsewhere. `max_train_samples`, `max_eval_samples`: documents that are taken, from the first on;
    None for all. `hub_*`: the Hub's names.
    """

    train: str | None = None
    eval: str | None = None
    documents: str = "lines"
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    hub_name: str | None = None
    hub_config: str | None = None
    hub_train: str = "train"
    hub_eval: str = "validation"
    hub_text: str = "text"
    hub_size: KnownSize | None = None

    def __post_init__(self) -> None:
        if self.documents not in _SPLIT:
            raise UserError(
                f"recipe.data.documents={self.documents} is no kind of document{did_you_mean(self.documents, _SPLIT)}"
            )
        for name in ("max_train_samples", "max_eval_samples"):
            count, rule = getattr(self, name), "it must be at least 1 document, or null for all"
            require(count is None or count >= 1, f"recipe.data.{name}", count, rule)
        if self.hub_size is not None and not isinstance(self.hub_size, KnownSize):
            raise UserError("recipe.data.hub_size is no KnownSize: leave it as it is, or set recipe.data.hub_size=null")

    def read(self) -> Documents:
        """Read and check the data. Raises UserError, and Unavailable where the Hub is needed and cannot be had."""
        files = local_files(self.train, self.eval, self.hub_name)
        if files is None:
            train, evaluation = self._from_hub(str(self.hub_name))
            source = f"Hub: {self._hub_words}"
        else:
            train, evaluation = (self._from_files(*one) for one in zip(("train", "eval"), files, strict=True))
            source = ", ".join(files)
        return Documents(train[: self.max_train_samples], evaluation[: self.max_eval_samples], source)

    def expected(self) -> ExpectedText | None:
        """The size of the Hub's copy, as far as it would be taken; None where it is not known."""
        known = self.hub_size
        if self.train is not None or self.eval is not None or known is None or known.of != self._hub_words:
            return None
        return ExpectedText(
            _first(Size(known.train_documents, known.train_tokens), self.max_train_samples),
            _first(Size(known.eval_documents, known.eval_tokens), self.max_eval_samples),
            f"the size of {self._hub_words} on the Hub, in tokens of GPT-2's tokenizer",
        )

    @property
    def _hub_words(self) -> str:
        return hub_words(self.hub_name, self.hub_config, self.hub_train, self.hub_eval)

    def _from_files(self, part: str, given: str) -> list[str]:
        setting = f"recipe.data.{part}={given}"
        found = _split(_texts(given, setting), self.documents)
        if not found:
            raise UserError(f"{setting} holds no text: give a file with some")
        return found

    def _from_hub(self, name: str) -> list[list[str]]:
        names = (self.hub_train, self.hub_eval)
        found = []
        for part, rows in zip(names, hub_parts(name, self.hub_config, names, [self.hub_text]), strict=True):
            texts = list(rows[self.hub_text])
            if not all(isinstance(text, str) for text in texts):
                raise UserError(f"recipe.data.hub_text={self.hub_text} is no column of texts: name one that is")
            found.append(_split(texts, self.documents))
            if not found[-1]:
                raise UserError(f"recipe.data.hub_name={name} holds no text in its part '{part}': choose another part")
        return found


def _first(size: Size, documents: int | None) -> Size:
    if documents is None or documents >= size.documents:
        return size
    return Size(documents, round(size.tokens * documents / size.documents))


def _split(texts: Iterable[str], how: str) -> list[str]:
    """Documents without the line ends around them; blank ones are none."""
    parts = (part.strip("\r\n") for text in texts for part in _SPLIT[how](text))
    return [part for part in parts if part.strip()]


def _texts(given: str, setting: str) -> Iterator[str]:
    path = local_path(given, setting)
    if path.is_dir():
        raise UserError(f"{setting} is a folder: give a file, or a pattern such as {given.rstrip('/')}/*.txt")
    if path.is_file() or not _PATTERN & set(given):  # a file's own name may hold brackets, too
        yield read_text(given, setting, "a file")
        return
    found = [name for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not found:
        raise UserError(f"{setting} matches no file (looked in {path.absolute().parent}): check the path")
    for name in found:
        yield read_text(name, f"{setting}, of which {name} is one,", "a file")
