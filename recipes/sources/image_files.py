"""Images and their classes: a folder for each class, tables with a column of images, or a data set of the Hub."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.sources.labels import Classes, LabelCells, check_label_names
from recipes.sources.rows import Rows, check_columns, is_saved, reading, streamed_rows
from recipes.sources.source import Part, Source
from recipes.tasks.image_classification import LabelledImages, Pictures
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
            names, inferred = Classes().names(train.labels)
        lacking = f"which {'is not in recipe.data.label_names' if self.label_names else 'recipe.data.train lacks'}"
        learned, evaluated = (self._read(found, names, lacking) for found in (train, evaluation))
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
        return self._read(self._found(part, label_names is not None, file), label_names, "which the model lacks")

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
        read = functools.partial(_of_rows, rows, image)
        if not labelled:
            return _Found(part, rows.setting, rows.where, read)
        label = self.label_column or _only_column(rows, "label", _has_classes)
        check_columns(rows, [label])
        with reading(rows.setting, "image"):
            cells = [row[label] for row in rows.dataset.select_columns([label])]
        names = getattr(rows.dataset.features[label], "names", None)
        if names is not None:  # other parts may number them in another order
            cells = [names[cell] if cell is not None and 0 <= cell < len(names) else cell for cell in cells]
        place = f"recipe.data.label_column={label}"
        return _Found(part, rows.setting, rows.where, read, None, cells, place, names)

    def _read(self, found: _Found, names: Sequence[str] | None, lacking: str) -> LabelledImages:
        """The images that are kept, read once for their checksums. `lacking`: follows an unknown class."""
        labels: Any = None if names is None else Classes().labels(found.labels, names, lacking, by_number=False)
        chosen = None if labels is None else self.chosen(found.part, len(labels), [(label,) for label in labels])
        sizes, digests = [], []
        for image in found.read(chosen):
            sizes.append(len(image))
            digests.append(hashlib.sha256(image).digest())
        if not sizes:
            raise UserError(f"{found.setting} has no images: give a folder or a file with some")
        rows = range(len(sizes)) if chosen is None else chosen
        return LabelledImages(
            names=[found.files[row] if found.files is not None else str(row + 1) for row in rows],
            labels=None if labels is None else [labels[row] for row in chosen or ()],
            sizes=sizes,
            digests=digests,
            where=found.where,
            read=functools.partial(found.read, chosen),
        )


@dataclass(frozen=True)
class _Found:
    """The images of one part, before any is read.

    `read`: the content of those with these numbers, or of all, in order; `files`: the name of each, where they are
    files; `cells`: the class of each; `place`: where these are, as the user knows it; `names`: of the classes, if the
    data say so.
    """

    part: Part
    setting: str
    where: str
    read: Callable[[Sequence[int] | None], Iterator[bytes]]
    files: Sequence[str] | None = None
    cells: Sequence[Any] = ()
    place: str = ""
    names: Sequence[str] | None = None

    @property
    def labels(self) -> LabelCells:
        import pandas

        index = range(1, len(self.cells) + 1) if self.files is None else self.files
        cells = pandas.Series(self.cells, index, dtype=object)
        return LabelCells(cells, self.where, self.place, self.setting, self.names)


def _in_folders(part: Part, folder: Path, setting: str, labelled: bool) -> _Found:
    """The image files of a folder, and of its folders, by whose names their classes are known if `labelled`."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    def visible(path: Path) -> bool:
        return not any(name.startswith((".", "__")) for name in path.relative_to(folder).parts)

    files = [path for path in folder.rglob("*") if path.suffix.lower() in ImageFolder.EXTENSIONS and visible(path)]
    files.sort()
    names = [path.relative_to(folder).as_posix() for path in files]
    found = _Found(part, setting, f"{setting}:", functools.partial(_of_files, files, setting), names)
    if not labelled:
        return found
    for name in _METADATA:
        if (folder / name).is_file():
            raise UserError(f"{setting} has classes in {name}: give the folder as recipe.data.hub_name instead")
    for name in names:
        if name.count("/") != 1:
            kind = "directly in it" if "/" not in name else "two or more folders deep"
            raise UserError(f"{setting} has the image {name} {kind}: give a folder with one folder for each class")
    classes = [path.parent.name for path in files]
    for one in sorted(folder.iterdir()):
        if one.is_dir() and visible(one) and one.name not in classes:
            raise UserError(f"{setting} has no image in the folder of the class '{one.name}': remove it, or add some")
    return _Found(part, setting, found.where, found.read, names, classes, "the name of its folder", sorted({*classes}))


def _of_files(files: Sequence[Path], setting: str, chosen: Sequence[int] | None) -> Iterator[bytes]:
    for number in range(len(files)) if chosen is None else chosen:
        try:
            yield files[number].read_bytes()
        except OSError as error:
            raise UserError(f"{setting}: {files[number]} cannot be read ({error.strerror}): check the file") from error


def _of_rows(rows: Rows, column: str, chosen: Sequence[int] | None) -> Iterator[bytes]:
    from datasets import Image

    wanted = None if chosen is None else set(chosen)
    with reading(rows.setting, "image"):
        images = rows.dataset.select_columns([column]).cast_column(column, Image(decode=False))
        for number, row in enumerate(images):
            if wanted is None or number in wanted:
                cell = row[column]
                if cell is None:
                    raise UserError(f"{rows.where} {number + 1} has no image: remove it")
                yield cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()


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
