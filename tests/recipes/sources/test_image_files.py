"""Images from folders, tables and the Hub's layout: the same samples whichever it is, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from recipes.sources.image_files import ImageFiles
from runner.errors import UserError
from tests.recipes import pictures
from tests.recipes.pictures import CLASSES, encoded, picture


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    pictures.write_folder(tmp_path / "train", 12)
    pictures.write_folder(tmp_path / "eval", 6, first=50)
    return tmp_path / "train", tmp_path / "eval"


def source(folders: tuple[Path, Path], **settings: Any) -> ImageFiles:
    return ImageFiles(str(folders[0]), str(folders[1]), **settings)


def rows(folder: Path) -> dict[str, list[Any]]:
    """The files of a folder in their order, with the numbers of their classes."""
    files = sorted(folder.rglob("*.png"))
    images = [{"bytes": file.read_bytes(), "path": None} for file in files]
    return {"image": images, "label": [CLASSES.index(file.parent.name) for file in files]}


FEATURES = Features({"image": Image(), "label": ClassLabel(names=list(CLASSES))})


def as_parquet(folder: Path, features: Features | None = FEATURES) -> Path:
    Dataset.from_dict(rows(folder), features=features).to_parquet(folder.with_suffix(".parquet"))
    return folder.with_suffix(".parquet")


def as_saved(folder: Path) -> Path:
    Dataset.from_dict(rows(folder), features=FEATURES).save_to_disk(folder.with_suffix(".saved"))
    return folder.with_suffix(".saved")


def test_a_folder_for_each_class(folders: tuple[Path, Path]) -> None:
    (folders[0] / "red" / "notes.txt").write_text("no image")
    (folders[0] / ".thumbnails").mkdir()
    found = source(folders).read()
    files = sorted(path.relative_to(folders[0]).as_posix() for path in folders[0].rglob("*.png"))
    assert (found.train.names, found.label_names) == (files, CLASSES)
    assert found.train.labels == [CLASSES.index(name.split("/")[0]) for name in files]
    assert list(found.train.read()) == [(folders[0] / name).read_bytes() for name in files]
    assert found.train.sizes == [len(image) for image in found.train.read()]
    assert (len(found.eval), found.notes) == (6, ())


def test_folders_that_are_links(folders: tuple[Path, Path]) -> None:
    expected = source(folders).read()
    (folders[0] / "red").rename(folders[0].parent / "elsewhere")
    (folders[0] / "red").symlink_to(folders[0].parent / "elsewhere")
    (folders[0] / "red" / "loop").symlink_to(folders[0])
    (folders[0] / "red" / "again").symlink_to(folders[0])
    assert source(folders).read().digest == expected.digest


@pytest.mark.parametrize("table", [as_parquet, as_saved])
def test_tables_have_the_samples_of_folders(folders: tuple[Path, Path], table: Callable[[Path], Path]) -> None:
    found, expected = source((table(folders[0]), table(folders[1]))).read(), source(folders).read()
    assert (found.digest, found.label_names) == (expected.digest, expected.label_names)
    assert list(found.eval.read()) == list(expected.eval.read())


def test_a_folder_in_the_layout_of_the_hub(folders: tuple[Path, Path]) -> None:
    folders[1].rename(folders[1].parent / "validation")
    found = ImageFiles(hub_name=str(folders[0].parent)).read()
    assert (len(found.train), len(found.eval), found.label_names) == (12, 6, CLASSES)


def test_columns_of_other_programs(folders: tuple[Path, Path]) -> None:
    """Content as bytes, and classes as text, under names that are given."""
    for folder in folders:
        own = rows(folder)
        columns = {"scan": [one["bytes"] for one in own["image"]], "kind": [CLASSES[one] for one in own["label"]]}
        features = Features({"scan": Value("binary"), "kind": Value("string")})
        Dataset.from_dict(columns, features=features).to_parquet(folder.with_suffix(".parquet"))
    tables = (folders[0].with_suffix(".parquet"), folders[1].with_suffix(".parquet"))
    found = source(tables, label_column="kind").read()
    assert found.label_names == CLASSES
    assert [note for note in found.notes if "'blue' is class 0" in note]
    with pytest.raises(UserError, match=r"recipe\.data\.label_column=null .* scan, kind"):
        source(tables).read()


def test_numbers_of_classes(folders: tuple[Path, Path]) -> None:
    """As other programs write them; `label_names` names them."""
    features = Features({"image": Image(), "label": Value("int64")})
    tables = (as_parquet(folders[0], features), as_parquet(folders[1], features))
    expected = source(folders).read()
    numbered = source(tables).read()
    assert (numbered.label_names, numbered.eval.labels) == (("0", "1", "2"), expected.eval.labels)
    named = source(tables, label_names=["x", "y", "z"]).read()
    assert (named.label_names, named.eval.labels) == (("x", "y", "z"), expected.eval.labels)
    assert source(tables).read_part("eval", str(tables[1]), ["x", "y", "z"]).labels == expected.eval.labels


def test_a_table_that_names_files(folders: tuple[Path, Path]) -> None:
    """Relative to its own folder, or below it; not elsewhere, which the table of somebody else could name, too."""

    def naming(*paths: str | Path) -> Path:
        columns = {
            "image": [{"bytes": None, "path": str(path)} for path in paths],
            "label": [Path(path).parent.name for path in paths],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), folders[0] / "table.parquet")
        return folders[0] / "table.parquet"

    names = [file.relative_to(folders[0]) for file in sorted(folders[0].rglob("*.png"))]
    assert source((naming(*names), folders[1])).read().digest == source(folders).read().digest
    outside = next((folders[1] / "red").iterdir())
    (folders[0] / "link").symlink_to(folders[1])
    for path in (outside, Path("..", "eval", "red", outside.name), Path("link", "red", outside.name)):
        with pytest.raises(UserError, match=r"row 13 names .*red.*, which is outside"):
            source((naming(*names, path), folders[1])).read()
    with pytest.raises(UserError, match=r"row 13 names .*lost\.png, which cannot be read"):
        source((naming(*names, Path("red", "lost.png")), folders[1])).read()


def test_saved_data_that_name_files(folders: tuple[Path, Path]) -> None:
    """Not even those beside their folder."""
    file = next(folders[0].rglob("*.png"))
    columns = {"image": [{"bytes": None, "path": f"../train/red/{file.name}"}], "label": [0]}
    features = Features({"image": {"bytes": Value("binary"), "path": Value("string")}, "label": Value("int64")})
    Dataset.from_dict(columns, features=features).save_to_disk(folders[0].with_suffix(".saved"))
    with pytest.raises(UserError, match=r"row 1 names .*, which is outside"):
        source((folders[0].with_suffix(".saved"), folders[1])).read()


def test_classes_are_matched_by_name(folders: tuple[Path, Path]) -> None:
    """Another part may number them in another order."""
    other = {**rows(folders[1])}
    order = list(reversed(CLASSES))
    other["label"] = [order.index(CLASSES[label]) for label in other["label"]]
    features = Features({"image": Image(), "label": ClassLabel(names=order)})
    Dataset.from_dict(other, features=features).to_parquet(folders[1].with_suffix(".parquet"))
    found = source((as_parquet(folders[0]), folders[1].with_suffix(".parquet"))).read()
    assert found.eval.labels == source(folders).read().eval.labels


def test_a_part_held_out_and_a_subset(folders: tuple[Path, Path]) -> None:
    whole = source(folders).read().train
    held = ImageFiles(str(folders[0]), eval_share=0.25, max_train_samples=6).read()
    assert (len(held.train), len(held.eval)) == (6, 3)
    assert not set(held.train.names) & set(held.eval.names)
    by_name = dict(zip(whole.names, whole.read(), strict=True))
    assert list(held.train.read()) == [by_name[name] for name in held.train.names]


def test_the_same_images_in_both_parts_are_noted(folders: tuple[Path, Path]) -> None:
    assert "12 of 12 images" in " ".join(source((folders[0], folders[0])).read().notes)


def test_images_to_predict_for(folders: tuple[Path, Path]) -> None:
    """At any depth, without classes, in the order of their names."""
    mixed = folders[0].parent / "mixed"
    for name in ("b.png", "some/more/a.jpg", "c.txt"):
        (mixed / name).parent.mkdir(parents=True, exist_ok=True)
        (mixed / name).write_bytes(encoded(picture(1, 0)))
    found = source(folders).read_part("eval", str(mixed))
    assert (found.names, found.labels) == (["b.png", "some/more/a.jpg"], None)


def _empty_class(train: Path, evaluation: Path) -> None:
    (train / "yellow").mkdir()


def _unknown_class(train: Path, evaluation: Path) -> None:
    shutil.copytree(evaluation / "red", evaluation / "pink")


def _no_images(train: Path, evaluation: Path) -> None:
    for file in evaluation.rglob("*.png"):
        file.unlink()
    for folder in evaluation.iterdir():
        folder.rmdir()


def _without_classes(train: Path, evaluation: Path) -> None:
    (train / "red" / "002.png").rename(train / "002.png")


def _too_deep(train: Path, evaluation: Path) -> None:
    train.rename(train.parent / "moved")
    shutil.move(train.parent / "moved", train / "train")


def _one_class(train: Path, evaluation: Path) -> None:
    for name in ("blue", "green"):
        shutil.rmtree(train / name)
        shutil.rmtree(evaluation / name)


def _metadata(train: Path, evaluation: Path) -> None:
    (train / "metadata.csv").write_text("file_name,label\nred/002.png,red\n")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_empty_class, ("data.train=", "'yellow'")),
        (_unknown_class, ("data.eval=", "pink/", "'pink'", "recipe.data.train lacks")),
        (_no_images, ("data.eval=", "no image")),
        (_without_classes, ("data.train=", "002.png", "one folder for each class")),
        (_too_deep, ("data.train=", "train/blue/", "one folder for each class")),
        (_one_class, ("data.train", "nothing to learn")),
        (_metadata, ("metadata.csv", "hub_name")),
    ],
)
def test_wrong_folders(
    folders: tuple[Path, Path], change: Callable[[Path, Path], None], named: tuple[str, ...]
) -> None:
    change(*folders)
    with pytest.raises(UserError) as caught:
        source(folders).read()
    assert "\n" not in str(caught.value)
    assert [one for one in named if one not in str(caught.value)] == []


def test_wrong_tables(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text("image,label\na.png,red\n")
    with pytest.raises(UserError, match=r"images\.csv is neither"):
        source((tmp_path / "images.csv", folders[1])).read()
    own = rows(folders[0])
    own["image"][3] = None
    Dataset.from_dict(own, features=FEATURES).to_parquet(tmp_path / "gap.parquet")
    with pytest.raises(UserError, match=r"gap\.parquet: row 4 has no image"):
        source((tmp_path / "gap.parquet", folders[1])).read()
    (tmp_path / "damaged.parquet").write_bytes(as_parquet(folders[0]).read_bytes()[:-200])
    with pytest.raises(UserError, match=r"damaged\.parquet"):
        source((tmp_path / "damaged.parquet", folders[1])).read()
