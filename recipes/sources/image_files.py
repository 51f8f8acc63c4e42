"""Images and their classes: a folder for each class, tables with a column of images, or a data set of the Hub."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image

from recipes.sources.labels import Classes, LabelCells, check_label_names
from recipes.sources.rows import Rows, check_columns, is_saved, reading, streamed_rows
from recipes.sources.source import Part, Source
from recipes.tasks.image_classification import FORMATS, LabelledImages, Pictures
from runner.errors import UserError, require

#: Files by which `datasets` knows the classes of images, in place of folders.
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


@dataclass(frozen=True)
class ImageFiles(Source):
    """A folder whose folders are the classes and have their names, or rows with an image and a class.

    Rows are in `.parquet` or `.arrow` files, a folder by `save_to_disk`, or a data set of the Hub, which `hub_name` may
    also give as a folder. `image_column`, `label_column`: of rows; without them the only ones that can be it.
    `label_names`: the classes in the order of their numbers; without them those of the data, or sorted.
    """

    image_column: str | None = None
    label_column: str | None = None
    label_names: Sequence[str] | None = None

    unit = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_names(self.label_names)

    def read(self) -> Pictures:
        self.check_both()
        train, evaluation = self._found("train", labelled=True), self._found("eval", labelled=True)
        names, inferred = self.label_names, tuple[str, ...]()
        if names is None:
            assert train.labels is not None
            names, inferred = Classes().names(train.labels)
        lacking = f"which {'is not in recipe.data.label_names' if self.label_names else 'recipe.data.train lacks'}"
        learned, evaluated = (
            self._read(found, names, lacking, by_number=not inferred) for found in (train, evaluation)
        )
        Classes().check_training(learned.labels, names, self.max_train_samples)
        notes = (*self.leak(learned.digests, evaluated.digests), *inferred)
        return Pictures(learned, evaluated, self.described("train", "eval"), tuple(names), notes=notes)

    def read_part(
        self, part: Part, file: str | None = None, label_names: Sequence[str] | None = None
    ) -> LabelledImages:
        """The training or evaluation set by itself. Raises UserError, and Unavailable as `read` does.

        `file`: in place of the configured one. `label_names`: the classes in the order of their numbers, such as those
        of a saved model. None: all images, at any depth of a folder, without labels, for predictions.
        """
        found = self._found(part, label_names is not None, file)
        return self._read(found, label_names, "which the model lacks", by_number=True)

    def _found(self, part: Part, labelled: bool, file: str | None = None) -> _Found:
        given = self.file(part, file)
        if given is not None and Path(given[0]).expanduser().is_dir() and not is_saved(given[0]):
            for name in ("image_column", "label_column"):
                column = getattr(self, name)
                require(column is None, f"recipe.data.{name}", column, f"{given[1]} is a folder of images; use null")
            return _in_folders(part, Path(given[0]).expanduser(), given[1], labelled)
        rows = self.rows(part) if given is None else streamed_rows(*given)
        image = self.image_column or _only_column(rows, "image", _has_images)
        check_columns(rows, [image])
        read = functools.partial(_of_rows, rows, image, self._folder(given))
        labels = _labels_of(rows, self.label_column or _only_column(rows, "label", _has_classes)) if labelled else None
        return _Found(part, rows.setting, rows.where, read, labels)

    def _folder(self, given: tuple[str, str] | None) -> Path:
        """The folder whose files rows may name: that of their table."""
        path = Path(given[0] if given is not None else self.hub_name or "").expanduser()
        return path if path.is_dir() or given is None else path.parent

    def _read(self, found: _Found, names: Sequence[str] | None, lacking: str, by_number: bool) -> LabelledImages:
        """The images that are kept, read once for their checksums. `lacking`, `by_number`: as of `LabelKind.labels`."""
        labels: Any = None
        chosen: Sequence[int] | None = None
        if names is not None and found.labels is not None:
            labels = Classes().labels(found.labels, names, lacking, by_number)
            chosen = self.chosen(found.part, len(labels), [(label,) for label in labels])
            labels = [labels[row] for row in chosen]
        sizes, digests = [], []
        for image in found.read(chosen):
            sizes.append(len(image))
            digests.append(hashlib.sha256(image).digest())
        if not sizes:
            raise UserError(f"{found.setting} has no images: give a folder or a file with some")
        rows = range(len(sizes)) if chosen is None else chosen
        files = found.files
        return LabelledImages(
            names=[str(row + 1) if files is None else files[row] for row in rows],
            labels=labels,
            sizes=sizes,
            digests=digests,
            where=found.where,
            read=functools.partial(found.read, chosen),
        )


@dataclass(frozen=True)
class _Found:
    """The images of one part, before any is read.

    `where`: what precedes the name or row of one in messages; `read`: the content of those with these numbers, or of
    all, in order; `labels`: None if they are not wanted; `files`: the name of each, where they are files.
    """

    part: Part
    setting: str
    where: str
    read: Callable[[Sequence[int] | None], Iterator[bytes]]
    labels: LabelCells | None
    files: Sequence[str] | None = None


def _in_folders(part: Part, folder: Path, setting: str, labelled: bool) -> _Found:
    """The image files of a folder, and of its folders, by whose names their classes are known if `labelled`."""
    from pandas import Series

    def visible(path: Path) -> bool:
        return not any(name.startswith((".", "__")) for name in path.relative_to(folder).parts)

    suffixes = {suffix for suffix, name in PIL.Image.registered_extensions().items() if name in FORMATS}
    every = (Path(parent, name) for parent, names in _folders(folder) for name in names)
    files = sorted(path for path in every if path.suffix.lower() in suffixes and visible(path))
    names = [path.relative_to(folder).as_posix() for path in files]
    read, labels = functools.partial(_of_files, files, setting), None
    if labelled:
        for metadata in _METADATA:
            if (folder / metadata).is_file():
                raise UserError(f"{setting} has classes in {metadata}: give the folder as recipe.data.hub_name instead")
        for name in names:
            if name.count("/") != 1:
                kind = "directly in it" if "/" not in name else "two or more folders deep"
                raise UserError(f"{setting} has the image {name} {kind}: give a folder with one folder for each class")
        classes = [path.parent.name for path in files]
        for one in sorted(folder.iterdir()):
            if one.is_dir() and visible(one) and one.name not in classes:
                raise UserError(
                    f"{setting} has no image in the folder of the class '{one.name}': remove it, or add some"
                )
        place, known = "the name of its folder", sorted({*classes})
        labels = LabelCells(Series(classes, names, dtype=object), f"{setting}:", place, setting, known)
    return _Found(part, setting, f"{setting}:", read, labels, names)


def _folders(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder at or below this one, also by links, once, and the names of its files."""
    seen = set[str]()
    for parent, below, names in os.walk(folder, followlinks=True):
        below[:] = [one for one in below if os.path.realpath(os.path.join(parent, one)) not in seen]
        seen.update(os.path.realpath(os.path.join(parent, one)) for one in ("", *below))
        yield parent, names


def _labels_of(rows: Rows, column: str) -> LabelCells:
    from pandas import Series

    check_columns(rows, [column])
    with reading(rows.setting, "image"):
        cells = [row[column] for row in rows.dataset.select_columns([column])]
    names = getattr(rows.dataset.features[column], "names", None)
    if names is not None:  # other parts may number them in another order
        cells = [names[cell] if cell is not None and 0 <= cell < len(names) else cell for cell in cells]
    index = range(1, len(cells) + 1)
    place = f"recipe.data.label_column={column}"
    return LabelCells(Series(cells, index, dtype=object), rows.where, place, rows.setting, names)


def _of_files(files: Sequence[Path], setting: str, chosen: Sequence[int] | None) -> Iterator[bytes]:
    for number in range(len(files)) if chosen is None else chosen:
        try:
            yield files[number].read_bytes()
        except OSError as error:
            raise UserError(f"{setting}: {files[number]} cannot be read ({error.strerror}): check the file") from error


def _of_rows(rows: Rows, column: str, folder: Path, chosen: Sequence[int] | None) -> Iterator[bytes]:
    """`folder`: of the table, where the files are that it may name instead of having their content."""
    from datasets import Image

    wanted = None if chosen is None else set(chosen)
    with reading(rows.setting, "image"):
        images = rows.dataset.select_columns([column]).cast_column(column, Image(decode=False))
        for number, row in enumerate(images):
            if wanted is None or number in wanted:
                yield _of_cell(row[column] or {}, f"{rows.where} {number + 1}", folder)


def _of_cell(cell: Mapping[str, Any], where: str, folder: Path) -> bytes:
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HUB_CACHE

    content: bytes | None = cell.get("bytes")
    if content is not None:
        return content
    if not cell.get("path"):
        raise UserError(f"{where} has no image: remove it")
    path = folder / cell["path"]
    # A table may come from somebody else: it does not choose among all files of this machine.
    if not any(path.resolve().is_relative_to(Path(one).resolve()) for one in (folder, HF_DATASETS_CACHE, HF_HUB_CACHE)):
        raise UserError(f"{where} names {path}, which is outside the folder of its table: move it there")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{where} names {path}, which cannot be read ({error.strerror}): check the file") from error


def _only_column(rows: Rows, role: str, fits: Callable[[str, Any], bool]) -> str:
    """The only column whose name and type fit. Raises UserError if there is none, or several."""
    found = [name for name, feature in rows.dataset.features.items() if fits(name, feature)]
    if len(found) != 1:
        which = f"of which {' and '.join(map(repr, found))} could be it" if found else "of which none is recognised"
        raise UserError(
            f"recipe.data.{role}_column=null is ambiguous: {rows.setting} has the columns {', '.join(rows.names)}, "
            f"{which}; set recipe.data.{role}_column to one of them"
        )
    return found[0]


def _has_images(name: str, feature: Any) -> bool:
    """Images of `datasets`, or their content as other programs write it."""
    from datasets import Image

    structure = isinstance(feature, dict) and "bytes" in feature
    return isinstance(feature, Image) or structure or getattr(feature, "dtype", None) in ("binary", "large_binary")


def _has_classes(name: str, feature: Any) -> bool:
    from datasets import ClassLabel

    return isinstance(feature, ClassLabel) or name.lower() in Classes.usual
